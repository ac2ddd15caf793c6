"""A KV pool of eight-bit floats, and which pool a config asks for.

Generated from notebooks/05g_fp8.ipynb: edit there.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minisgl.config.engine import EngineConfig
from minisgl.config.model import ModelConfig
from minisgl.kvcache.pool import KVPool
from minisgl.layers.fp8 import FP8, LARGEST, check_device
from minisgl.layers.linear import head_shard
from minisgl.models.weights import Checkpoint, WeightError
from minisgl.parallel.comm import Comm


class Fp8KVPool(KVPool):
    """K and V in float8_e4m3fn. Each head stores them divided by its two scales, 1.0 at first."""

    quantized = True

    def __init__(self, *, num_layers: int, **sizes: Any) -> None:
        """As `KVPool`, without a dtype."""
        super().__init__(num_layers=num_layers, dtype=FP8, **sizes)
        self._slots = self.buffer.view(torch.uint8).flatten(2, 3).unbind(1)  # what torch can index
        shape = num_layers, 4, self.num_kv_heads, 1  # 4: layers begin at multiples of 16 bytes
        self.layer_scales = torch.ones(shape, device=self.buffer.device)[:, :2].unbind()

    def scales(self, layer_id: int) -> Tensor:
        """What each head's keys and values are multiplied by when they are read: [2, heads, 1]."""
        return self.layer_scales[layer_id]

    def store_kv(self, k: Tensor, v: Tensor, out_loc: Tensor, layer_id: int) -> None:
        """As in a `KVPool`; what is too large for eight bits becomes the largest number, 448."""
        k, v = (
            (part.float() / scale).clamp_(-LARGEST, LARGEST).to(FP8).view(torch.uint8)
            for part, scale in zip((k, v), self.scales(layer_id), strict=True)
        )
        super().store_kv(k, v, out_loc, layer_id)

    def load_kv(self, slots: Tensor, layer_id: int, dtype: torch.dtype) -> list[Tensor]:
        """The numbers that K and V at these slots stand for."""
        found = super().load_kv(slots, layer_id, torch.uint8)
        return [
            (part.view(FP8).float() * scale).to(dtype)
            for part, scale in zip(found, self.scales(layer_id), strict=True)
        ]


def kv_dtype(config: EngineConfig) -> torch.dtype:
    """The dtype of keys and values in the pool of a resolved config."""
    found: torch.dtype = getattr(torch, config.dtype)
    return FP8 if config.kv_cache_dtype == "fp8" else found


def make_pool(config: EngineConfig, model: ModelConfig, num_pages: int) -> KVPool:
    """The pool that a resolved config asks for; ValueError on a GPU without eight-bit floats."""
    sizes: dict[str, Any] = {
        "num_layers": model.num_layers, "num_pages": num_pages, "page_size": config.page_size,
        "num_kv_heads": model.kv_heads_per_rank(config.tp.size), "head_dim": model.head_dim,
        "device": torch.device(config.device),
    }  # fmt: skip
    if config.kv_cache_dtype != "fp8":
        return KVPool(dtype=kv_dtype(config), **sizes)
    check_device("kv_cache_dtype", config.device)
    return Fp8KVPool(**sizes)


def for_each_head(name: str, found: Tensor, heads: int) -> Tensor:
    """A scale of a checkpoint, one number or one for each KV head, as one for each."""
    if found.squeeze().shape not in ((), (heads,)):
        shape, must = tuple(found.shape), f"one number, or one for each of {heads} KV heads"
        raise WeightError(f"weights: {name} has shape {shape}, the model needs {must}")
    numbers = found.flatten().float()
    if not (found.is_floating_point() and numbers.isfinite().all() and (numbers > 0).all()):
        raise WeightError(f"weights: {name} must be finite and above 0, got {found.tolist()}")
    return numbers.expand(heads)


def load_kv_scales(pool: KVPool, folder: Path, num_kv_heads: int, comm: Comm) -> None:
    """Take the scales of this rank's heads from a checkpoint, where it has some."""
    if not isinstance(pool, Fp8KVPool) or not any(folder.glob("*.safetensors")):
        return
    mine = head_shard("k_scale", num_kv_heads, 1, comm)
    with ExitStack() as stack:
        file_of = Checkpoint(folder, stack).file_of
        for i, scales in enumerate(pool.layer_scales):
            for part, scale in zip("kv", scales, strict=True):
                name = f"model.layers.{i}.self_attn.{part}_scale"
                if name in file_of:
                    found = for_each_head(name, file_of[name].get_tensor(name), num_kv_heads)
                    scale[:, 0] = found[mine.start : mine.start + mine.size]
