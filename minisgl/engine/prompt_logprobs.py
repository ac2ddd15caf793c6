"""Log probabilities of a prompt: the head at every position, a few rows at a time.

Generated from notebooks/08a_prompt_logprobs.ipynb: edit there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from minisgl.attention.metadata import ForwardBatch
from minisgl.core import Req
from minisgl.engine.graph import Forward
from minisgl.engine.sampler import with_logprobs
from minisgl.engine.step import ForwardInput, ForwardOutput

LOGITS_AT_ONCE = 2**23  # 55 rows of a vocabulary of 152,000; a copy in float32 takes 32 MiB


@dataclass(frozen=True)
class PromptScorer:
    """The forward pass of a step, with the log probabilities of prompts that request them."""

    hidden: Callable[[ForwardBatch], Tensor]  # to the head's input [selected rows, hidden]
    head: Callable[[Tensor], Tensor]  # from there to logits
    rows: int  # rows per call of the head

    def score(self, req: Req, x: Tensor) -> None:
        """Add the scores of the tokens that follow the new ones; x [new tokens, hidden]."""
        first, last = req.cached_len + 1, min(req.device_len + 1, req.prompt_len)
        targets = torch.from_numpy(req.prompt_ids[first:last].astype("int64")).to(x.device)
        top = req.sampling_params.prompt_logprobs or 0
        for ids, part in zip(targets.split(self.rows), x[: len(targets)].split(self.rows)):
            all_rows = torch.arange(len(ids), device=x.device)
            out = with_logprobs(self.head(part), ids, all_rows, top)
            req.scores.append(ForwardOutput(out))

    def __call__(self, fi: ForwardInput, fb: ForwardBatch) -> Tensor:
        """Return logits of the selected rows; append the prompts' scores to their requests."""
        reqs = fi.batch.reqs
        x = self.hidden(replace(fb, last_idx=None))
        for req, part in zip(reqs, x.split([req.extend_len for req in reqs])):
            if req.scores_prompt:
                if req.cached_len == 0:  # it starts, or restarts
                    req.scores.clear()
                self.score(req, part)
        return self.head(x if fb.last_idx is None else x[fb.last_idx])


def make_scorer(forward: Forward, model: nn.Module, vocab_size: int) -> PromptScorer:
    """Make the scorer of an engine that runs `model` by `forward`, fused or not."""
    parts: Any = model
    hidden = getattr(forward, "hidden", parts.model)
    return PromptScorer(hidden, parts.lm_head, max(1, LOGITS_AT_ONCE // vocab_size))


Scored = tuple[int, float | None, list[tuple[int, float]]]


def prompt_logprobs(req: Req) -> list[Scored]:
    """List each prompt token's id, its log probability, and the most likely tokens there."""
    found: list[Scored] = [(int(req.prompt_ids[0]), None, [])]
    for output in req.scores:
        assert isinstance(output, ForwardOutput)
        part = output.wait()
        assert part.logprobs is not None
        assert part.top_ids is not None and part.top_logprobs is not None
        tops = (list(zip(*top)) for top in zip(part.top_ids, part.top_logprobs))
        found += zip(part.ids, part.logprobs, tops)
    req.scores.clear()
    return found
