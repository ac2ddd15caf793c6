"""A text worker that tells a prompt before its answer, if its log probabilities came along.

Generated from notebooks/12b_running.ipynb: edit there.
"""

from __future__ import annotations

from typing import Any

from minisgl.scheduler.messages import PromptToken, TokenReply
from minisgl.server.workers.logprobs import HeldLogprobs
from minisgl.server.workers.messages import TokenLogprob, UserReply
from minisgl.server.workers.text_worker import OpenText, TextWorker
from minisgl.token_bytes import TokenBytes
from minisgl.tokenizer import DecodeStatus


class EchoWorker(TextWorker):
    """A text worker for whose requests `TokenReply.prompt_logprobs` means an echo."""

    def _reply(self, msg: TokenReply, entry: OpenText, text: str) -> UserReply:
        held: Any = entry.logprobs
        prompt, told = "", list[TokenLogprob]()
        if msg.prompt_logprobs:
            prompt, told = self.spell(msg.prompt_logprobs)
            held.echo(len(prompt))
        if held.echoes and msg.finish_reason == "stop":  # an end token was not added yet
            held.add(msg)
        reply = super()._reply(msg, entry, text)
        reply.text, reply.logprobs = prompt + reply.text, told + reply.logprobs
        return reply

    def spell(self, prompt: list[PromptToken]) -> tuple[str, list[TokenLogprob]]:
        """Return a prompt as text, and an entry for each of its tokens."""
        status = DecodeStatus(self._tokenizer)
        held, text, told = HeldLogprobs(status, TokenBytes(self._tokenizer)), "", []
        held.echo(0)
        for token, logprob, top in prompt:
            held.add(TokenReply(uid=0, token=token, logprob=logprob or 0.0, top_logprobs=top))
            text += (piece := status.push(token))
            told += held.take(piece, False)
        told += held.take(rest := status.finish(), True)
        told[0].logprob = None
        return text + rest, told
