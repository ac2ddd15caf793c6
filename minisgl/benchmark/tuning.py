"""Search for the fastest tiles of decode steps on this GPU, over the keys that kernels look up.

Generated from notebooks/13f_tuning.ipynb: edit there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from statistics import median
from typing import Any

from minisgl.kernels.device import DeviceLimits, TunedTiles

GAIN = 0.003  # of a step: less is noise
Measure = Callable[[], float]  # seconds of a step with the present entries
Choices = Callable[[str], Iterable[list[Any]]]  # for a key


def try_all(
    key: str, tiles: Iterable[list[Any]], tuned: TunedTiles, measure: Measure, best: float
) -> float:
    """Store the fastest of `tiles` under `key` if it beats `best`; skip those that cannot run."""
    kept = tuned.get(key)
    try:
        for one in tiles:
            tuned[key] = one
            try:
                seconds = measure()
            except Exception:  # of Triton, such as too little shared memory
                continue
            if seconds < best * (1 - GAIN):
                best, kept = seconds, one
    finally:
        tuned.pop(key, None)
        if kept is not None:
            tuned[key] = kept
    return best


def gains(key: str, tuned: TunedTiles, measure: Measure, turns: int = 7) -> bool:
    """Return True if a step is faster with the entry than without, measured in turns."""
    tiles, gained = tuned[key], []
    for _ in range(turns):
        del tuned[key]
        without = measure()
        tuned[key] = tiles
        gained.append(1 - measure() / without)
    return median(gained) > GAIN


def search(tuned: TunedTiles, choices: Choices, measure: Measure) -> dict[str, list[Any]]:
    """Find better entries for all keys that a step looks up; return the verified new entries.

    Keys that already have an entry are left unchanged.
    """
    old = set(tuned)
    tuned.asked.clear()
    best = measure()
    keys = sorted(tuned.asked - old)
    for key in keys:
        best = try_all(key, choices(key), tuned, measure, best)
    for key in keys:
        if key in tuned and not gains(key, tuned, measure):
            del tuned[key]
    return {key: tuned[key] for key in keys if key in tuned}


def row_choices(scales: int, n: int, k: int, gated: bool) -> Iterator[list[Any]]:
    """Yield (BN, BK, warps, FOLD) of a GEMV."""
    for bn in (1, 2, 4, 8, 16):
        for bk in (512, 1024, 2048, 4096):
            for warps in (1, 2, 4, 8):
                each = bn * bk * (2 if gated else 1) // (32 * warps)
                if n % bn == 0 and k % bk == 0 and 16 <= each <= 128 and n // bn >= 128:
                    yield [bn, bk, warps, 16 if scales else 1]


# (BN, BK, warps, stages, swap) by rows of a tile
SHAPES: dict[int, tuple[tuple[int, int, int, int, bool], ...]] = {
    16: ((64, 128, 4, 4, True), (64, 128, 4, 6, True), (64, 64, 4, 8, True),
         (64, 256, 4, 3, True), (32, 128, 2, 6, True), (32, 128, 2, 4, True),
         (32, 256, 2, 4, True), (32, 64, 2, 8, True), (16, 256, 1, 4, True),
         (16, 128, 1, 8, True), (128, 64, 4, 6, True), (128, 128, 8, 3, True)),
    32: ((64, 128, 4, 4, True), (64, 128, 4, 6, True), (64, 64, 4, 8, True),
         (32, 128, 2, 6, True), (32, 256, 2, 3, True), (32, 128, 4, 6, True),
         (128, 64, 4, 6, True), (128, 128, 8, 3, True)),
    64: ((64, 64, 4, 8, True), (64, 128, 4, 4, True), (128, 64, 4, 5, True),
         (128, 64, 8, 5, True), (32, 128, 4, 6, False), (32, 64, 4, 8, False),
         (64, 128, 4, 4, False), (64, 64, 4, 6, False), (128, 64, 4, 5, False),
         (128, 64, 8, 5, False)),
    128: ((64, 64, 4, 5, False), (64, 128, 8, 3, False), (32, 128, 4, 4, False),
          (128, 64, 8, 4, False), (128, 64, 4, 4, False), (128, 128, 8, 3, False)),
}  # fmt: skip


def rows_choices(
    rows: int, n: int, k: int, kind: str, itemsize: int, limits: DeviceLimits
) -> Iterator[list[Any]]:
    """Yield the `Tiling`s of a GEMM that fit into shared memory; cuBLAS last."""
    halves = 2 if kind == "gated" else 1
    for bm in {min(rows, 128), 64 if rows > 64 else rows}:
        for bn, bk, warps, stages, swap in SHAPES[bm]:
            stage = (2 * bm + itemsize * bn * halves) * bk
            stages = min(stages, limits.shared_memory // stage)
            if n % bn or k % bk or stages < 2 or (itemsize == 1 and bk > 128):
                continue  # FP8 weights may have a scale for each 128 columns
            programs = n // bn * -(-rows // bm)
            for splits in (1, 2, 4, 8) if kind == "split" else (1,):
                if splits == 1 or (programs * splits <= 3 * limits.sms and k >= splits * bk):
                    yield [bm, bn, bk, warps, stages, swap, splits]
    if itemsize == 2:
        yield []


def choices(key: str, limits: DeviceLimits) -> Iterable[list[Any]]:
    """Return the candidate tiles of a key that a kernel looked up."""
    kernel, kind, *sizes = key.split()
    first, n, k = map(int, sizes)
    if kernel == "row":
        return row_choices(first, n, k, "gated" in kind)
    return rows_choices(first, n, k, kind, 1 if kernel == "rows8" else 2, limits)
