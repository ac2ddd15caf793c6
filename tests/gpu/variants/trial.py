"""Variants of decode attention side by side: `compile`, then `run --out FILE --seconds S`."""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from unittest import mock

import torch

from minisgl.benchmark.report import save
from minisgl.kernels import decode_attention as final
from tests.gpu import attention_trials as base
from tests.gpu.variants import clamp, free, old, tune, wide

try:
    from tests.gpu.variants import pairs
except ImportError:
    pairs = None

START = time.monotonic()
PROCESSES = 20
FP8 = torch.float8_e4m3fn
MODULES = {"old": old, "final": final, "tune": tune, "wide": wide, "free": free, "branch": clamp, "pairs": pairs}
STEPS = ["old", "shared", "early", "final"]  # as their shape_of says
FIRST = STEPS
A, B, C = (16, 8), (32, 8), (40, 8)

ONE = "tune 64-4-2-3 late m16|tune 64-4-2-2 early m16|tune 128-4-2-3 late m8"
FEW = "tune 128-4-2-2 early m8|tune 64-4-2-3 early m16|tune 128-4-2-3 late m8"
SOME = "tune 64-2-2-5 late m4|tune 64-2-2-4 late m4|free 64-2-2-5 late m4|tune 128-4-2-3 late m4|tune 128-4-2-4 late m4|tune 32-1-6-6 late m4"
MANY = "tune 32-1-6-6 late m4|tune 64-2-2-5 late m4|free 64-2-2-5 late m4"
EIGHT = "wide|pairs 32-1-6-10|pairs 64-1-4-8|tune 32-1-6-10 late m4|tune 32-1-6-6 late m4|tune 128-4-2-2 early m8"
MIX = base.MIXED
ABOUT = [580 + i * 37 % 80 for i in range(256)]
CASES = [("64 x 640", [640] * 64, SOME, A, 2), ("64 of 100 to 1600", MIX[:64].tolist(), SOME, A, 2),
         ("64 x 640", [640] * 64, SOME, B, 2), ("64 of 100 to 1600", MIX[:64].tolist(), SOME, B, 2),
         ("64 of 100 to 1600", MIX[:64].tolist(), EIGHT, C, 1), ("64 about 620", ABOUT[:64], EIGHT, C, 1),
         ("40 about 620", ABOUT[:40], EIGHT, C, 1), ("24 of 100 to 1600", MIX[:24].tolist(), EIGHT, C, 1), ("16 about 620", ABOUT[:16], EIGHT, C, 1),
         ("256 about 620", ABOUT, EIGHT, C, 1), ("128 about 620", ABOUT[:128], EIGHT, C, 1), ("1 x 640", [640], "wide", C, 1),
         ("56 x 640", [640] * 56, SOME, A, 2), ("40 x 640", [640] * 40, SOME, A, 2), ("48 of 100 to 1600", MIX[120:168].tolist(), SOME, A, 2),
         ("1 x 640", [640], ONE, A, 2), ("1 x 640", [640], ONE, B, 2), ("256 x 640", [640] * 256, MANY, A, 2),
         ("1 x 40000, 63 x 640", [40_000] + [640] * 63, SOME, A, 2), ("256 of 100 to 1600", MIX.tolist(), MANY, A, 2),
         ("1 x 300", [300], ONE, A, 2), ("1 x 300", [300], ONE, B, 2), ("8 x 640", [640] * 8, FEW, A, 2), ("8 x 640", [640] * 8, FEW, B, 2),
         ("32 x 640", [640] * 32, SOME, A, 2), ("72 x 640", [640] * 72, MANY, A, 2), ("96 x 640", [640] * 96, MANY, A, 2),
         ("1 x 4096", [4096], ONE, A, 2), ("1 x 40000", [40000], ONE, A, 2), ("32 of 100 to 1600", MIX[80:112].tolist(), SOME, A, 2),
         ("8 of 100 to 1600", MIX[112:120].tolist(), FEW, A, 2), ("2 x 640", [640] * 2, FEW, A, 2), ("4 x 640", [640] * 4, FEW, A, 2),
         ("16 x 640", [640] * 16, FEW, A, 2), ("24 x 640", [640] * 24, FEW, A, 2), ("16 of 100 to 1600", MIX[64:80].tolist(), FEW, A, 2),
         ("128 of 100 to 1600", MIX[128:].tolist(), MANY, A, 2), ("8 x 4096", [4096] * 8, FEW, A, 2), ("1 x 40000, 7 x 640", [40_000] + [640] * 7, FEW, A, 2),
         ("48 x 640", [640] * 48, SOME, A, 2), ("40 x 640", [640] * 40, SOME, B, 2), ("1 x 4096", [4096], ONE, B, 2),
         ("128 x 640", [640] * 128, MANY, A, 2), ("20 x 640", [640] * 20, FEW, A, 2), ("12 x 640", [640] * 12, FEW, A, 2),
         ("64 x 100", [100] * 64, SOME, A, 2), ("64 of 100 to 1600", MIX[:64].tolist(), "", A, 1), ("8 x 16", [16] * 8, FEW, A, 2),
         ("1 x 900", [900], "", A, 2), ("1 x 900", [900], "", B, 2)]  # fmt: skip


