"""From a message to its request, and from a token to its reply.

Generated from notebooks/08d_messages.ipynb: edit there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from minisgl.core import IntArray, Req, SamplingParams
from minisgl.engine.logits_processors import LogitsParams, logits_params
from minisgl.engine.prompt_logprobs import prompt_logprobs
from minisgl.engine.step import SampledTokens
from minisgl.scheduler.frames import same_but_seed
from minisgl.scheduler.messages import InvalidRequestError, PromptScores, TokenReply, UserMsg


class Memo:
    """Results for the last prompt and the last parameters, which others may share."""

    prompt: Any = None
    ids: IntArray
    params: SamplingParams | None = None
    wants: LogitsParams | None


@dataclass(frozen=True)
class Limits:
    """Limits of a request: window and pool, both in tokens, and vocabulary."""

    max_seq_len: int
    pool_tokens: int
    vocab_size: int
    eos_token_ids: frozenset[int] = frozenset()
    memo: Memo = field(default_factory=Memo, compare=False, repr=False)

    @property
    def total(self) -> int:
        """Most tokens, prompt and answer together, that one request can ever have."""
        return min(self.max_seq_len, self.pool_tokens)


def check_prompt(prompt: object, limits: Limits) -> IntArray:
    """Convert a prompt to int32 [n]; raise `InvalidRequestError` if it cannot be answered."""
    try:
        ids = np.asarray(prompt)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequestError(f"prompt: must be a flat list of token ids, {error}") from None
    if ids.size == 0:
        raise InvalidRequestError("prompt: must hold at least one token, got an empty prompt")
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        kind = f"{ids.dtype} {ids.shape}"
        raise InvalidRequestError(f"prompt: must be a flat list of integers, got {kind}")
    wrong = ids[(ids < 0) | (ids >= limits.vocab_size)]
    if wrong.size:
        allowed = f"0..{limits.vocab_size - 1}"
        raise InvalidRequestError(f"prompt: token ids must be in {allowed}, got {wrong[0]}")
    if ids.size < limits.total:
        return ids.astype(np.int32)
    window = ids.size >= limits.max_seq_len
    what = "model's context window is" if window else "KV cache holds"
    raise InvalidRequestError(
        f"prompt: {ids.size} tokens are too many, the {what} "
        f"{limits.max_seq_len if window else limits.pool_tokens} tokens and the answer needs at "
        "least one",
        "context_length_exceeded",
    )


def check_params(params: SamplingParams, limits: Limits) -> None:
    """Raise `InvalidRequestError` for token ids that the model does not have."""
    if any(isinstance(word, str) for word in params.bad_words):
        why = "bad_words: strings need a tokenizer, which this model lacks; give token ids"
        raise InvalidRequestError(why, param="bad_words")
    given: dict[str, Any] = {
        "logit_bias": params.logit_bias or (),
        "allowed_token_ids": params.allowed_token_ids or (),
        "bad_words": [token for word in params.bad_words for token in word],
    }
    for name, ids in given.items():
        if (token := max(ids, default=0)) >= limits.vocab_size:
            allowed = f"0..{limits.vocab_size - 1}"
            why = f"{name}: token ids must be in {allowed}, got {token}"
            raise InvalidRequestError(why, param=name)
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        why = f"min_tokens: must be at most max_tokens={params.max_tokens}, got {params.min_tokens}"
        raise InvalidRequestError(why, param="min_tokens")


def make_req(
    msg: UserMsg, limits: Limits, constrain: Callable[[Req, int], None] | None = None
) -> Req:
    """Return the request that a message asks for, or raise `InvalidRequestError`.

    `constrain` gives a request its grammar (chapter 09a); it also takes the vocabulary's size.
    """
    memo, params = limits.memo, msg.sampling_params
    if msg.input_ids is not memo.prompt:
        memo.ids, memo.prompt = check_prompt(msg.input_ids, limits), msg.input_ids
    if memo.params is None or not same_but_seed(params, memo.params):
        memo.params = None
        check_params(params, limits)
        memo.wants = None
        if params.edits_logits:
            memo.wants = logits_params(params, limits.vocab_size, limits.eos_token_ids)
        memo.params = params
    room = limits.total - len(memo.ids)
    req = Req(
        uid=msg.uid,
        input_ids=memo.ids,
        sampling_params=params,
        max_new_tokens=room if params.max_tokens is None else max(1, min(room, params.max_tokens)),
        client=msg.client,
    )
    req.logits_params = None if memo.wants is None else replace(memo.wants)
    if constrain is not None and params.is_constrained:
        constrain(req, limits.vocab_size)
    return req


PROMPT_TAIL = 16  # tokens that the text of the first ones may depend on


def finish_reason(req: Req, token: int, eos_token_ids: frozenset[int]) -> str | None:
    """Return why `token`, appended already, is the last one; None if it is not."""
    params = req.sampling_params
    if req.matcher is not None and req.matcher.error:
        return "abort"
    ends = token in eos_token_ids and not params.ignore_eos
    if ends or token in params.stop_token_ids:
        return "stop"
    return "length" if req.host_len >= req.max_device_len else None


def clamp_notice(req: Req) -> str | None:
    """Describe how `max_tokens` was clamped, for the caller; None if it was not."""
    wanted, room = req.sampling_params.max_tokens, req.max_device_len - req.prompt_len
    if wanted is None or wanted <= room:
        return None
    return (
        f"max_tokens: clamped from {wanted} to {room}, the prompt has {req.prompt_len} tokens "
        f"and there is room for {req.max_device_len}"
    )


def abort_reply(req: Req) -> TokenReply:
    """Make the last reply of an aborted request."""
    return TokenReply(
        uid=req.uid,
        token=None,
        finished=True,
        finish_reason="abort",
        prompt_tokens=req.prompt_len,
        cached_tokens=req.matched_len,
    )


def token_reply(req: Req, reason: str | None, tokens: SampledTokens, index: int) -> TokenReply:
    """Make the reply for token number `index` of a step, appended to `req` already."""
    reply = TokenReply(
        uid=req.uid,
        token=tokens.ids[index],
        finished=reason is not None,
        finish_reason=reason,
        prompt_tokens=req.prompt_len,
        cached_tokens=req.matched_len,
    )
    wanted = req.sampling_params.logprobs
    if req.host_len == req.prompt_len + 1:
        reply.notice, reply.stop = clamp_notice(req), tuple(req.sampling_params.stop)
        reply.spare_thoughts = req.sampling_params.spare_thoughts
        reply.prompt_tail = tuple(req.prompt_ids[-PROMPT_TAIL:].tolist())
        if req.sampling_params.prompt_logprobs is not None:
            rows = prompt_logprobs(req)
            reply.prompt_logprobs = PromptScores(rows.shape[1] // 2, rows.tobytes())
    if req.sampling_params.max_tokens == 0:  # one was computed, none is wanted
        reply.token, reply.finish_reason, wanted = None, "length", None
    if reason == "abort" and req.matcher is not None:
        reply.notice = req.matcher.error
    if wanted is not None and tokens.logprobs is not None:
        reply.logprob = tokens.logprobs[index]
        if wanted and tokens.top_ids is not None and tokens.top_logprobs is not None:
            pairs = zip(tokens.top_ids[index], tokens.top_logprobs[index])
            reply.top_logprobs = list(pairs)[:wanted]
    return reply
