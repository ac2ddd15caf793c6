"""Triton's interpreter, several times as fast, and rounding to eight bits as a GPU does.

Before each launch, and before each call of a function within a kernel, it replaces some hundred
functions of `triton.language`, and searches its modules for them: here it searches once. And it
computes each sum and product of integers again, in 64 bits, for an assertion that it leaves out.
Much of its other time goes into objects that describe types and shapes: here they are shared.

And it looks where a kernel reads and writes, as memcheck does on a GPU: an address outside the
memory of the tensors that a launch was given is an error.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import operator
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np


def quicken() -> None:
    """Search each module once, and replace nothing again before the launch has ended."""
    import triton
    from triton.runtime import interpreter

    needed = ("_LangPatchScope", "_patch_attr", "_patch_builtin", "_patch_lang", "tl")
    if not all(hasattr(interpreter, name) for name in needed):  # another version of Triton
        return
    if hasattr(interpreter, "quick"):  # a fork of a process that did all this
        return
    interpreter.quick = True
    tl, patch_lang, found = interpreter.tl, interpreter._patch_lang, {}
    replaced: set[str] = set()  # of which modules the functions are replaced now

    def patch_builtin(module: Any, builder: Any, scope: Any) -> None:
        if module not in found:
            members = inspect.getmembers(module)
            found[module] = [(n, m) for n, m in members if tl.core.is_builtin(m)]
        for name, member in found[module]:
            interpreter._patch_attr(module, name, member, builder, scope)

    class Scope(interpreter._LangPatchScope):
        def restore(self) -> None:
            if self._changes:
                replaced.clear()
            super().restore()

    @functools.cache
    def seen_by(fn: Any) -> set[str]:
        modules = (tl, tl.core)
        return {m.__name__ for m in modules if any(v is m for v in fn.__globals__.values())}

    def patch_once(fn: Any) -> Any:
        seen = seen_by(fn)
        if replaced and seen <= replaced:
            return Scope()
        scope = patch_lang(fn)
        replaced.update(seen)  # not before: a time limit may end a test while it replaces them
        return scope

    builder = interpreter.interpreter_builder
    if not builder.options.debug:  # else it checks integers for overflow, and reports nothing
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    get_np_dtype, np_dtypes = interpreter._get_np_dtype, {}

    def np_dtype(dtype: Any) -> Any:
        """Looked up by name; the original makes a dictionary of all types each time."""
        if dtype.name not in np_dtypes:
            np_dtypes[dtype.name] = get_np_dtype(dtype)
        return np_dtypes[dtype.name]

    if triton.knobs.runtime.interpret:  # else these are the compiler's, too
        share_shapes(tl.core)
    interpreter._get_np_dtype = np_dtype
    watch_bounds(interpreter)
    interpreter._patch_builtin = patch_builtin
    interpreter._LangPatchScope = Scope
    interpreter._patch_lang = patch_once
    if hasattr(interpreter, "_convert_float"):
        interpreter._convert_float = rounding(interpreter._convert_float)


class Bounds:
    """Address ranges of the arguments of the launch that runs now, as a sorted list."""

    def __init__(self) -> None:
        self.set([])

    def set(self, ranges: list[tuple[int, int]]) -> None:
        """First address of each range, and the one behind its last; they do not overlap."""
        self.starts, self.ends = np.array([(0, 0), *sorted(ranges)], np.uint64).T

    def check(self, ptrs: Any, mask: Any) -> None:
        """IndexError if one of the addresses, where the mask is set, lies in no range."""
        size = np.uint64(max(ptrs.get_element_ty().primitive_bitwidth // 8, 1))
        addresses = ptrs.data if mask is None else ptrs.data[mask.data]
        owners = np.searchsorted(self.starts, addresses, side="right") - 1
        outside = addresses + size > self.ends[owners]
        if outside.any():
            raise IndexError(f"{outside.sum()} of {outside.size} addresses are of no argument")


# Methods of the interpreter that touch memory: where their pointers and their mask stand.
TOUCHING = {
    "create_masked_load": (0, 1), "create_masked_store": (0, 2),
    "create_atomic_rmw": (1, 3), "create_atomic_cas": (0, None),
}  # fmt: skip


def storages(args: Iterable[Any]) -> Iterator[Any]:
    """Memory of all tensors among a kernel's arguments."""
    for arg in args:
        arg = getattr(arg, "base", arg)  # a tensor descriptor's, or a wrapper's
        if isinstance(arg, tuple):
            yield from storages(arg)
        elif hasattr(arg, "untyped_storage"):
            yield arg.untyped_storage()


