"""The header of a GGUF file; each number in it is checked against the size of the file.

Generated from notebooks/06e_gguf.ipynb: edit there.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from minisgl.config.rules import shown


class GgufError(ValueError):
    """A GGUF file that cannot be used; the message names the file and the field."""


SCALARS = {
    GGUFValueType.UINT8: "B", GGUFValueType.INT8: "b", GGUFValueType.BOOL: "?",
    GGUFValueType.UINT16: "H", GGUFValueType.INT16: "h", GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i", GGUFValueType.UINT64: "Q", GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT32: "f", GGUFValueType.FLOAT64: "d",
}  # fmt: skip


class Cursor:
    """A position that cannot leave the file; errors name the current `field`."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at, self.field = path, data, 0, "magic"

    def refuse(self, must: str, got: object) -> GgufError:
        """Return the error of the current field."""
        return GgufError(f"{self.path.name}: {self.field}: must be {must}, got {shown(got)}")

    def skip(self, size: int) -> int:
        """Skip `size` bytes and return the position of the first."""
        start, left = self.at, len(self.data) - self.at
        if size > left:
            raise self.refuse(f"within the file, which has {left} bytes left", f"{size} bytes")
        self.at += size
        return start

    def number(self, form: str) -> Any:
        """Read one number in a format of `struct`."""
        return struct.unpack_from("<" + form, self.data, self.skip(struct.calcsize(form)))[0]

    def text(self: Cursor) -> str:
        """Read a length and that many bytes of UTF-8."""
        start = self.skip(self.number("Q"))
        try:
            return str(self.data[start : self.at], "utf-8")
        except UnicodeDecodeError as error:
            raise self.refuse("valid UTF-8", f"byte {error.start} of a text") from None

    def count(self: Cursor, smallest: int) -> int:
        """Read the number of items that follow, each of at least `smallest` bytes."""
        count: int = self.number("Q")
        if count * smallest > len(self.data) - self.at:
            raise self.refuse(f"at most {(len(self.data) - self.at) // smallest}", count)
        return count

    def value(self: Cursor) -> Any:
        """Read the type of a value and the value."""
        kind = self.number("I")
        if kind == GGUFValueType.STRING:
            return self.text()
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind != GGUFValueType.ARRAY:
            raise self.refuse(f"of a type up to {max(GGUFValueType)}", f"type {kind}")
        kind = self.number("I")
        if kind == GGUFValueType.STRING:
            return [self.text() for _ in range(self.count(8))]
        if kind not in SCALARS:
            raise self.refuse("an array of numbers or texts", f"items of type {kind}")
        dtype = np.dtype("<" + SCALARS[kind])
        count = self.count(dtype.itemsize)
        return np.frombuffer(self.data, dtype, count, self.skip(count * dtype.itemsize)).copy()

    def tensor(self: Cursor) -> StoredTensor:
        """Read shape, kind and offset of a tensor; the offset counts from where the data begins."""
        rank = self.number("I")
        if not 1 <= rank <= 4:
            raise self.refuse("of 1 to 4 dimensions", rank)
        shape = tuple(self.number("Q") for _ in range(rank))[::-1]
        number, offset = self.number("I"), self.number("Q")
        names = {kind.value: kind for kind in GGMLQuantizationType if kind.name in KINDS}
        if number not in names:
            known = {kind.value: kind.name for kind in GGMLQuantizationType}
            raise self.refuse(f"one of {', '.join(KINDS)}", known.get(number, f"kind {number}"))
        block, size = GGML_QUANT_SIZES[names[number]]
        if min(shape) < 1 or shape[-1] % block:
            raise self.refuse(f"in rows of a multiple of {block}", shape)
        return StoredTensor(shape, names[number], offset, shape[-1] // block * size)

    def named(self: Cursor, what: str, count: int, read: Callable[[], Any]) -> dict[str, Any]:
        """Read names, each with the value that follows it."""
        found: dict[str, Any] = {}
        for index in range(count):
            self.field = f"{what} {index}"
            self.field = name = self.text()
            if name in found:
                raise self.refuse("unique", "a second one")
            found[name] = read()
        return found

    def settle(self: Cursor, tensor: StoredTensor, base: int, alignment: int) -> StoredTensor:
        """Return the tensor with its offset in the file, which must contain all its bytes."""
        start, size = base + tensor.start, tensor.rows * tensor.row_bytes
        if tensor.start % alignment or start + size > len(self.data):
            where = f"at a multiple of {alignment} and end within the file's {len(self.data)} bytes"
            raise self.refuse(where, f"{size} bytes at {start}")
        return StoredTensor(tensor.shape, tensor.kind, start, tensor.row_bytes)

    def header(self: Cursor) -> Header:
        """Read the whole header."""
        if (magic := self.data[: self.skip(4) + 4]) != b"GGUF":
            raise self.refuse("GGUF", magic)
        self.field = "version"
        if (version := self.number("I")) not in (2, 3):
            raise self.refuse("2 or 3, little-endian", version)
        self.field = "tensor_count"
        num_tensors = self.count(32)  # bytes of a tensor without a name
        self.field = "kv_count"
        fields = self.named("field", self.count(13), self.value)
        found = self.named("tensor", num_tensors, self.tensor)
        alignment, self.field = fields.get("general.alignment", 32), "general.alignment"
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise self.refuse("a power of two", alignment)
        base = -(-self.at // alignment) * alignment
        end = base  # of the previous tensor, in the file
        for self.field, stored in sorted(found.items(), key=lambda item: item[1].start):
            found[self.field] = settled = self.settle(stored, base, alignment)
            if settled.start < end:
                raise self.refuse(
                    f"behind the tensor before it, which ends at {end}", settled.start
                )
            end = settled.start + settled.rows * settled.row_bytes
        return Header(self.path, fields, found)


KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K",
         "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")  # fmt: skip


@dataclass(frozen=True)
class StoredTensor:
    """Place of a tensor in the file: first byte, bytes of a row, slowest dimension first."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    start: int
    row_bytes: int

    @property
    def rows(self) -> int:
        """Rows of the last dimension."""
        return int(np.prod(self.shape[:-1], dtype=object))


@dataclass(frozen=True)
class Header:
    """All fields and tensors of a GGUF file."""

    path: Path
    fields: dict[str, Any]
    tensors: dict[str, StoredTensor]

    def refuse(self, field: str, must: str, got: object) -> GgufError:
        """Return the error of a field."""
        return GgufError(f"{self.path.name}: {field}: must be {must}, got {shown(got)}")


def read_header(path: Path) -> Header:
    """Read the header of a GGUF file; raise a GgufError that names the wrong field."""
    if path.exists() and not path.is_file():
        raise GgufError(f"{path.name}: cannot be read: not a regular file")
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return Cursor(path, data).header()
    except (OSError, ValueError) as error:
        if isinstance(error, GgufError):
            raise
        raise GgufError(f"{path.name}: cannot be read: {error}") from error
