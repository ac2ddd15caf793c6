"""Request bodies of the OpenAI API, as pydantic models.

Generated from notebooks/12bb_fields.ipynb: edit there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    ModelWrapValidatorHandler,
    model_validator,
)
from pydantic.json_schema import SkipJsonSchema
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from minisgl.core import GRAMMARS, MAX_LOGPROBS, SamplingParams
from minisgl.scheduler.queue import Shares
from minisgl.server.http.bodies import HOLD, renamed_errors
from minisgl.server.http.calls import ChatAbilities
from minisgl.server.http.chats import ChatMessage, ToolFields
from minisgl.server.http.errors import ApiError
from minisgl.server.http.fields import check_fields, template_variables, translate
from minisgl.server.http.limits import FREE
from minisgl.server.http.tools import Text
from minisgl.server.workers.messages import TokenLogprob
from minisgl.tokenizer import text_of

Count = Annotated[int, Field(ge=0, lt=2**63)]
Limit = Annotated[int, Field(gt=0, lt=2**63)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenKey = Annotated[TokenId, Field(strict=False)]  # the keys of a JSON object are strings
StopText = Annotated[Text, Field(max_length=1024)]
BadWord = Annotated[Text, Field(max_length=64)]  # the text worker spells each one twice
BadIds = Annotated[list[TokenId], Field(min_length=1, max_length=64)]
Salt = Annotated[Text, Field(min_length=1, max_length=1024)]
MAX_ANSWERS = 1024  # of one HTTP request: prompts times n
MAX_SCORES = 2**18  # log probabilities of its prompts, if each character were a token


def without_repeats(ids: list[int]) -> list[int]:
    """Return the same ids, each once, so that no list is longer than the vocabulary."""
    return list(dict.fromkeys(ids))


class StreamOptions(BaseModel, strict=True, extra="forbid"):
    """Optional parts of a stream."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: usage in each chunk
    include_obfuscation: Literal[False] | None = None  # OpenAI's padding


