"""What a request must keep to, and the request that a message asks for.

Generated from notebooks/08d_messages.ipynb: edit there.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from minisgl.core import IntArray, Req, SamplingParams
from minisgl.engine.logits_processors import LogitsParams, logits_params
from minisgl.scheduler.frames import same_but_seed
from minisgl.scheduler.messages import InvalidRequestError, UserMsg


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


MAX_BAD_TOKENS = 16_384  # of one request: each is compared at every step


def check_params(params: SamplingParams, limits: Limits) -> None:
    """Raise `InvalidRequestError` for token ids that the model does not have."""
    if any(isinstance(word, str) for word in params.bad_words):
        why = "bad_words: strings need a tokenizer, which this model lacks; give token ids"
        raise InvalidRequestError(why, param="bad_words")
    if (count := sum(map(len, params.bad_words))) > MAX_BAD_TOKENS:
        why = f"bad_words: must have at most {MAX_BAD_TOKENS} tokens in all, got {count}"
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


def make_req(msg: UserMsg, limits: Limits) -> Req:
    """Make the request of a message; raise `InvalidRequestError`."""
    memo, params = limits.memo, msg.sampling_params
    if msg.input_ids is not memo.prompt:
        memo.ids, memo.prompt = check_prompt(msg.input_ids, limits), msg.input_ids
    if memo.params is None or not same_but_seed(params, memo.params):
        memo.params = None
        check_params(params, limits)
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
    return req
