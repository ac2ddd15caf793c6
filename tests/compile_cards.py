"""Compile what engines launch, for GPUs that are not there; print what each variant takes.

TRITON_INTERPRET=0 python -m tests.compile_cards L4 --part 0 --parts 8
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from minisgl.benchmark.report import save
from minisgl.config.engine import SchedulerConfig, resolve
from minisgl.config.known_models import KNOWN_CONFIGS
from minisgl.config.model import ModelConfig
from minisgl.core import Batch, Phase, SamplingParams
from minisgl.engine import engine as engine_module
from minisgl.engine.engine import Engine, allocate_memory, dummy_request
from minisgl.engine.runners import capture_runners
from minisgl.kernels import fp8_linear
from minisgl.kernels.all_reduce import all_reduce, all_reduce_add_norm
from minisgl.kernels.device import H200, DeviceLimits, device_limits, load_tuned
from minisgl.kernels.sample import sample_logits
from minisgl.models.fused import FusedModel, can_fuse
from minisgl.models.quantization import quantize_model
from minisgl.models.registry import build_model
from minisgl.parallel.comm import SingleRank

NAMES = {"H200": "NVIDIA H200"}  # of cards that have tiles of their own
CARDS = {"A100": DeviceLimits(108, 166_912, 80), "L4": DeviceLimits(58, 101_376, 89), "H200": H200}
PLAIN = {"attention_backend": "triton", "cuda_graph_bs": (1, 16)}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "0.6B": ("Qwen3-0.6B", {}),
    "0.6B, plain": ("Qwen3-0.6B", PLAIN | {"kernels": "torch"}),
    "0.6B, deterministic": ("Qwen3-0.6B", PLAIN | {"deterministic": True}),
    "0.6B, drafts": ("Qwen3-0.6B", {"num_speculative_tokens": 4}),
    "0.6B, plain, FP8 keys": ("Qwen3-0.6B", PLAIN | {"kernels": "torch", "kv_cache_dtype": "fp8"}),
    "8B": ("Qwen3-8B", {}),
    "8B, FP8": ("Qwen3-8B", {"quantization": "fp8", "kv_cache_dtype": "fp8"}),
    "30B-A3B": ("Qwen3-30B-A3B", {}),
    "30B-A3B, FP8": ("Qwen3-30B-A3B", {"quantization": "fp8"}),
}
EIGHT_BITS = 89  # the least compute capability with eight-bit floats


class Card:
    """Triton's driver for a GPU of which only the limits are known: it compiles, and cannot run."""

    def __init__(self, limits: DeviceLimits) -> None:
        self.limits, self.utils = limits, self

    def get_current_device(self) -> int:
        return self.limits.capability  # Triton keeps what it compiled by this number

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.limits.capability, 32)

    def get_device_properties(self, device: int) -> dict[str, int]:
        sms, shared = self.limits.sms, self.limits.shared_memory
        return {"multiprocessor_count": sms, "max_shared_mem": shared}


@dataclass(frozen=True)
class Pointer:
    """A tensor as Triton's compiler sees it; of its address only the alignment counts."""

    dtype: torch.dtype
    address: int

    def data_ptr(self) -> int:
        """Bytes from the start of its memory."""
        return self.address


Variants = dict[tuple[str, str], Callable[[], Any]]  # by kernel and Triton's key of the variant


def as_pointer(arg: Any) -> Any:
    """An argument of a launch for the compiler."""
    if isinstance(arg, Tensor):
        return Pointer(arg.dtype, int(arg.storage_offset()) * arg.itemsize)
    return arg


