"""Loading a folder of safetensors into the parameters of one rank, with every name checked.

Generated from notebooks/05b_weights.ipynb: edit there.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from contextlib import ExitStack
from functools import singledispatch
from itertools import groupby
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from tqdm import tqdm

from minisgl.config.paths import read_json
from minisgl.layers.attention import QKNorm, RMSNorm
from minisgl.models.shards import ShardSpec, model_shards
from minisgl.parallel.comm import Comm
from minisgl.trim import give_heap_back

INDEX, SINGLE, GGUF = "model.safetensors.index.json", "model.safetensors", "model.gguf"


class WeightError(ValueError):
    """A checkpoint that does not fit the model; the message names the tensors."""


def some(names: Sequence[str]) -> str:
    """Join at most five of the names, and add the number of the others."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


def checkpoint_files(folder: Path) -> list[Path]:
    """Return the files of a checkpoint: those of the index, or the single one."""
    if (folder / GGUF).exists():
        return [folder / GGUF]
    if (folder / INDEX).is_file():
        files = read_json(folder / INDEX).get("weight_map")
        if not isinstance(files, dict):
            raise WeightError(f"weights: {INDEX} must have an object weight_map")
        names = sorted(set(map(str, files.values())))
        if outside := [n for n in names if Path(n).is_absolute() or ".." in Path(n).parts]:
            raise WeightError(f"weights: {INDEX} names files outside its folder: {some(outside)}")
        if absent := [name for name in names if not (folder / name).is_file()]:
            raise WeightError(f"weights: {INDEX} names files that are absent: {some(absent)}")
        return [folder / name for name in names]
    found = [folder / SINGLE] if (folder / SINGLE).is_file() else [*folder.glob("*.safetensors")]
    if len(found) != 1:
        there = some(sorted(path.name for path in folder.glob("*"))) or "nothing"
        raise WeightError(f"weights: {folder} has neither {INDEX} nor {SINGLE}, but {there}")
    return found


def open_file(path: Path) -> Any:
    """Open a safetensors file, or a GGUF file, which has the same methods."""
    if path.suffix == ".gguf":
        return importlib.import_module("minisgl.models.gguf.tensors").GgufTensors(path)
    return safe_open(path, framework="pt")


class Checkpoint:
    """Open files: names and shapes of their tensors, and slices of them."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.file_of: dict[str, Any] = {}
        for path in checkpoint_files(folder):
            try:
                file = stack.enter_context(open_file(path))
            except Exception as error:
                raise WeightError(f"weights: {path.name} cannot be read: {error}") from error
            names = list(file.keys())
            if twice := sorted(self.file_of.keys() & set(names)):
                raise WeightError(f"weights: {some(twice)} in two files, one is {path.name}")
            self.file_of.update(dict.fromkeys(names, file))

    def misfit(self, spec: ShardSpec) -> str | None:
        """Describe the fault of a spec's tensor; return None if it fits."""
        found = self.file_of[spec.name].get_slice(spec.name)
        shape, dtype = tuple(found.get_shape()), found.get_dtype()
        if shape != spec.shape:
            return f"{spec.name} has shape {shape}, the model needs {spec.shape}"
        known = ", ".join(spec.dtypes)
        return None if dtype in spec.dtypes else f"{spec.name} has dtype {dtype}, not {known}"

    def read(self, spec: ShardSpec) -> torch.Tensor:
        """Read this rank's part of a tensor; the rest of it stays on disk."""
        whole = self.file_of[spec.name].get_slice(spec.name)
        part: torch.Tensor
        if spec.repeat == 1:
            part = whole[spec.source]
            return part
        *experts, rows, columns = spec.source
        part = whole[(*experts, slice(None), columns)]
        return part.repeat_interleave(spec.repeat, -2)[..., rows, :]


logger = logging.getLogger("minisgl.weights")


def harmless(name: str, model: nn.Module) -> str | None:
    """Return why a tensor that the model does not read may be ignored; None if it may not."""
    if name.endswith(".inv_freq"):
        return "the rotary table is computed from the config"
    if name.endswith(("self_attn.k_scale", "self_attn.v_scale")):
        return "it counts only for a KV cache of eight bits"
    if name == "lm_head.weight" and getattr(getattr(model, "lm_head", None), "tied", False):
        return "the head is tied to the embedding"
    return None


