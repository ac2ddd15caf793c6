"""From a folder of safetensors to the parameters of one rank, nothing unnoticed.

Generated from notebooks/05_model.ipynb: edit there.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from tqdm import tqdm

from minisgl.layers.norm import QKNorm, RMSNorm
from minisgl.layers.placement import Piece
from minisgl.parallel.comm import Comm


class WeightError(ValueError):
    """A checkpoint that does not fit the model; the message names the tensors."""


def some(names: Sequence[str]) -> str:
    """At most five of the names, and how many more there are."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


def checkpoint_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint: those of the index, or the single one."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        absent = [name for name in names if not (folder / name).is_file()]
        if absent:
            raise WeightError(f"weights: {index.name} names files that are absent: {some(absent)}")
        return [folder / name for name in names]
    whole = folder / "model.safetensors"
    found = [whole] if whole.is_file() else sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return found
    if not folder.is_dir():
        raise WeightError(f"weights: {folder} is not a folder")
    if found:
        names = [path.name for path in found]
        raise WeightError(
            f"weights: {folder} has no {index.name}, but several files: {some(names)}"
        )
    others = some(sorted(path.name for path in folder.iterdir())) or "nothing"
    raise WeightError(f"weights: no .safetensors file in {folder}; it holds {others}")


FLOATS = ("F64", "F32", "F16", "BF16")


class Checkpoint:
    """Open safetensors files: which tensors they hold, their shapes, and slices of them."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.file_of: dict[str, Any] = {}
        for path in checkpoint_files(folder):
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
            except Exception as error:
                raise WeightError(f"weights: {path.name} cannot be read: {error}") from error
            for name in file.keys():  # noqa: SIM118 (not a dict)
                if name in self.file_of:
                    raise WeightError(f"weights: {name} is in two files, one is {path.name}")
                self.file_of[name] = file

    def misfit(self, piece: Piece) -> str | None:
        """What is wrong with the tensor of a piece, or None."""
        found = self.file_of[piece.name].get_slice(piece.name)
        shape, dtype = tuple(found.get_shape()), found.get_dtype()
        if shape != piece.shape:
            return f"{piece.name} has shape {shape}, the model needs {piece.shape}"
        return None if dtype in FLOATS else f"{piece.name} has dtype {dtype}, not a float"

    def read(self, piece: Piece) -> torch.Tensor:
        """This rank's part of a tensor; the rest of it stays on disk."""
        part: torch.Tensor = self.file_of[piece.name].get_slice(piece.name)[piece.source]
        return part


def pieces_of(model: nn.Module) -> list[tuple[nn.Module, Piece]]:
    """Every tensor that the model reads, with the module that it belongs to."""
    return [
        (module, piece)
        for path, module in model.named_modules()
        if hasattr(module, "pieces")
        for piece in module.pieces(path)
    ]


def harmless(name: str, model: nn.Module) -> str | None:
    """Why a tensor that the model does not read may be ignored; None if it may not."""
    if name.endswith(".inv_freq"):
        return "the rotary table is computed from the config"
    if name == "lm_head.weight" and getattr(getattr(model, "lm_head", None), "tied", False):
        return "the head is tied to the embedding"
    return None


logger = logging.getLogger("minisgl.weights")


def check_names(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Refuse a missing, extra or misshapen tensor by name, before anything is read."""
    pieces = [piece for _, piece in pieces_of(model)]
    wanted = {piece.name for piece in pieces}
    faults = []
    if missing := sorted(wanted - checkpoint.file_of.keys()):
        faults.append(f"missing {some(missing)}")
    extra = []
    for name in sorted(checkpoint.file_of.keys() - wanted):
        reason = harmless(name, model)
        if reason is None:
            extra.append(name)
        else:
            logger.info("ignored %s: %s", name, reason)
    if extra:
        faults.append(f"the model has no place for {some(extra)}")
    present = [piece for piece in pieces if piece.name in checkpoint.file_of]
    if misfits := [text for piece in present if (text := checkpoint.misfit(piece))]:
        faults.append(some(misfits))
    if faults:
        raise WeightError("weights: " + "; ".join(faults))


def materialize(model: nn.Module, device: torch.device | str, dtype: torch.dtype) -> None:
    """Give every parameter zeros on `device`; parameters that are shared stay shared."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, old in module.named_parameters(recurse=False):
            if old not in made:
                zeros = torch.zeros(old.shape, dtype=dtype, device=device)
                made[old] = nn.Parameter(zeros, requires_grad=False)
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

    Tensors are cast to `dtype` on the way. WeightError names every tensor that does not fit;
    then nothing has been read.
    """
    with ExitStack() as stack:
        checkpoint = Checkpoint(Path(path), stack)
        check_names(model, checkpoint)
        check_tied(model, checkpoint)
        materialize(model, device, dtype)
        hidden = not progress or comm.rank != 0
        for module, piece in tqdm(pieces_of(model), "weights", unit="tensor", disable=hidden):
            parameter = getattr(module, piece.param)
            if parameter is not None:
                parameter[piece.target].copy_(checkpoint.read(piece))


def check_tied(model: nn.Module, checkpoint: Checkpoint) -> None:
    """A head that the config ties must not come with a weight of its own."""
    name = "lm_head.weight"
    if name not in checkpoint.file_of or harmless(name, model) is None:
        return
    embedding = next(p for _, p in pieces_of(model) if p.name.endswith("embed_tokens.weight"))
    own = Piece(name, embedding.shape, embedding.source)
    if fault := checkpoint.misfit(own):
        raise WeightError(f"weights: {fault}")
    if not torch.equal(checkpoint.read(own), checkpoint.read(embedding)):
        raise WeightError(
            f"weights: {name} differs from {embedding.name}, but tie_word_embeddings is true"
        )


@torch.no_grad()
def load_dummy_weights(
    model: nn.Module, *, device: torch.device | str, dtype: torch.dtype, seed: int = 0
) -> None:
    """Small random weights, made on the device: the right sizes and speed, no meaning.

    Norms are one, so that nothing vanishes on the way.
    """
    materialize(model, device, dtype)
    generator = torch.Generator(device=device).manual_seed(seed)
    for parameter in model.parameters():
        parameter.normal_(0.0, 0.02, generator=generator)
    for module in model.modules():
        if isinstance(module, RMSNorm | QKNorm):
            module.weight.fill_(1.0)
