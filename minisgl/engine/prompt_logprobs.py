"""Log probabilities of a prompt: the head at every position, a few rows at a time.

Generated from notebooks/08a_prompt_logprobs.ipynb: edit there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from minisgl.attention.metadata import ForwardBatch
from minisgl.core import IntArray, Req
from minisgl.engine.graph import Forward
from minisgl.engine.sampler import with_logprobs
from minisgl.engine.step import ForwardInput, to_host

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
            assert out.logprobs is not None
            assert out.top_ids is not None and out.top_logprobs is not None
            named = torch.cat([ids[:, None], out.top_ids], 1).int()
            values = torch.cat([out.logprobs[:, None], out.top_logprobs], 1)
            req.scores.append(to_host(torch.cat([named, values.view(torch.int32)], 1)))

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


def prompt_logprobs(req: Req) -> IntArray:
    """Return a row of ids and the bits of their values for each token of a computed prompt.

    int32 [prompt_len, 2 * (1 + likely tokens)]. Of the first token, the id alone is of use.
    """
    parts = [part.numpy() for part in req.scores if isinstance(part, Tensor)]
    first = np.zeros((1, parts[0].shape[1] if parts else 2), np.int32)
    first[0, 0] = req.prompt_ids[0]
    req.scores.clear()
    return np.concatenate([first, *parts])