@contextmanager
def noting(variants: Variants) -> Iterator[None]:
    """In the block launches start nothing: each new variant is noted, to be compiled later."""
    run = JITFunction.run

    def launch(kernel: Any, *args: Any, grid: Any, warmup: bool, **how: Any) -> None:
        run(kernel, *map(as_pointer, args), grid=None, warmup=True, **how)

    def note(*, key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        kernel = fn.jit_function
        variants[f"{fn.module}.{fn.name}", key] = partial(
            kernel.preload, compile["specialization_data"]
        )
        kernel.device_caches[compile["device"]][0][key] = "noted"  # ask no more
        return True  # not now

    with (
        mock.patch.object(JITFunction, "run", launch),
        mock.patch.object(knobs.runtime, "jit_cache_hook", note),
    ):
        yield


class Nothing:
    """A graph: everything can be called, and nothing happens."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **how: self


def engine_on_meta(config: SchedulerConfig, folder: Path) -> Engine:
    """An engine of two layers whose tensors are shapes, with all kernels that a GPU would have."""
    model_config = replace(ModelConfig.from_path(folder), num_layers=2)
    config = replace(resolve(config, model_config))
    dtype, fixed = getattr(torch, config.dtype), config.deterministic
    model = build_model(model_config, SingleRank(), dtype=dtype, deterministic=fixed)
    quantize_model(model, config.quantization, folder)
    model = model.to("meta")
    vars(config)["device"] = "meta"  # which a user may not choose
    fuses = config.kernels == "triton" and can_fuse(model)
    with (
        mock.patch.object(engine_module, "load_sample_kernel", lambda device: sample_logits),
        mock.patch.object(
            engine_module, "choose_forward", lambda *_: FusedModel(model) if fuses else model
        ),
    ):
        return Engine(config, model_config, model, *allocate_memory(config, model_config, 1))


def run_all(engine: Engine) -> None:
    """Every use of kernels in serving: sampling, prefill, captured steps."""
    dtype, vocab_size = getattr(torch, engine.config.dtype), engine.model_config.vocab_size
    logits, row = torch.empty(1, vocab_size, dtype=dtype, device="meta"), engine.tables.dummy_row
    for top_p in (0.9, 1.0):
        req = dummy_request(row)
        req.sampling_params = SamplingParams(temperature=1.0, top_p=top_p)
        engine.sampler.sample(logits, engine.sampler.prepare([req]))
    for length in (1, 7, 63, 64, 100, 1000, 1024, 4096):
        batch = Batch(reqs=[dummy_request(row, length)], phase=Phase.PREFILL)
        engine.step(engine.prepare(batch))
    capture_runners(
        engine.config, engine.model_config, engine.pool, engine.backend, engine.tables,
        engine.forward_pass, engine.sampler.sample_rows, Nothing, False,
    )  # fmt: skip


def exchange(dtype: torch.dtype, hidden: int) -> None:
    """Launch the kernels with which two ranks sum a row."""
    ints = partial(torch.empty, device="meta", dtype=torch.int32)
    peers: Any = SimpleNamespace(
        addresses=ints(2).long(), turns=ints(64), quit=ints(1), rank=0, width=hidden
    )
    parts = torch.empty(2, 1, hidden, dtype=dtype, device="meta")
    all_reduce(parts[0], peers)
    all_reduce_add_norm(parts, parts[0], parts[0, 0], 1e-6, peers)


def multiply(x: Tensor, w: Tensor, *_: Any, output_dtype: torch.dtype, **how: Any) -> Tensor:
    """The shape of `scaled_mm`'s product; torch checks strides on `meta` that a GPU does not."""
    return torch.empty(len(x), w.shape[1], dtype=output_dtype, device="meta")


def variants_of(card: str, name: str, **how: Any) -> Variants:
    """Return the kernels that an engine launches on a card. Run it in a process of its own."""
    limits, (model, fields) = CARDS[card], CONFIGS[name]
    triton.runtime.driver.set_active(Card(limits))
    device_limits.cache_clear()
    device_limits(torch.device("meta")).tuned.update(load_tuned(NAMES.get(card, card)))
    variants: Variants = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(fp8_linear, "can_multiply", lambda *_: limits.capability >= EIGHT_BITS),
        mock.patch.object(torch.nn.functional, "scaled_mm", multiply),
        mock.patch.object(torch.Tensor, "is_cuda", True),  # `meta` passes for a GPU
        noting(variants),
    ):
        (Path(folder) / "config.json").write_text(json.dumps(KNOWN_CONFIGS[f"Qwen/{model}"]))
        backend = {"device": "cuda:0", "attention_backend": "triton,fused"}
        config = SchedulerConfig(model_path=folder, **(backend | fields | how))
        engine = engine_on_meta(config, Path(folder))
        run_all(engine)
        exchange(torch.bfloat16, engine.model_config.hidden_size)
    return variants


def all_variants(card: str) -> Variants:
    """Return the kernels that the engines of all configs of a card launch on it.

    One for all alignments of pointers and sizes: the constants alone say how a kernel is cut.
    """
    eight_bits, found = CARDS[card].capability >= EIGHT_BITS, {}
    for name in CONFIGS:
        if eight_bits or "FP8" not in name:
            for (kernel, key), compile_variant in variants_of(card, name).items():
                constants = re.findall(r"\('constexpr', [^)]*\)|num_warps=\d+", key)
                found.setdefault((kernel, " ".join(constants)), compile_variant)
    return found


def resources(kernel: Any) -> dict[str, int]:
    """Of a compiled kernel: bytes of shared memory, registers of a thread, and bytes of its stack,
    where registers are spilled to."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", said)
    assert found is not None, said
    registers, stack, local = map(int, found.groups())
    return {"shared": kernel.metadata.shared, "registers": registers, "stack": stack + local}


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Of each kernel on each card how many variants there are, and the most that one takes."""
    most: dict[str, Any] = {}
    for row in rows:
        of_card = most.setdefault(row["card"], {})
        old = of_card.get(row["kernel"], {"variants": 0})
        taken = {key: max(row[key], old.get(key, 0)) for key in ("shared", "registers", "stack")}
        of_card[row["kernel"]] = {"variants": old["variants"] + 1, **taken}
    return most


def main() -> None:
    """A line for each variant; those of other parts are only named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cards", nargs="+", choices=CARDS)
    parser.add_argument("--part", type=int, default=0, help="compile one of so many parts")
    parser.add_argument("--parts", type=int, default=1)
    parser.add_argument("--json", type=Path, help="where to write the most that each kernel takes")
    args, rows = parser.parse_args(), []
    for card in args.cards:
        counts: Counter[str] = Counter()  # each part has as many of a kernel's as any other
        for (kernel, _), compile_variant in sorted(all_variants(card).items(), key=itemgetter(0)):
            row = {"card": card, "kernel": kernel}
            number = zlib.crc32(kernel.encode()) + counts[kernel]
            counts[kernel] += 1
            if number % args.parts == args.part:
                row |= resources(compile_variant())
                rows.append(row)
            print(json.dumps(row), flush=True)
    if args.json is not None:
        command = "python -m tests.compile_cards " + shlex.join(sys.argv[1:])
        save(args.json, summarize(rows), command)


if __name__ == "__main__":
    main()
