"""Decoders with a mixture of experts, and the layouts of their checkpoints.

Generated from notebooks/11_mixture_of_experts.ipynb: edit there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial

from torch import nn

from minisgl.layers.moe import MoE
from minisgl.models.base import CausalLM
from minisgl.models.shards import ShardSpec, layer_shards


class MoECausalLM(CausalLM):
    """A decoder with experts in all layers but `config.moe.dense_layers`."""

    def make_mlp(self, layer_id: int) -> nn.Module:
        """Build experts, or the MLP of a dense layer."""
        moe = self.config.moe
        if moe is None or layer_id in moe.dense_layers:
            return super().make_mlp(layer_id)
        return MoE(self.config.hidden_size, moe, self.ctx)

    def choose_layout(self, names: Collection[str]) -> None:
        """Set the experts' layout from the names of a checkpoint's tensors."""
        for path, layer in self.named_modules():
            if isinstance(layer, MoE):
                if f"{path}.experts.gate_up_proj" in names:
                    layer.layout = "packed"
                elif f"{path.rpartition('.')[0]}.block_sparse_moe.gate.weight" in names:
                    layer.layout = "mixtral"


ALL = slice(None)
NAMES = {"qwen": ("gate_proj", "up_proj", "down_proj"), "mixtral": ("w1", "w3", "w2")}


@layer_shards.register
def moe_shards(layer: MoE, path: str) -> Iterator[ShardSpec]:
    """Yield the router, and for each expert this rank's rows of gate and up, columns of down."""
    if layer.layout == "mixtral":
        path = f"{path.rpartition('.')[0]}.block_sparse_moe"
    (experts, hidden), full, first = layer.gate.shape, layer.shard.full, layer.experts.start
    mine = slice(layer.shard.start, layer.shard.start + layer.shard.size)
    held = slice(first, first + layer.experts.size)
    yield ShardSpec(f"{path}.gate.weight", (experts, hidden), param="gate")
    top, bottom = slice(None, layer.shard.size), slice(layer.shard.size, None)
    if layer.layout == "packed":
        name, shape = f"{path}.experts.gate_up_proj", (experts, 2 * full, hidden)
        second = slice(full + mine.start, full + mine.stop)  # up is below gate
        yield ShardSpec(name, shape, (held, mine), (ALL, top), "gate_up")
        yield ShardSpec(name, shape, (held, second), (ALL, bottom), "gate_up")
        shape = (experts, hidden, full)
        yield ShardSpec(f"{path}.experts.down_proj", shape, (held, ALL, mine), (), "down")
        return
    gate, up, down = NAMES[layer.layout]
    for i in range(experts):
        one, name = slice(i - first, i - first + 1), f"{path}.experts.{i}"
        spec = partial(ShardSpec, mine=held.start <= i < held.stop)
        yield spec(f"{name}.{gate}.weight", (full, hidden), (mine,), (one, top), "gate_up")
        yield spec(f"{name}.{up}.weight", (full, hidden), (mine,), (one, bottom), "gate_up")
        yield spec(f"{name}.{down}.weight", (hidden, full), (ALL, mine), (one,), "down")