class TranslatedBody(BaseModel, extra="allow"):
    """A body in any dialect; its fields have our names."""

    renamed: SkipJsonSchema[dict[str, str]] = {}  # the client's names of our fields

    @model_validator(mode="wrap")
    @classmethod
    def enter(cls, given: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        """Translate the body; errors name its fields as the client did."""
        if not isinstance(given, Mapping):
            return validate(given)
        body, names = translate(given)
        with renamed_errors(names):
            return validate({**body, "renamed": names})


def joined_text(content: str | Sequence[BaseModel] | None) -> str:
    """Return the content of a message, as a text or as parts of one, as one text."""
    parts = content if isinstance(content, str | None) else [one.model_dump() for one in content]
    return text_of("content", parts)


class GenerationRequest(TranslatedBody, strict=True):
    """Fields of all requests. Unknown ones are kept for `prepare`; null means the default."""

    model: str | None = None
    temperature: Any = None
    top_p: Any = None
    top_k: Any = None
    max_tokens: Limit | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=64)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024)] | None = None
    seed: int | None = None
    n: int | None = Field(default=None, ge=1, le=128)
    ignore_eos: Any = None
    cache_salt: Salt | None = None
    extra_key: Salt | None = None  # SGLang's name of it; given both, only both together match
    min_p: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    repetition_penalty: Any = None
    logit_bias: Annotated[dict[TokenKey, float], Field(max_length=1024)] | None = None
    min_tokens: Any = None
    bad_words: Annotated[list[BadWord | BadIds], Field(max_length=256)] | None = None
    allowed_token_ids: Annotated[list[TokenId], AfterValidator(without_repeats)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    timeout: float | None = Field(default=None, gt=0, allow_inf_nan=False)  # seconds
    user: Annotated[Text, Field(max_length=1024)] | None = None  # the end user
    echo: Literal[False] | None = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def thoughts_apart(self) -> bool:
        """True if thoughts are no part of the content."""
        return False

    @property
    def usage_in_chunks(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def wanted_logprobs(self) -> int | None:
        """Return the likely tokens to list beside each sampled one; None: no log probability."""
        return None

    def prepare(self, can: ChatAbilities) -> None:
        """Reject unsupported fields that would change the answer; accept those that would not."""
        check_fields(self.model_extra or {}, {*type(self).model_fields, *GRAMMARS}, self.n)

    def answer_form(self) -> dict[str, Any]:
        """Return the required form of the answer, as fields of `SamplingParams`."""
        extra = self.model_extra or {}
        return {name: extra[name] for name in GRAMMARS if extra.get(name)}

    def client_name(self, ours: str | None) -> str | None:
        """Return the client's name of one of our fields."""
        return self.renamed.get(ours or "", ours)

    def sampling_params(
        self, defaults: Mapping[str, Any], namespace: str | None = None
    ) -> SamplingParams:
        """Make the engine's parameters from the client's, else the model's, else our defaults."""
        names = {field.name for field in fields(SamplingParams)} - set(GRAMMARS)
        asked = self.model_dump(include=names)
        asked["logprobs"], asked["spare_thoughts"] = self.wanted_logprobs(), self.thoughts_apart
        asked["seed"] = None if self.seed is None else self.seed % 2**63
        salts = (namespace, self.cache_salt, self.extra_key)
        asked["cache_salt"] = "\0".join(salt for salt in salts if salt is not None) or None
        asked["prompt_logprobs"] = (asked["logprobs"] or 0) if self.echo else None
        asked |= self.answer_form()
        chosen = {**defaults, **{name: value for name, value in asked.items() if value is not None}}
        try:
            return SamplingParams(**chosen)
        except (ValueError, TypeError) as error:
            # Our messages begin with the field: "top_p: must be in (0, 1], got 3".
            ours, why = str(error).split(":", 1)
            param = self.client_name(ours)
            raise ApiError(400, f"{param}:{why}", code="invalid_value", param=param) from error


class ChatRequest(ToolFields, GenerationRequest):
    """Body of `POST /v1/chat/completions`."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=16384)
    chat_template_kwargs: Annotated[dict, AfterValidator(template_variables)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: Annotated[Text, Field(max_length=64)] | None = None
    enable_thinking: bool | None = None
    add_special_tokens: Literal[False] | None = None  # the template writes them
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)

    def wanted_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def prompt(self) -> dict[str, Any]:
        """Return the conversation and the variables of its template."""
        names = ("add_generation_prompt", "continue_final_message")
        given = self.model_dump(include={*names, "reasoning_effort", "enable_thinking"})
        given["thinking"] = self.enable_thinking  # another name of the same variable
        variables = {name: value for name, value in given.items() if value is not None}
        if self.shown_tools:
            variables["tools"] = [tool.as_template_input() for tool in self.shown_tools]
        return {
            "messages": [message.as_template_input() for message in self.messages],
            "template_kwargs": {**(self.chat_template_kwargs or {}), **variables},
        }

    def prepare(self, can: ChatAbilities) -> None:
        """Check the body, and decide by `can` what the answer may call and must look like."""
        GenerationRequest.prepare(self, can)
        if self.top_logprobs and not self.logprobs:
            why = "top_logprobs: needs logprobs to be true"
            raise ApiError(400, why, code="unsupported", param="top_logprobs")
        try:
            self.decide(can, GenerationRequest.answer_form(self))
        except ValueError as error:
            param = str(error).split(":", 1)[0]
            raise ApiError(400, str(error), code="invalid_value", param=param) from None

    def answer_form(self) -> dict[str, Any]:
        return self._form or GenerationRequest.answer_form(self)

    def client_name(self, ours: str | None) -> str | None:
        given = GenerationRequest.answer_form(self)
        if ours == "structural_tag" and ours not in given:  # ours, from the requested form
            ours = next(iter(given), ours)
        return "messages" if ours == "prompt" else GenerationRequest.client_name(self, ours)


class CompletionRequest(GenerationRequest):
    """Body of `POST /v1/completions`: one prompt or several, as text or as token ids."""

    prompt: Text | list[TokenId] | list[Text] | list[list[TokenId]]
    max_tokens: Annotated[Count | None, BeforeValidator(lambda v: 16 if v is None else v)] = 16
    echo: bool | None = None  # type: ignore[assignment]
    logprobs: Annotated[int | None, BeforeValidator(lambda v: None if v is False else v)] = None
    add_special_tokens: Literal[True] | None = None

    def prompts(self) -> list[str | list[int]]:
        """Return one entry per prompt; an empty list is one empty prompt, rejected later."""
        if isinstance(self.prompt, str) or not self.prompt or isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return list(self.prompt)

    def wanted_logprobs(self) -> int | None:
        return self.logprobs

    def prepare(self, can: ChatAbilities) -> None:
        """Check the body; refuse an echo whose log probabilities would fill the memory."""
        GenerationRequest.prepare(self, can)
        size, each = sum(map(len, self.prompts())), (self.n or 1) * (1 + (self.logprobs or 0))
        if self.echo and size * each > MAX_SCORES:
            why = f"echo: prompts of {size} characters or ids, {each} log probabilities for each, "
            why += f"are more than {MAX_SCORES} together; send fewer in one request"
            raise ApiError(400, why, code="invalid_value", param="echo")


class GenerateRequest(GenerationRequest):
    """Body of `POST /generate`: one prompt as text or as token ids; streamed by default."""

    prompt: Text | list[TokenId]
    n: Literal[1] | None = None


def fair_client(client: str, body: GenerationRequest, trusted: bool) -> str:
    """Return who the scheduler charges: a named key, else the `user` of a trusted caller."""
    named = trusted and body.user and not client.startswith("key ")
    return f"user {body.user}" if named else client


MAX_HELD = 2**19  # log probabilities of all whole answers in progress


class Held:
    """Log probabilities, alternatives included, that wait for the rest of one answer."""

    def __init__(self, shares: Shares, client: str) -> None:
        self._shares, self._client, self.count = shares, client, 0

    def add(self, entries: Sequence[TokenLogprob]) -> None:
        """Count more of them; an `ApiError` above the client's share."""
        count = sum(1 + len(entry.top) for entry in entries)
        if not self._shares.take(self._client, count):
            fits = self.count + count <= self._shares.most
            why = f"logprobs: more than {self.count} in one answer are too many to hold; stream it"
            why += ", or ask for fewer" + ", or try again later" * fits
            raise ApiError(429 if fits else 400, why, code="logprobs_full", param="logprobs")
        self.count += count

    def release(self) -> None:
        """Return them to the share, once the answer is sent or given up."""
        self._shares.give_back(self._client, self.count)
        self.count = 0


SLICE = 2**16  # bytes


def hold_large(scope: Scope, size: int) -> None:
    """Count the bytes of an answer in its client's share; small ones count in none."""
    if size > FREE and HOLD in scope:
        scope[HOLD](size)


class SlicedResponse(Response):
    """A response that keeps one slice in the send buffer; `sent` is called at its end.

    Its bytes count in its client's share, unless they are `common` to many responses.
    """

    sent: Callable[[], object] | None = None
    common = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        head = {"status": self.status_code, "headers": self.raw_headers}
        try:
            if not self.common:
                hold_large(scope, len(self.body))
            await send({"type": "http.response.start", **head})
            for at in range(0, len(self.body), SLICE):
                piece, more = self.body[at : at + SLICE], at + SLICE < len(self.body)
                await send({"type": "http.response.body", "body": piece, "more_body": more})
        finally:
            if self.sent is not None:
                self.sent()