def check_names(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Refuse a missing, extra or misshapen tensor by name, before anything is read."""
    specs = {spec.name: spec for _, spec in model_shards(model)}
    present = checkpoint.file_of.keys()
    extra = {name: harmless(name, model) for name in sorted(present - specs.keys())}
    for name, reason in extra.items():
        if reason is not None:
            logger.info("ignored %s: %s", name, reason)
    fitting = (checkpoint.misfit(spec) for name, spec in specs.items() if name in present)
    faults = {
        "missing ": sorted(specs.keys() - present),
        "the model has no place for ": [name for name, reason in extra.items() if reason is None],
        "": [text for text in fitting if text is not None],
    }
    if any(faults.values()):
        said = (f"{what}{some(names)}" for what, names in faults.items() if names)
        raise WeightError("weights: " + "; ".join(said))


def check_tied(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Raise WeightError if a tied head has a different weight in the file."""
    name = "lm_head.weight"
    if name not in checkpoint.file_of or harmless(name, model) is None:
        return
    embedding = next(s for _, s in model_shards(model) if s.name.endswith("embed_tokens.weight"))
    own = ShardSpec(name, embedding.shape, embedding.source)
    if fault := checkpoint.misfit(own):
        raise WeightError(f"weights: {fault}")
    if not torch.equal(checkpoint.read(own), checkpoint.read(embedding)):
        raise WeightError(
            f"weights: {name} differs from {embedding.name}, but tie_word_embeddings is true"
        )


Index = tuple[slice, ...]


@singledispatch
def new_like(old: nn.Parameter, device: torch.device | str, dtype: torch.dtype) -> nn.Parameter:
    """Return zeros of the same shape on `device`; other kinds of parameters register a rule."""
    return nn.Parameter(torch.zeros(old.shape, dtype=dtype, device=device), requires_grad=False)


@singledispatch
def fill(parameter: torch.Tensor, target: Index, part: torch.Tensor) -> None:
    """Write a part of a checkpoint's tensor."""
    parameter[target].copy_(part)


@singledispatch
def fill_randomly(parameter: nn.Parameter, generator: torch.Generator) -> None:
    """Fill a parameter with small random numbers."""
    parameter.normal_(0.0, 0.02, generator=generator)


@singledispatch
def seal(parameter: nn.Parameter) -> None:
    """Finish a parameter whose parts are all filled: nothing to do for an ordinary one."""


def materialize(model: nn.Module, device: torch.device | str, dtype: torch.dtype) -> None:
    """Allocate zeros on `device` for every parameter; shared parameters stay shared."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, old in module.named_parameters(recurse=False):
            if old not in made:
                made[old] = new_like(old, device, dtype)
            setattr(module, name, made[old])
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


@torch.no_grad()
def load_weights(
    model: nn.Module,
    path: str | Path,
    comm: Comm,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    progress: bool = True,
) -> None:
    """Fill `model` from the safetensors in folder `path`, each rank reading its own part.

    Tensors are cast to `dtype`. WeightError names every tensor that does not fit; nothing has
    been allocated then.
    """
    with ExitStack() as stack:
        checkpoint = Checkpoint(Path(path), stack)
        if choose := getattr(model, "choose_layout", None):  # of experts: see chapter 11
            choose(checkpoint.file_of.keys())
        check_names(model, checkpoint)
        check_tied(model, checkpoint)
        materialize(model, device, dtype)
        hidden = not progress or comm.rank != 0
        pairs = tqdm(model_shards(model), "weights", unit="tensor", disable=hidden)
        for layer, specs in groupby(pairs, key=itemgetter(0)):
            for _, spec in specs:
                if spec.mine:
                    fill(attrgetter(spec.param)(layer), spec.target, checkpoint.read(spec))
            for parameter in layer.parameters(recurse=False):
                seal(parameter)
    give_heap_back()


@torch.no_grad()
def load_dummy_weights(
    model: nn.Module, *, device: torch.device | str, dtype: torch.dtype, seed: int = 0
) -> None:
    """Fill the model with small random weights on the device, for realistic size and speed.

    Norms are one, so that activations do not vanish.
    """
    materialize(model, device, dtype)
    generator = torch.Generator(device=device).manual_seed(seed)
    for parameter in model.parameters():
        fill_randomly(parameter, generator)
        seal(parameter)
    for module in model.modules():
        if isinstance(module, RMSNorm | QKNorm):
            module.weight.fill_(1.0)
