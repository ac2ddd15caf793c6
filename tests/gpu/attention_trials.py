"""Decode and prefill attention of this tree's kernels: cases timed in CUDA graphs, as JSON.

`python -m tests.gpu.attention_trials compile`, then `decode --out FILE` and `prefill --out FILE`.
Every case is compared with plain PyTorch before it is timed. Microseconds are medians of one layer.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from minisgl.attention import triton_backend
from minisgl.attention.factory import create_backend
from minisgl.attention.metadata import build_metadata
from minisgl.attention.triton_backend import TritonBackend, TritonPlan
from minisgl.benchmark.kernels import scatter_pages
from minisgl.benchmark.report import save
from minisgl.core import Phase
from minisgl.kernels import decode_attention as decode
from minisgl.kernels import linear
from minisgl.kernels.norm import DeferredNorm
from minisgl.kvcache.page_table import TableManager
from minisgl.kvcache.pool import KVPool

PROCESSES, BF16, DIM = 14, torch.bfloat16, 128
DEVICE = torch.device("cuda")
START = time.monotonic()


def graph_us(call: Callable[[], object], launches: int, replays: int = 9) -> float:
    """Median microseconds of one of `launches` in a CUDA graph of `call`."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = call()
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(replays)]
    graph.replay()
    for before, after in marks:
        before.record()
        graph.replay()
        after.record()
    torch.cuda.synchronize()
    del kept
    return round(statistics.median(a.elapsed_time(b) for a, b in marks) * 1e3 / launches, 3)


# ------------------------------------------------------------------ decode


