"""When a request has its last token, and the replies that say so.

Generated from notebooks/08d_messages.ipynb: edit there.
"""

from __future__ import annotations

from minisgl.core import Req
from minisgl.engine.prompt_logprobs import prompt_logprobs
from minisgl.engine.step import SampledTokens
from minisgl.scheduler.messages import TokenReply

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
        reply.prompt_tail = tuple(req.input_ids[: req.prompt_len][-PROMPT_TAIL:].tolist())
        if req.sampling_params.prompt_logprobs is not None:
            reply.prompt_logprobs = prompt_logprobs(req)
    if req.sampling_params.max_tokens == 0:  # one was computed, none is wanted
        reply.token, reply.finish_reason, wanted = None, "length", None
    if reason == "abort":
        reply.notice = req.matcher.error
    if wanted is not None and tokens.logprobs is not None:
        reply.logprob = tokens.logprobs[index]
        if wanted and tokens.top_ids is not None and tokens.top_logprobs is not None:
            pairs = zip(tokens.top_ids[index], tokens.top_logprobs[index])
            reply.top_logprobs = list(pairs)[:wanted]
    return reply
