"""What a client may send: the OpenAI shapes that we honour, as pydantic models.

Generated from notebooks/12_server.ipynb: edit there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from minisgl.core import SamplingParams


def valid_unicode(text: str) -> str:
    """JSON can spell half of a character, an unpaired surrogate; no message can carry it on."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"unpaired surrogate at character {error.start}") from None
    return text


Text = Annotated[str, AfterValidator(valid_unicode)]
Count = Annotated[int, Field(lt=2**63)]  # what a message can hold; ranges are checked later
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class ApiError(Exception):
    """An error that becomes `{"error": {message, type, param, code}}` with an HTTP status."""

    def __init__(self, status: int, message: str, *, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        }


class TextPart(BaseModel):
    """One text part of a message; images and sound are refused by their type."""

    type: Literal["text"]
    text: Text


class ChatMessage(BaseModel):
    """One turn of a conversation."""

    model_config = ConfigDict(extra="ignore")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | list[TextPart] | None = None

    def as_template_input(self) -> dict[str, str]:
        """Plain role and string, the only shape that every chat template understands."""
        if isinstance(self.content, list):
            return {"role": self.role, "content": "".join(part.text for part in self.content)}
        return {"role": self.role, "content": self.content or ""}


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="ignore")
    include_usage: bool | None = None


class GenerationRequest(BaseModel):
    """What chat and plain completions share. Unknown fields are ignored, null means the default."""

    model_config = ConfigDict(extra="ignore")
    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Count | None = None
    max_tokens: Count | None = None
    stop: Text | list[Text] | None = None
    stop_token_ids: list[TokenId] | None = None
    seed: int | None = None
    n: int | None = Field(default=None, ge=1, le=128)
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def token_limit(self) -> int | None:
        """New tokens asked for; None means up to the context window."""
        return self.max_tokens

    def sampling_params(self, defaults: Mapping[str, Any], index: int = 0) -> SamplingParams:
        """The engine's params: what the client set, else what the model advises, else ours.

        `index` numbers the answers of one request (`n`): with a seed, each must still differ.
        """
        asked = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "max_tokens": self.token_limit(),
            "stop": self.stop,
            "stop_token_ids": self.stop_token_ids,
            "seed": None if self.seed is None else (self.seed + index) % 2**63,
            "ignore_eos": self.ignore_eos,
        }
        if self.top_k == 0:  # many clients spell "off" so
            asked["top_k"] = -1
        chosen = {**defaults, **{name: value for name, value in asked.items() if value is not None}}
        try:
            return SamplingParams(**chosen)
        except (ValueError, TypeError) as error:
            # Our messages begin with the field: "top_p: must be in (0, 1], got 3".
            param = str(error).split(":", 1)[0]
            raise ApiError(400, str(error), code="invalid_value", param=param) from error


class ChatRequest(GenerationRequest):
    """Body of `POST /v1/chat/completions`."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: Count | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    response_format: dict[str, Any] | None = None
    logprobs: bool | None = None

    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def refuse_unsupported(self) -> None:
        """Say no to what would change the answer; let pass what would not."""
        if self.tools and self.tool_choice != "none":
            raise ApiError(
                400, "tools: calling tools is not supported", code="unsupported", param="tools"
            )
        if (self.response_format or {}).get("type", "text") != "text":
            raise ApiError(
                400,
                f"response_format: only type 'text' is supported, got {self.response_format!r}",
                code="unsupported",
                param="response_format",
            )
        if self.logprobs:
            raise ApiError(
                400, "logprobs: not served over HTTP yet", code="unsupported", param="logprobs"
            )


class CompletionRequest(GenerationRequest):
    """Body of `POST /v1/completions`: one prompt or several, as text or as token ids."""

    prompt: Text | list[TokenId] | list[Text] | list[list[TokenId]]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None

    def prompts(self) -> list[str | list[int]]:
        """One entry per prompt. An empty list is one empty prompt, and is refused later as such."""
        if isinstance(self.prompt, str) or all(isinstance(token, int) for token in self.prompt):
            return [self.prompt]  # type: ignore[list-item]
        return list(self.prompt)  # type: ignore[arg-type]

    def refuse_unsupported(self) -> None:
        for name in ("logprobs", "echo", "suffix"):
            value = getattr(self, name)
            if value is not None and value is not False and value != "":  # logprobs=0 asks for some
                raise ApiError(400, f"{name}: not supported", code="unsupported", param=name)