class Requests:
    """Requests of these lengths, random pages of 16, in as many layers as L2 cannot hold."""

    def __init__(self, lens: Sequence[int], qo: int, kv: int, most_layers: int = 64) -> None:
        pages = [-(-n // 16) for n in lens]
        nbytes = sum(lens) * 4 * kv * DIM
        self.layers = min(most_layers, max(2, (1 << 28) // nbytes))
        size = (self.layers, sum(pages), 16, kv, DIM)
        self.k, self.v = (torch.randn(size, dtype=BF16, device=DEVICE) for _ in range(2))
        order = np.random.default_rng(0).permutation(sum(pages)) * 16
        table, at = np.zeros((len(lens), max(pages) * 16), np.int32), 0
        for i, count in enumerate(pages):
            slots = order[at : at + count, None] + np.arange(16)
            table[i, : count * 16], at = slots.reshape(-1), at + count
        self.host, self.table = table, torch.from_numpy(table).to(DEVICE)
        self.rows = torch.arange(len(lens), device=DEVICE)
        self.positions = torch.tensor(lens, device=DEVICE) - 1
        last = [table[i, n - 1] for i, n in enumerate(lens)]
        self.slots = torch.tensor(last, dtype=torch.int64, device=DEVICE)
        self.qkv = torch.randn(len(lens), qo + 2 * kv, DIM, dtype=BF16, device=DEVICE)
        self.norms = torch.ones(2, DIM, dtype=BF16, device=DEVICE).unbind(0)
        self.angles = torch.rand(max(lens), DIM, device=DEVICE)
        self.scratch = decode.Scratch((len(lens) + 2048) * kv * 2, qo // kv, DIM, DEVICE)
        self.lens, self.qo, self.kv, self.scale = list(lens), qo, kv, DIM**-0.5

    def heads(self, qkv: Tensor | None = None) -> tuple[Tensor, ...]:
        qkv = (self.qkv if qkv is None else qkv).view(self.qkv.shape)
        return qkv.split((self.qo, self.kv, self.kv), 1)

    def turned(self, x: Tensor) -> Tensor:
        """Heads [n, h, d] with a norm of ones, rotated; float32, rounded as in the kernel."""
        x = x.float()
        x = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)).to(BF16).float()
        (a, b), (cos, sin) = x.chunk(2, -1), self.angles[self.positions][:, None].chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(BF16).float()

    def oracle(self, i: int) -> Tensor:
        """Attention over what layer i holds, and over the new token, in plain PyTorch."""
        q, k, v = self.heads()
        q, k, v = self.turned(q), self.turned(k), v.float()
        out = torch.empty(q.shape, device=DEVICE)
        for r, n in enumerate(self.lens):
            slots = self.table[r, :n].long()
            keys, values = (c[i].flatten(0, 1)[slots].float() for c in (self.k, self.v))
            keys[-1], values[-1] = k[r], v[r]
            group = self.qo // self.kv
            s = torch.einsum("hgd,nhd->hgn", q[r].view(self.kv, group, DIM), keys) * self.scale
            out[r] = torch.einsum("hgn,nhd->hgd", s.softmax(-1), values).reshape(self.qo, DIM)
        return out


def attend(c: Requests, i: int, qkv: Tensor | None = None) -> Tensor:
    return decode.decode_attention(
        *c.heads(qkv), c.k[i], c.v[i], c.table, c.rows, c.positions, c.slots, c.scratch, c.scale,
        norms=c.norms, eps=1e-6, table=c.angles,
    )  # fmt: skip


class Chain:
    """Attention between the projections of a layer of Qwen3-0.6B, as the engine launches them."""

    def __init__(self, c: Requests) -> None:
        def weights(n: int, k: int) -> Tensor:
            return torch.randn(c.layers, n, k, dtype=BF16, device=DEVICE) / k**0.5

        self.c, self.hidden = c, 1024
        self.qkv, self.out = weights((c.qo + 2 * c.kv) * DIM, 1024), weights(1024, c.qo * DIM)
        self.x = torch.randn(len(c.lens), 1024, dtype=BF16, device=DEVICE)
        self.norm = torch.ones(1024, dtype=BF16, device=DEVICE)
        self.squares = self.x[0].float().square().view(512, 2).sum(1)

    def __call__(self, attend: Callable[[int, Tensor], Tensor]) -> object:
        one = len(self.x) == 1
        row = DeferredNorm(self.x, self.x, self.squares)
        for i in range(self.c.layers):
            if one:
                qkv = linear.gemv(row, self.qkv[i], eps=1e-6)
            else:
                qkv = linear.linear(self.x, self.qkv[i])
            assert qkv is not None
            y = attend(i, qkv).view(len(self.x), -1)
            if one:
                kept = linear.gemv_add_norm(y, self.out[i], self.x, self.norm)
            else:
                kept = linear.split_k_linear(y, self.out[i])
        return kept


HEADS = (16, 8)  # query and KV heads, of Qwen3-0.6B
MIXED = np.random.default_rng(1).integers(100, 1601, 256)
DECODE_CASES = [(f"{n} x 640", [640] * n) for n in (1, 2, 4, 8, 16, 24, 32, 40, 48, 64, 96, 256)]
DECODE_CASES += [
    ("1 x 4096", [4096]), ("8 x 4096", [4096] * 8), ("1 x 40000", [40_000]),
    ("1 x 40000, 63 x 640", [40_000] + [640] * 63), ("1 x 40000, 7 x 640", [40_000] + [640] * 7),
    ("256 of 100 to 1600", sorted(MIXED.tolist())[::-1]),
]  # fmt: skip


def check(c: Requests, run: Callable[[int], Tensor]) -> float:
    """Relative distance to plain PyTorch, twice: counters must be back at zero."""
    want = c.oracle(0)
    gaps = [float((run(0).float() - want).norm() / want.norm()) for _ in range(2)]
    if max(gaps) > 1e-2 or int(c.scratch.done.sum()):
        c.scratch.done.zero_()
        raise ValueError(f"wrong by {max(gaps):.2g}")
    return max(gaps)


def decode_case(name: str, lens: list[int], heads: tuple[int, int]) -> dict[str, Any]:
    """One case, alone and between two projections."""
    c = Requests(lens, *heads)
    gap = check(c, partial(attend, c))
    us = graph_us(lambda: [attend(c, i) for i in range(c.layers)], c.layers)
    found: dict[str, Any] = {"case": name, "heads": heads, "gap": gap, "us": us}
    if sum(lens) < 100_000:
        found["chain_us"] = graph_us(partial(Chain(c), partial(attend, c)), c.layers)
    return found


# ------------------------------------------------------------------ prefill


NEW_TOKENS = np.random.default_rng(2).integers(100, 1025, 15).tolist()
PREFILL_CASES = [
    ("2 x 4096", [(0, 4096)] * 2), ("1 x 1024", [(0, 1024)]),
    ("15 of 100 to 1024", [(0, n) for n in NEW_TOKENS]), ("1 x 2048", [(0, 2048)]),
    ("1 x 512", [(0, 512)]), ("1 x 8192", [(0, 8192)]), ("512 behind 4096", [(4096, 512)]),
    ("8192 behind 8192", [(8192, 8192)]), ("3 odd ones", [(100, 77), (0, 300), (1000, 1)]),
]  # fmt: skip


class Prompts:
    """New tokens behind cached ones, in random pages of 16, keys and values of all stored."""

    def __init__(self, lens: list[tuple[int, int]], qo: int, kv: int) -> None:
        cached, new = np.array(lens, np.int32).T
        total, self.qo, self.kv = cached + new, qo, kv
        pages = int((-(-total // 16)).sum())
        self.pool = KVPool(num_layers=2, num_pages=pages, page_size=16, num_kv_heads=kv,
                           head_dim=DIM, dtype=BF16, device=DEVICE)  # fmt: skip
        self.pool.buffer.normal_()
        self.tables = TableManager(
            len(lens), -(-int(total.max()) // 16) * 16 + 16, 16, self.pool.dummy_page, DEVICE
        )
        scatter_pages(total, self.tables, pages)
        rows = np.arange(len(lens))
        table = self.tables.page_table
        self.meta = build_metadata(Phase.PREFILL, rows, new, total, table, 16)
        slots = np.concatenate([self.meta.slots_of(i)[-n:] for i, n in enumerate(new)])
        self.out_loc = torch.from_numpy(slots.astype(np.int64)).to(DEVICE)
        self.q = torch.randn(int(new.sum()), qo, DIM, dtype=BF16, device=DEVICE)
        self.flops = 4 * qo * DIM * int((new * (cached + (new + 1) / 2)).sum())
        self.lens = lens

    def backend(self, name: str) -> Callable[[], Tensor]:
        """Attention by a backend of the package."""
        made = create_backend(name, pool=self.pool, tables=self.tables, num_qo_heads=self.qo)
        plan = made.plan(self.meta, self.out_loc)
        nothing = self.q[:, : self.kv]
        return lambda: plan.attend(self.q, nothing, nothing, 0)

    def oracle(self) -> Tensor:
        """Plain attention, one request at a time."""
        out, at = torch.empty_like(self.q), 0
        caches = (self.pool.k_cache(0).flatten(0, 1), self.pool.v_cache(0).flatten(0, 1))
        for i, (cached, new) in enumerate(self.lens):
            slots = torch.from_numpy(self.meta.slots_of(i).astype(np.int64)).to(DEVICE)
            k, v = (c[slots].transpose(0, 1)[None] for c in caches)
            q = self.q[at : at + new].transpose(0, 1)[None]
            n = cached + new
            if cached:
                mask = torch.ones(new, n, dtype=torch.bool, device=DEVICE).tril(cached)
                how: dict[str, Any] = {"attn_mask": mask}
            else:
                how = {"is_causal": True}
            y = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True, **how)
            out[at : at + new], at = y[0].transpose(0, 1), at + new
        return out


@contextmanager
def shaped(shape: str) -> Iterator[None]:
    """Query rows x keys of a tile - warps - stages, or "as it is"."""
    if shape == "as it is":
        yield
        return
    rows, keys, warps, stages = map(int, shape.replace("x", "-").split("-"))

    def plan(*of: Any) -> TritonPlan:
        made = TritonPlan(*of)
        made.tile_kv, made.warps, made.stages = keys, warps, stages
        return made

    with (
        mock.patch.object(TritonBackend, "query_rows", lambda *of: rows),
        mock.patch.object(triton_backend, "TritonPlan", plan),
    ):
        yield


def prefill_case(name: str, lens: list[tuple[int, int]], heads: tuple[int, int]) -> dict[str, Any]:
    """One case by all shapes, and by FlashInfer if it is there."""
    p = Prompts(lens, *heads)
    want = p.oracle().float()
    found: dict[str, Any] = {"case": name, "heads": heads, "us": {}, "tflop_per_s": {}}
    for shape in SHAPES:
        with shaped("as it is" if shape == "fi" else shape):
            try:
                run = p.backend("fi" if shape == "fi" else "triton")
                gap = float((run().float() - want).norm() / want.norm())
                if not gap < 1e-2:
                    raise ValueError(f"wrong by {gap:.2g}")
                us = graph_us(lambda run=run: [run() for _ in range(4)], 4)
                found["us"][shape] = us
                found["tflop_per_s"][shape] = round(p.flops / us / 1e6, 1)
            except Exception as error:
                found[f"{shape} failed"] = f"{type(error).__name__}: {error}"[:160]
    return found


# ------------------------------------------------------------------ all

SHAPES: list[str] = ["as it is"]
CASES: dict[str, list[Any]] = {"decode": DECODE_CASES, "prefill": PREFILL_CASES}


def compile_part(part: int) -> None:
    """Run a share of all cases once, on short requests: Triton keeps what it compiles."""
    calls: list[Callable[[], object]] = []
    for shape, lens in itertools.product(SHAPES, ([(0, 300)], [(0, 4096)], [(0, 30)])):
        calls.append(partial(run_once, shape, lens))
    calls += [partial(attend_once, len(lens)) for _, lens in DECODE_CASES]
    for call in calls[part::PROCESSES]:
        with suppress(Exception):
            call()


def run_once(shape: str, lens: list[tuple[int, int]]) -> None:
    with shaped(shape):
        Prompts(lens, *HEADS).backend("triton")()


def attend_once(batch: int) -> None:
    c = Requests([40] * batch, *HEADS, most_layers=1)
    Chain(c)(partial(attend, c))


def compile_all(seconds: float, rest: list[str]) -> None:
    """Compile in several processes, for so long at most."""
    command = [sys.executable, "-m", "tests.gpu.attention_trials", *rest, "--compile"]
    made = [subprocess.Popen([*command, str(part)]) for part in range(PROCESSES)]
    stop = time.monotonic() + seconds
    for process in made:
        try:
            process.wait(max(0.1, stop - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
    print(f"compiled in {time.monotonic() - START:.0f} s", flush=True)


def measure(kind: str, seconds: float, out: Path) -> None:
    """Every case of a kind, as long as there is time; stored after each."""
    found: dict[str, Any] = {"cases": [], "left_out": []}
    one: Any = decode_case if kind == "decode" else prefill_case
    for name, lens in CASES[kind]:
        if time.monotonic() - START > seconds:
            found["left_out"].append(name)
            continue
        found["cases"].append(one(name, lens, HEADS))
        print(found["cases"][-1], f"at {time.monotonic() - START:.0f} s", flush=True)
        save(out, found, f"python3 -m tests.gpu.attention_trials {kind} --out FILE")
        torch.cuda.empty_cache()


def main() -> None:
    """Compile, or check, time and store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("compile", *CASES))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--shapes", nargs="+", default=[], help="shapes of prefill, or fi")
    parser.add_argument("--compile", type=int, help="the number of a process that compiles")
    args = parser.parse_args()
    SHAPES.extend(args.shapes)
    with torch.inference_mode():
        if args.compile is not None:
            compile_part(args.compile)
        elif args.kind == "compile":
            compile_all(args.seconds, sys.argv[1:])
        else:
            measure(args.kind, args.seconds, args.out)


if __name__ == "__main__":
    main()
