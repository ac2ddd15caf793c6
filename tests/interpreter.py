"""Triton's interpreter, in a quarter of the time, and rounding to eight bits as a GPU does.

Before each launch, and before each call of a function within a kernel, it replaces some hundred
functions of `triton.language`, and searches its modules for them: here it searches once. And it
computes each sum and product of integers again, in 64 bits, for an assertion that it leaves out.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any


@functools.cache
def quicken() -> None:
    """Search each module once, and replace nothing again before the launch has ended."""
    from triton.runtime import interpreter

    needed = ("_LangPatchScope", "_patch_attr", "_patch_builtin", "_patch_lang", "tl")
    if not all(hasattr(interpreter, name) for name in needed):  # another version of Triton
        return
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
        replaced.update(seen)
        return patch_lang(fn)

    builder = interpreter.interpreter_builder
    if not builder.options.debug:  # else it looks whether integers overflow, and tells nobody
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    get_np_dtype, np_dtypes = interpreter._get_np_dtype, {}

    def np_dtype(dtype: Any) -> Any:
        """Looked up by name; the original makes a dictionary of all types each time."""
        if dtype.name not in np_dtypes:
            np_dtypes[dtype.name] = get_np_dtype(dtype)
        return np_dtypes[dtype.name]

    interpreter._get_np_dtype = np_dtype
    interpreter._patch_builtin = patch_builtin
    interpreter._LangPatchScope = Scope
    interpreter._patch_lang = patch_once
    if hasattr(interpreter, "_convert_float"):
        interpreter._convert_float = rounding(interpreter._convert_float)


def rounding(convert: Any) -> Any:
    """`convert`, but float8_e4m3fn as a GPU has it: the interpreter loses carries of a mantissa."""
    import numpy as np
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
