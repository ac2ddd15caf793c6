"""Limits of a GPU that decide the number and size of a kernel's programs.

Generated from notebooks/04b_gpu_attention.ipynb: edit there.
"""

from __future__ import annotations

import json
import os
import warnings
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
import triton

RESERVED = 1024  # bytes of each program's shared memory that CUDA reserves


class TunedTiles(dict[str, list[Any]]):
    """Tiles that a search found fastest on a kind of GPU, see chapter 13f; []: cuBLAS.

    `asked` holds the keys of all look-ups, for a search to tune.
    """

    def __init__(self, found: dict[str, list[Any]] | None = None) -> None:
        super().__init__(found or {})
        self.asked: set[str] = set()

    def find(self, *what: object) -> list[Any] | None:
        """Return the tuned tiles of a kernel for these sizes; None if its rule decides."""
        key = " ".join(map(str, what))
        self.asked.add(key)
        return self.get(key)


@dataclass(frozen=True)
class DeviceLimits:
    """Resources of a GPU."""

    sms: int  # multiprocessors
    shared_memory: int  # bytes that a program may use; an SM has `RESERVED` more
    capability: int  # 90 is compute capability 9.0
    tuned: TunedTiles = field(default_factory=TunedTiles, compare=False, repr=False)

    @property
    def runs_tiles(self) -> bool:
        """True if our kernels' tiles fit; GPUs before 8.0 have less memory and no async copies."""
        return self.capability >= 80

    def resident_blocks(self, most: int, nbytes: int) -> int:
        """Return the number of resident thread blocks: `most` per SM if `nbytes` of each fit."""
        room = self.shared_memory + RESERVED
        return self.sms * min(most, room // (nbytes + RESERVED))


H200 = DeviceLimits(sms=132, shared_memory=232_448, capability=90)


def tile_files(gpu: str) -> tuple[Path, Path]:
    """Return the files of tuned tiles for a GPU: the package's, and this machine's cache."""
    name = gpu.replace(" ", "_") + ".json"
    cached = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "minisgl"
    return Path(str(files("minisgl.kernels"))) / "tiles" / name, cached / "tiles" / name


def divides(key: str, tiles: list[Any]) -> bool:
    """Return True if `tiles` are positive integers that divide the weight in `key`."""
    kernel, kind, *_, n, k = key.split()
    sizes = tiles if kernel == "row" else [*tiles[:5], *tiles[6:]]
    if type(tiles) is not list or any(type(size) is not int or size < 1 for size in sizes):
        return False
    if not tiles:
        return kernel == "rows"
    bn, bk = tiles[:2] if kernel == "row" else tiles[1:3]
    whole = len(tiles) == (4 if kernel == "row" else 7)
    open_sum = kernel != "row" and tiles[-1] > 1 and kind != "split"  # never added up
    return whole and not (int(n) % bn or int(k) % bk or open_sum)


def load_tuned(gpu: str) -> TunedTiles:
    """Load the tuned tiles of a GPU: the package's, then those found on this machine."""
    found = TunedTiles()
    for path in tile_files(gpu):
        try:
            for key, tiles in json.loads(path.read_text())["tiles"].items():
                if not divides(key, tiles):
                    raise ValueError(f"{key}: no tiles for such a weight, got {tiles}")
                found[key] = tiles
        except FileNotFoundError:
            continue
        except Exception as error:  # a bad file never stops an engine
            warnings.warn(f"tiles: {path} is ignored from here on: {error!r}", stacklevel=2)
    return found


@cache
def device_limits(device: torch.device) -> DeviceLimits:
    """Return the limits of a device; a CPU gets those of an H200."""
    if device.type == "cpu":
        return H200
    driver = triton.runtime.driver.active
    found, gpu = driver.utils.get_device_properties(device.index or 0), device.type == "cuda"
    return DeviceLimits(
        found["multiprocessor_count"], found["max_shared_mem"],
        int(driver.get_current_target().arch),
        load_tuned(torch.cuda.get_device_name(device)) if gpu else TunedTiles(),
    )  # fmt: skip
