"""A layer of experts on two ranks, cut by width or shared whole, under three routers.

`python3 -m tests.gpu.expert_parallel --out FILE`: sizes of Qwen3-30B-A3B, both ranks in turn on
one GPU, microseconds in a CUDA graph for blocks and both GEMMs. The slower rank is what counts:
the other one waits for it in the sum.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

from minisgl.benchmark.report import save
from minisgl.kernels.moe import expert_parts
from tests.gpu.moe_trials import graph_us

EXPERTS, TOP_K, HIDDEN, WIDTH, RANKS, LAYERS = 128, 8, 2048, 768, 2, 4
TOKENS = (1, 8, 64, 256, 2048, 8192)


def preferences() -> dict[str, torch.Tensor]:
    """Each router's preference for each expert."""
    gen = torch.Generator().manual_seed(1)
    hot = torch.ones(EXPERTS)
    hot[20] = 1000
    zipf = 1 / (torch.randperm(EXPERTS, generator=gen) + 1.0)
    return {"uniform": torch.ones(EXPERTS), "Zipf": zipf, "one hot expert": hot}


def logits_of(preference: torch.Tensor, n: int, seed: int) -> torch.Tensor:
    """Logits [1, n, experts] whose top k are drawn in proportion to the preference."""
    gen = torch.Generator().manual_seed(seed)
    noise = torch.empty(n, EXPERTS).exponential_(generator=gen).log()
    return (preference.log() - noise)[None].cuda()


class Rank:
    """One rank's experts of some layers."""

    def __init__(self, rank: int, whole: bool) -> None:
        gen = torch.Generator("cuda").manual_seed(0)
        self.count = EXPERTS // RANKS if whole else EXPERTS
        self.first = rank * self.count if whole else 0
        width = WIDTH if whole else WIDTH // RANKS

        def normal(*shape: int) -> torch.Tensor:
            out = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
            return out.normal_(0.0, 0.02, generator=gen)

        self.gate_up = [normal(self.count, 2 * width, HIDDEN) for _ in range(LAYERS)]
        self.down = [normal(self.count, HIDDEN, width) for _ in range(LAYERS)]
        self.normal = normal

    def measure(self, preference: torch.Tensor, n: int) -> dict[str, Any]:
        """Microseconds of a layer; its touched experts, pairs, and bytes of weights."""
        x = self.normal(n, HIDDEN) * 50
        logits = [logits_of(preference, n, seed) for seed in range(LAYERS)]

        def step() -> list[torch.Tensor]:
            return [
                expert_parts(x, *each, TOP_K, True, first=self.first)
                for each in zip(logits, self.gate_up, self.down, strict=True)
            ]

        ids = torch.stack([one[0].topk(TOP_K).indices for one in logits])
        here = (ids >= self.first) & (ids < self.first + self.count)
        touched = sum(len(i[h].unique()) for i, h in zip(ids, here)) / LAYERS
        return {
            "us": round(graph_us(step, LAYERS), 1),
            "touched": touched,
            "pairs": int(here.sum()) / LAYERS,
            "mb": round(touched * 3 * self.down[0].shape[2] * HIDDEN * 2 / 1e6, 1),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    table: list[dict[str, Any]] = []
    for whole in (False, True):
        ranks = range(RANKS if whole else 1)  # cut by width, all ranks do the same
        for rank in ranks:
            part = Rank(rank, whole)
            for router, preference in preferences().items():
                for n in TOKENS:
                    where = {"whole": whole, "rank": rank, "router": router, "tokens": n}
                    table.append({**where, **part.measure(preference, n)})
                    print(table[-1], flush=True)
            del part
            torch.cuda.empty_cache()
    found = {"benchmark": "expert_parallel", "ranks": RANKS, "layers": LAYERS, "rows": table}
    save(args.out, found, shlex.join(["python", "-m", "tests.gpu.expert_parallel", *sys.argv[1:]]))


if __name__ == "__main__":
    main()
