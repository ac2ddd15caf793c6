"""What the server's processes say to each other: typed, validated messages and their encoding.

Generated from notebooks/12_server.ipynb: edit there.
"""

from __future__ import annotations

from typing import Any

import msgspec

from minisgl.core import SamplingParams
from minisgl.scheduler.messages import AbortMsg, ErrorReply, ExitMsg, TokenReply, UserMsg


class TokenizeMsg(msgspec.Struct, tag=True, kw_only=True):
    """Frontend to text worker: one request as text, as messages or as token ids."""

    uid: int
    sampling_params: SamplingParams
    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    input_ids: list[int] | None = None


class UserReply(msgspec.Struct, tag=True, kw_only=True):
    """Text worker to frontend: text that became readable, and the counts so far."""

    uid: int
    text: str
    token_ids: list[int]
    finished: bool = False
    finish_reason: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


ToText = TokenizeMsg | AbortMsg | TokenReply | ErrorReply | ExitMsg
ToScheduler = UserMsg | AbortMsg | ExitMsg
ToFrontend = UserReply | ErrorReply
Message = TokenizeMsg | AbortMsg | TokenReply | ErrorReply | ExitMsg | UserMsg | UserReply


class Codec:
    """Messages to bytes and back; one that does not fit raises `msgspec.ValidationError`."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Message)

    def encode(self, msg: Message) -> bytes:
        return self._encoder.encode(msg)

    def decode(self, data: bytes) -> Message:
        return self._decoder.decode(data)
