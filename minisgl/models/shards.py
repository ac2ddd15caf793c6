"""Shard specs: the part of a checkpoint's tensor that fills a part of a parameter.

Generated from notebooks/05b_weights.ipynb: edit there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import singledispatch
from operator import attrgetter

from torch import nn

from minisgl.layers.attention import QKNorm, RMSNorm
from minisgl.layers.linear import (
    LMHead,
    MergedColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)

FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class ShardSpec:
    """One tensor of a checkpoint, and the part of one of our parameters that it fills.

    name: of the tensor in the checkpoint. shape: its required shape there, before any cut.
    source: the part that this rank reads. target: the place of that part in the parameter
    (it is broadcast if the target is larger). param: the layer's attribute. An empty index
    means all of it. dtypes: allowed dtypes. repeat: each row of the tensor stands for `repeat`
    rows, and `source` counts those. mine: False if only other ranks read it; it must still be
    there and fit.
    """

    name: str
    shape: tuple[int, ...]
    source: tuple[slice, ...] = ()
    target: tuple[slice, ...] = ()
    param: str = "weight"
    dtypes: tuple[str, ...] = FLOATS
    repeat: int = 1
    mine: bool = True


@singledispatch
def layer_shards(layer: nn.Module, path: str) -> Iterator[ShardSpec]:
    """Yield the tensors that fill one layer, named `path` in the model; none if it has none.

    Raise TypeError for a layer that has parameters and no rule: it would stay empty.
    """
    if next(layer.parameters(recurse=False), None) is not None:
        raise TypeError(f"{path}: no rule fills a {type(layer).__name__}")
    return iter(())


@layer_shards.register
def norm_shards(layer: RMSNorm, path: str) -> Iterator[ShardSpec]:
    """Yield the norm, whole on every rank."""
    yield ShardSpec(f"{path}.weight", layer.shape)


@layer_shards.register
def qk_norm_shards(layer: QKNorm, path: str) -> Iterator[ShardSpec]:
    """Yield one weight for all query heads, one for all key heads."""
    parent, split = path.rpartition(".")[0], layer.num_qo_heads
    yield ShardSpec(f"{parent}.q_norm.weight", layer.shape, (), (slice(None, split),))
    yield ShardSpec(f"{parent}.k_norm.weight", layer.shape, (), (slice(split, None),))


@layer_shards.register
def merged_shards(layer: MergedColumnParallelLinear, path: str) -> Iterator[ShardSpec]:
    """Yield this rank's rows of every projection, one projection below the other."""
    parent, start = path.rpartition(".")[0], 0
    for shard in layer.shards:
        source = (slice(shard.start, shard.start + shard.size),)
        target = (slice(start, start + shard.size),)
        name = f"{parent}.{shard.name}"
        yield ShardSpec(f"{name}.weight", (shard.full, layer.in_features), source, target)
        if layer.bias is not None:
            yield ShardSpec(f"{name}.bias", (shard.full,), source, target, "bias")
        start += shard.size


@layer_shards.register
def row_parallel_shards(layer: RowParallelLinear, path: str) -> Iterator[ShardSpec]:
    """Yield this rank's columns."""
    columns = slice(layer.shard.start, layer.shard.start + layer.shard.size)
    yield ShardSpec(f"{path}.weight", layer.full_shape, (slice(None), columns))


@layer_shards.register
def embedding_shards(layer: VocabParallelEmbedding, path: str) -> Iterator[ShardSpec]:
    """Yield this rank's range of ids, without padding."""
    stop = min(layer.start + layer.rows, layer.vocab_size)
    real = slice(min(layer.start, stop), stop)  # empty on a rank with only padding
    target = (slice(0, real.stop - real.start),)
    yield ShardSpec(f"{path}.weight", (layer.vocab_size, layer.hidden), (real,), target)


@layer_shards.register
def head_shards(layer: LMHead, path: str) -> Iterator[ShardSpec]:
    """Yield nothing for a tied head, which borrows the embedding."""
    return iter(()) if layer.tied else embedding_shards(layer, path)


@singledispatch
def parameter_shards(parameter: object, spec: ShardSpec) -> Iterator[ShardSpec]:
    """Yield the tensors of a spec: for an ordinary parameter, the one that it names."""
    yield spec


def model_shards(model: nn.Module) -> list[tuple[nn.Module, ShardSpec]]:
    """List every tensor that the model reads, with its layer."""
    return [
        (layer, part)
        for path, layer in model.named_modules()
        for spec in layer_shards(layer, path)
        for part in parameter_shards(attrgetter(spec.param)(layer), spec)
    ]