class Requests(base.Requests):
    def __init__(self, lens, heads, itemsize, most_layers=64):
        super().__init__(lens, *heads, most_layers=most_layers)
        if itemsize == 1:
            self.k, self.v = self.k.to(FP8), self.v.to(FP8)

    def oracle(self, i):
        if self.k.dtype is base.BF16:
            return super().oracle(i)
        k, v, qkv = self.k, self.v, self.qkv
        try:
            self.k, self.v = k[i : i + 1].float(), v[i : i + 1].float()
            turned = self.turned
            self.turned = lambda x: turned(x) if x.shape[1] == self.qo and self.qo != self.kv else turned(x).to(FP8).float()
            self.qkv = torch.cat((qkv[:, : -self.kv], qkv[:, -self.kv :].to(FP8).to(base.BF16)), 1)
            return super().oracle(0)
        finally:
            self.k, self.v, self.qkv = k, v, qkv
            del self.turned


def ways(text, itemsize):
    found = [way for line in text.strip().splitlines() for way in line.split("|") if way]
    found = [way for way in found if pairs is not None or not way.startswith("pairs")]
    return (FIRST if itemsize == 2 else ["old", "final"]) + found


def attend(way, c, i, qkv=None):
    name, *rest = way.split()
    module = MODULES["tune" if name in ("shared", "early") else name]

    def call():
        return module.decode_attention(
            *c.heads(qkv), c.k[i], c.v[i], c.table, c.rows, c.positions, c.slots, c.scratch, c.scale,
            norms=c.norms, eps=1e-6, table=c.angles,
        )  # fmt: skip

    if name in ("shared", "early"):  # parts merged one by one; nothing early
        usual = module.shape_of

        def one_by_one(*of):
            (tile, warps, stages, early), parts = usual(*of)
            return (tile, warps, stages, early and name == "early"), parts

        module.MERGE_AT = 1
        try:
            with mock.patch.object(module, "shape_of", one_by_one):
                return call()
        finally:
            module.MERGE_AT = 0
    if not rest:
        return call()
    shape, *more = rest
    tile, warps, stages, per_sm = map(int, shape.split("-"))
    if more and hasattr(module, "MERGE_AT"):
        module.MERGE_AT = int(more[1][1:])

    def shape_of(bs, kv, *of):
        return (tile, warps, stages, more[:1] == ["early"]), max(1, per_sm * 132 // kv)

    try:
        with mock.patch.object(module, "shape_of", shape_of):
            return call()
    finally:
        module.MERGE_AT = 0


def jobs():
    seen, found = set(), []
    for _, lens, text, heads, itemsize in CASES:
        for way in ways(text, itemsize):
            n = len(lens)
            batch = 1 if n == 1 else max(32, 1 << (n - 1).bit_length())
            name, *rest = way.split()
            key = (name, n if name == "old" else (batch, tune.shape_of(n, heads[1], tune.H200, itemsize)), heads, itemsize) if not rest else (name, heads, itemsize, batch, rest[0].rpartition("-")[0], *rest[1:])
            if key not in seen:
                seen.add(key)
                found.append((way, n, heads, itemsize))
    return found


def compile_part(part):
    for way, n, heads, itemsize in jobs()[part::PROCESSES]:
        try:
            c = Requests([40] * n, heads, itemsize, most_layers=1)
            if way == "old":  # the projections too
                base.Chain(c)(partial(attend, way, c))
            else:
                attend(way, c, 0)
        except Exception as error:
            print(way, n, repr(error)[:200], flush=True)


def compile_all(seconds):
    made = [subprocess.Popen([sys.executable, "-m", "tests.gpu.variants.trial", "compile", "--part", str(i)]) for i in range(PROCESSES)]
    stop = time.monotonic() + seconds
    for process in made:
        try:
            process.wait(max(0.1, stop - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            print("killed one", flush=True)
    print(f"compiled {len(jobs())} in {time.monotonic() - START:.0f} s", flush=True)


def one(name, lens, text, heads, itemsize):
    c = Requests(lens, heads, itemsize)
    want = c.oracle(0)
    found = {"case": name, "heads": heads, "itemsize": itemsize, "chain_us": {}, "gap": {}, "failed": {}}
    chain = base.Chain(c)
    for way in ways(text, itemsize):
        try:
            for _ in range(2):
                gap = float((attend(way, c, 0).float() - want).norm() / want.norm())
                found["gap"][way] = gap
                if not gap < 1e-2 or int(c.scratch.done.sum()):
                    c.scratch.done.zero_()
                    raise ValueError(f"wrong by {gap:.2g}")
            found["chain_us"][way] = base.graph_us(partial(chain, partial(attend, way, c)), c.layers)
        except Exception as error:
            found["failed"][way] = f"{type(error).__name__}: {error}"[:160]
    for way in ("old", "final"):  # once more at the end: how much a cell differs
        if way in found["chain_us"]:
            found["chain_us"][way + " again"] = base.graph_us(partial(chain, partial(attend, way, c)), c.layers)
    return found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("compile", "run"))
    parser.add_argument("--part", type=int)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=30.0)
    args = parser.parse_args()
    with torch.inference_mode():
        if args.part is not None:
            return compile_part(args.part)
        if args.kind == "compile":
            return compile_all(args.seconds)
        found = {"cases": [], "left_out": []}
        for case in CASES:
            if time.monotonic() - START > args.seconds:
                found["left_out"].append([case[0], case[3], case[4]])
                continue
            found["cases"].append(one(*case))
            row = found["cases"][-1]
            best = sorted(row["chain_us"].items(), key=lambda t: t[1])[:5]
            print(f"{time.monotonic() - START:.0f} s", *(row[k] for k in ("case", "heads", "itemsize")), "old", row["chain_us"].get("old"), "final", row["chain_us"].get("final"), best, row["failed"], flush=True)
            save(args.out, found, "python3 -m tests.gpu.variants.trial run --out FILE")
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
