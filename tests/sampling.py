"""Parts that tests of the sampling kernels share: keys, settings of rows, the torch oracle."""

from __future__ import annotations

import numpy as np
import torch

from minisgl.engine.sampler import gumbel_noise, sample_tokens, step_keys


def make_keys(rows: int, first: int = 0) -> torch.Tensor:
    """Keys of `rows` requests, int32 [2, rows]."""
    seeds = np.arange(first, first + rows, dtype=np.uint64)
    return torch.from_numpy(step_keys(seeds, np.arange(rows)))


def row_tensors(rows: list[tuple[float, int, float]]) -> tuple[torch.Tensor, ...]:
    """temperature float32, top_k int32 and top_p float64, [bs] each."""
    temperature, top_k, top_p = zip(*rows, strict=True)
    return (
        torch.tensor(temperature, dtype=torch.float32),
        torch.tensor(top_k, dtype=torch.int32),
        torch.tensor(top_p, dtype=torch.float64),
    )


def assert_same_draws(
    got: torch.Tensor, logits: torch.Tensor, keys: torch.Tensor, temperature: torch.Tensor,
    top_k: torch.Tensor, top_p: torch.Tensor,
) -> None:  # fmt: skip
    """Check each token against `sample_tokens`; scores may differ by rounding.

    Everything on one device, which the oracle uses, too.
    """
    vocab = logits.shape[1]
    ids = torch.arange(vocab, dtype=torch.int32, device=logits.device)
    k = torch.where((top_k > 0) & (top_k < vocab), top_k, vocab)
    filtered = (temperature > 0) & ((k < vocab) | (top_p < 1))
    want = sample_tokens(logits, ids, 0, keys, temperature)
    if filtered.any():
        few = sample_tokens(logits[filtered], ids, vocab, keys[:, filtered], temperature[filtered],
                   k[filtered], top_p[filtered])  # fmt: skip
        want[filtered] = few
    different = torch.nonzero(got != want).flatten().tolist()
    for row in different:
        pair = [int(got[row]), int(want[row])]
        noise = gumbel_noise(keys[:, row : row + 1], ids)[0, pair]
        scores = logits[row, pair].float() + temperature[row] * noise
        assert torch.isclose(scores[0], scores[1], rtol=1e-6, atol=0), (row, pair)
    assert len(different) <= max(1, len(got) // 1000), f"{len(different)} of {len(got)} rows"
