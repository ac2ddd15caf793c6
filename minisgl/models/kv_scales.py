"""KV-cache scales from a checkpoint.

Generated from notebooks/05g_fp8.ipynb: edit there.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from torch import Tensor

from minisgl.kvcache.fp8_pool import Fp8KVPool
from minisgl.kvcache.pool import KVPool
from minisgl.layers.linear import head_shard
from minisgl.models.weights import Checkpoint, WeightError
from minisgl.parallel.comm import Comm


def for_each_head(name: str, found: Tensor, heads: int) -> Tensor:
    """Expand a checkpoint's scale, one number or one for each KV head, to one for each head."""
    if found.squeeze().shape not in ((), (heads,)):
        shape, must = tuple(found.shape), f"one number, or one for each of {heads} KV heads"
        raise WeightError(f"weights: {name} has shape {shape}, the model needs {must}")
    numbers = found.flatten().float()
    if not (found.is_floating_point() and numbers.isfinite().all() and (numbers > 0).all()):
        raise WeightError(f"weights: {name} must be finite and above 0, got {found.tolist()}")
    return numbers.expand(heads)


def load_kv_scales(pool: KVPool, folder: Path, num_kv_heads: int, comm: Comm) -> None:
    """Load the scales of this rank's heads from a checkpoint, if it has any."""
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
