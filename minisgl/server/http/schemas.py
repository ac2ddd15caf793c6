"""What a client may send: the OpenAI shapes that we honour, as pydantic models.

Generated from notebooks/12c_http.ipynb: edit there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field

from minisgl.core import GRAMMARS, MAX_LOGPROBS, SamplingParams
from minisgl.server.http.calls import ChatAbilities
from minisgl.server.http.errors import ApiError
from minisgl.server.http.fields import HARMLESS, template_variables
from minisgl.server.http.tools import ChatMessage, ResponseFormat, Text, ToolFields

Count = Annotated[int, Field(lt=2**63)]  # what a message can hold; ranges are checked later
Limit = Annotated[int, Field(gt=0, lt=2**63)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenKey = Annotated[TokenId, Field(strict=False)]  # the keys of a JSON object are strings
StopText = Annotated[Text, Field(max_length=1024)]
BadWord = Annotated[Text, Field(max_length=64)]  # the text worker spells each one twice
MAX_ANSWERS = 1024  # of one HTTP request: prompts times n


class StreamOptions(BaseModel, strict=True):
    """What a stream tells beside its text."""

    include_usage: bool | None = None


class GenerationRequest(BaseModel, extra="allow", strict=True):
    """What all requests share. Unknown fields are kept for `prepare`; null means the default."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Count | None = None
    max_tokens: Limit | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=64)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024)] | None = None
    seed: int | None = None
    n: int | None = Field(default=None, ge=1, le=128)
    ignore_eos: bool | None = None
    cache_salt: Annotated[Text, Field(min_length=1, max_length=1024)] | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[TokenKey, float], Field(max_length=1024)] | None = None
    min_tokens: Count | None = None
    bad_words: Annotated[list[BadWord], Field(max_length=256)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Field(max_length=2**18)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None  # vLLM's
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    timeout: float | None = Field(default=None, gt=0, allow_inf_nan=False)  # seconds
    user: Annotated[Text, Field(max_length=1024)] | None = None  # for whom the caller asks
    echo: Literal[False] | None = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def token_limit(self) -> int | None:
        """New tokens asked for; None means up to the context window."""
        return self.max_tokens

    def wanted_logprobs(self) -> int | None:
        """How many likely tokens to tell beside each chosen one; None if nothing is asked for."""
        return None

    def prepare(self, can: ChatAbilities) -> None:
        """Say no to what would change the answer; let pass what would not."""
        best_of = ("best_of", self.n)
        for name, value in (self.model_extra or {}).items():
            harmless = HARMLESS.get(name)
            if harmless is None or value is None or value in harmless or (name, value) == best_of:
                continue
            why = f"{name}: not supported, leave it out; got {value!r:.80}"
            raise ApiError(400, why, code="unsupported", param=name)

    def answer_form(self) -> dict[str, Any]:
        """What the answer must look like, as fields of `SamplingParams`; ApiError if unknown."""
        given, extra = self.response_format or ResponseFormat(), self.model_extra or {}
        options = {name: extra.get(name) for name in [*FORMS, *GRAMMARS]}
        options |= {f"guided_{name}": v for name, v in (self.structured_outputs or {}).items()}
        form = {FORMS.get(k, k.removeprefix("guided_")): v for k, v in options.items() if v}
        form |= given.asked()
        for name, value in form.items():
            if name not in GRAMMARS or value is None:
                param = "structured_outputs" if value else "response_format"
                why = f"{param}: {name!r:.80} is not supported, or empty"
                raise ApiError(400, why, code="unsupported", param=param)
        return form

    def client_name(self, ours: str | None) -> str | None:
        """What the client called one of our fields."""
        if ours not in GRAMMARS:
            return ours
        names = [name for name in [*FORMS, ours] if FORMS.get(name, name) == ours]
        given = [name for name in names if (self.model_extra or {}).get(name)]
        return next(
            iter(given), "structured_outputs" if self.structured_outputs else "response_format"
        )

    def sampling_params(self, defaults: Mapping[str, Any], index: int = 0) -> SamplingParams:
        """The engine's params: what the client set, else what the model advises, else ours.

        `index` numbers the answers of one request (`n`): with a seed, each must still differ.
        """
        asked = self.model_dump(include={field.name for field in fields(SamplingParams)})
        asked["max_tokens"], asked["logprobs"] = self.token_limit(), self.wanted_logprobs()
        asked["seed"] = None if self.seed is None else (self.seed + index) % 2**63
        asked["prompt_logprobs"] = (asked["logprobs"] or 0) if self.echo else None
        asked["top_k"] = -1 if self.top_k == 0 else self.top_k  # many clients spell "off" so
        asked |= self.answer_form()
        chosen = {**defaults, **{name: value for name, value in asked.items() if value is not None}}
        try:
            return SamplingParams(**chosen)
        except (ValueError, TypeError) as error:
            ours, why = str(error).split(":", 1)
            param = self.client_name(ours)
            raise ApiError(400, f"{param}:{why}", code="invalid_value", param=param) from error


FORMS = {  # other engines' names of our fields
    "guided_json": "json_schema", "guided_regex": "regex", "guided_choice": "choice",
    "guided_grammar": "grammar", "ebnf": "grammar",
}  # fmt: skip


class ChatRequest(ToolFields, GenerationRequest):
    """Body of `POST /v1/chat/completions`."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=16384)
    max_completion_tokens: Limit | None = None
    chat_template_kwargs: Annotated[dict, AfterValidator(template_variables)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: Annotated[Text, Field(max_length=64)] | None = None
    enable_thinking: bool | None = None
    add_special_tokens: Literal[False] | None = None  # the template writes them
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)

    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def wanted_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def prompt(self) -> dict[str, Any]:
        """The conversation and what its template reads beside it."""
        names = ("add_generation_prompt", "continue_final_message")
        given = self.model_dump(include={*names, "reasoning_effort", "enable_thinking"})
        variables = {name: value for name, value in given.items() if value is not None}
        if self.shown_tools:
            variables["tools"] = [tool.as_template_input() for tool in self.shown_tools]
        return {
            "messages": [message.as_template_input() for message in self.messages],
            "template_kwargs": {**(self.chat_template_kwargs or {}), **variables},
        }

    def prepare(self, can: ChatAbilities) -> None:
        """Also decide, by what the model can do, what its answer may call and must look like."""
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
        return "messages" if ours == "prompt" else GenerationRequest.client_name(self, ours)


class CompletionRequest(GenerationRequest):
    """Body of `POST /v1/completions`: one prompt or several, as text or as token ids."""

    prompt: Text | list[TokenId] | list[Text] | list[list[TokenId]]
    max_tokens: Annotated[Count | None, BeforeValidator(lambda v: 16 if v is None else v)] = 16
    echo: bool | None = None  # type: ignore[assignment]
    logprobs: Annotated[int | None, BeforeValidator(lambda v: None if v is False else v)] = None
    add_special_tokens: Literal[True] | None = None

    def prompts(self) -> list[str | list[int]]:
        """One entry per prompt. An empty list is one empty prompt, and is refused later as such."""
        if isinstance(self.prompt, str) or all(isinstance(token, int) for token in self.prompt):
            return [self.prompt]  # type: ignore[list-item]
        return list(self.prompt)  # type: ignore[arg-type]

    def wanted_logprobs(self) -> int | None:
        return self.logprobs


class GenerateRequest(GenerationRequest):
    """Body of `POST /generate`: one prompt as text or as token ids; streamed unless told not to."""

    prompt: Text | list[TokenId]
    n: Literal[1] | None = None
