"""The tensors of a GGUF file under their hub names, with the interface of safetensors.

Generated from notebooks/06e_gguf.ipynb: edit there.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from minisgl.config.rules import refuse
from minisgl.models.gguf.config import config_of
from minisgl.models.gguf.header import Header, StoredTensor, read_header

PIECE = 2**18  # numbers that are dequantised at a time


def hub_order(rows: int, head_dim: int) -> np.ndarray:
    """Return for each row of a query or key projection the row of a llama-type file, int64 [n]."""
    return np.arange(rows).reshape(-1, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)


class TensorSlice:
    """A tensor of which indexing dequantises a part, to float32."""

    def __init__(self, data: np.ndarray, tensor: StoredTensor, shape: tuple[int, ...],
                 first_row: int = 0, order: np.ndarray | None = None) -> None:  # fmt: skip
        rows = shape[0] if len(shape) > 1 else 1
        start = tensor.start + first_row * tensor.row_bytes
        raw = data[start : start + rows * tensor.row_bytes].reshape(rows, tensor.row_bytes)
        self.raw, self.kind, self.shape, self.order = raw, tensor.kind, shape, order

    def get_shape(self) -> tuple[int, ...]:
        return self.shape

    def get_dtype(self) -> str:
        return "F32"  # in the spelling of safetensors

    def __getitem__(self, index: Any) -> torch.Tensor:
        first, *rest = index if isinstance(index, tuple) and index else (slice(None),)
        if len(self.shape) == 1:
            return torch.tensor(self.values(self.raw)[0])[first]
        picked = self.raw[first if self.order is None else self.order[first]]
        out = torch.empty(len(picked), self.shape[1])
        step = max(1, PIECE // self.shape[1])
        for at in range(0, len(picked), step):
            out.numpy()[at : at + step] = self.values(picked[at : at + step])
        return out[(slice(None), *rest)]

    def values(self, raw: np.ndarray) -> np.ndarray:
        """Dequantize rows of the file to float32."""
        return gguf.quants.dequantize(np.ascontiguousarray(raw), self.kind)


LAYER = ("input_layernorm", "post_attention_layernorm", "self_attn.q_proj", "self_attn.k_proj",
         "self_attn.v_proj", "self_attn.o_proj", "self_attn.q_norm", "self_attn.k_norm",
         "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")  # fmt: skip
OUTSIDE = ("model.embed_tokens", "model.norm", "lm_head")
EXPERTS = {"mlp": ("gate_proj", "up_proj", "down_proj"), "block_sparse_moe": ("w1", "w3", "w2")}
TURNED = ("self_attn.q_proj", "self_attn.k_proj")  # llama.cpp permutes their rows
READ_ELSEWHERE = "rope_freqs.weight"  # by the config


Stored = tuple[StoredTensor, int | None, np.ndarray | None]  # with its expert and its order of rows


def stored_names(arch: str, config: dict[str, Any]) -> Iterator[tuple[str, str | None]]:
    """Yield modules' hub names and their names in a file, by the table of the `gguf` package."""
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(number, config["num_hidden_layers"])
    block = "block_sparse_moe" if config["model_type"] == "mixtral" else "mlp"
    parts = [*LAYER, f"{block}.gate", *(f"{block}.experts.{part}" for part in EXPERTS[block])]
    layers = range(config["num_hidden_layers"])
    inside = [f"model.layers.{layer}.{part}" for layer in layers for part in parts]
    return ((module, names.get_name(module)) for module in [*OUTSIDE, *inside])


class GgufTensors:
    """An open GGUF file, with the hub's names for its tensors."""

    def __init__(self, path: Path) -> None:
        self.header: Header = read_header(path)
        self.config = config_of(self.header)
        self.data = np.memmap(path, np.uint8, mode="r")
        self.found = dict(self.translate())

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        del self.data  # the mapping is closed with the last slice

    def keys(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self.found)

    def get_slice(self, name: str) -> TensorSlice:
        """Return a slice of one tensor, to be indexed."""
        tensor, expert, order = self.found[name]
        shape = tensor.shape if expert is None else tensor.shape[1:]
        first = 0 if expert is None else expert * shape[0]
        if len(shape) > 2:
            raise refuse(name, "of at most two dimensions", shape)
        return TensorSlice(self.data, tensor, shape, first, order)

    def translate(self) -> Iterator[tuple[str, Stored]]:
        """Yield each hub name and its tensor; names without a translation are kept."""
        arch, config = self.header.fields["general.architecture"], self.config
        left = dict(self.header.tensors)
        left.pop(READ_ELSEWHERE, None)
        for module, stored in stored_names(arch, config):
            for end in (".weight", ".bias"):
                tensor = left.pop(f"{stored}{end}", None)
                if tensor is None:
                    continue
                before, experts, after = module.partition(".experts.")
                for i in range(tensor.shape[0]) if experts else ():
                    yield f"{before}.experts.{i}.{after}{end}", (tensor, i, None)
                turned = arch == "llama" and module.endswith(TURNED) and end == ".weight"
                order = hub_order(tensor.shape[0], config["head_dim"]) if turned else None
                if not experts:
                    yield module + end, (tensor, None, order)
        yield from ((name, (tensor, None, None)) for name, tensor in left.items())