def watch_bounds(interpreter: Any) -> None:
    """Let no kernel load from or store to an address that belongs to none of its arguments.

    All but one that is given `addresses_ptr`, for other processes' memory is in no argument.
    """
    executor, builder = interpreter.GridExecutor, interpreter.InterpreterBuilder
    collect, bounds = executor._init_args_hst, Bounds()

    def collected(self: Any, args: Any, kwargs: Any) -> Any:
        on_host = collect(self, args, kwargs)
        found = storages([*on_host[0], *on_host[1].values()])
        ranges = {(one.data_ptr(), one.data_ptr() + one.nbytes()) for one in found}
        bounds.set([(0, 2**64 - 1)] if "addresses_ptr" in self.arg_names else [*ranges])
        return on_host

    def checked(method: Any, at: int, mask: int | None) -> Any:
        @functools.wraps(method)
        def run(self: Any, *args: Any) -> Any:
            bounds.check(args[at], None if mask is None else args[mask])
            return method(self, *args)

        return run

    executor._init_args_hst = collected
    for name, places in TOUCHING.items():
        setattr(builder, name, checked(getattr(builder, name), *places))


def share_shapes(core: Any) -> None:
    """Types and tensors of one shape share what describes it: each makes a dozen objects else."""
    make_block, make_tensor = core.block_type.__init__, core.tensor.__init__
    constexpr, found = core.constexpr, {}
    scalar = core.tuple([]), constexpr(1)

    def names() -> list[set[str]]:
        block = core.block_type(core.int32, [4])
        made = block, core.tensor(None, block), core.tensor(None, core.int32)
        return [vars(one).keys() - {"of_tensors"} for one in made]

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(map(operator.index, shape))
        if sizes not in found:
            make_block(self, element_ty, shape)
            of_tensors = core.tuple([constexpr(size) for size in sizes]), constexpr(self.numel)
            found[sizes] = self.shape, self.numel, str(self.shape), of_tensors
        self.element_ty = element_ty
        self.shape, self.numel, text, self.of_tensors = found[sizes]
        self.name = f"<{text}, {element_ty}>"

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = type.of_tensors if type.is_block() else scalar

    known = names()
    core.block_type.__init__, core.tensor.__init__ = init_block, init_tensor
    if names() != known:  # another version of Triton
        core.block_type.__init__, core.tensor.__init__ = make_block, make_tensor


def rounding(convert: Any) -> Any:
    """`convert`, but float8_e4m3fn as a GPU has it: the interpreter loses carries of a mantissa."""
    import torch

    dtypes = {"fp8e4nv": torch.float8_e4m3fn, "fp32": torch.float32, "fp16": torch.float16}

    def rounded(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if "fp8e4nv" not in (source.name, target.name) or not {source.name, target.name} <= {
            *dtypes
        }:
            return convert(data, source, target, mode)
        found = torch.from_numpy(np.ascontiguousarray(data)).view(dtypes[source.name])
        if target.name == "fp8e4nv":
            found = found.clamp(-448, 448)
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[dtypes[target.name].itemsize]
        return found.to(dtypes[target.name]).view(bits).numpy().reshape(data.shape)

    return rounded
