"""A thread block for machines without a GPU: runs the functions of a Gluon kernel with torch.

Chapter 04c runs its kernel with it on a CPU, and so do the tests; the package never does. Each
partition of warps is a thread, and only one runs at a time: at every barrier a random one goes on.
What is asynchronous on a GPU is as late here as the barriers permit. A copy overwrites its target
with NaN when it starts and fills it at a random later moment; a product reads its operands when it
is waited for. So a barrier that is missing gives wrong numbers, and one too many a `Deadlock`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor


class Deadlock(RuntimeError):
    """All partitions wait, and no copy is under way."""


@dataclass
class Barrier:
    """An mbarrier: a phase ends when all arrivals and all announced bytes are there."""

    count: int = 0
    missing: int = 0
    nbytes: int = 0
    phase: int = 0

    def settle(self) -> None:
        """End the phase if nothing is missing."""
        if self.missing == 0 and self.nbytes == 0:
            self.phase, self.missing = self.phase ^ 1, self.count


@dataclass
class Shared:
    """A view of shared memory: numbers, or barriers."""

    data: Any
    dtype: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)

    def index(self, i: Any) -> Any:
        part = self.data[int(i)]
        return part if isinstance(part, Barrier) else Shared(part, self.dtype)

    def slice(self, start: int, length: int) -> Shared:
        return Shared(self.data[start : start + length], self.dtype)

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(self.data.permute(*order), self.dtype)

    def store(self, value: Tensor) -> None:
        self.data.copy_(value)

    def load(self, layout: Any) -> Tensor:
        return self.data.clone()


@dataclass(frozen=True)
class Pointer:
    """A flat tensor and places in it, in elements."""

    data: Tensor
    at: Any = 0

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.data, self.at + offset)


@dataclass(frozen=True)
class Descriptor:
    """A tensor map: boxes of `block_shape` from a matrix."""

    base: Tensor
    block_shape: Sequence[int]
    layout: Any = None

    @property
    def dtype(self) -> torch.dtype:
        return self.base.dtype


@dataclass
class Product:
    """A wgmma that has been started; `value` once it has been waited for."""

    a: Any
    b: Shared
    acc: Any
    use_acc: bool
    value: Tensor | None = None

    def compute(self) -> None:
        a = self.a.data if isinstance(self.a, Shared) else self.a
        result = a.float() @ self.b.data.float()
        self.value = result + self.acc if self.use_acc else result


@dataclass
class Partition:
    """A thread, what it waits for, and its products under way."""

    run: Callable[[], None]
    ready: Callable[[], bool] = lambda: True
    go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    products: list[Product] = field(default_factory=list)
    ended: bool = False


class Block:
    """One thread block: runs the partitions of `warp_specialize` until all have ended."""

    def __init__(self, program: int, grid: int, rng: np.random.Generator) -> None:
        self.program, self.grid, self.rng = program, grid, rng
        self.copies: list[Callable[[], None]] = []
        self.parts: list[Partition] = []
        self.back, self.error = threading.Semaphore(0), None
        self.local = threading.local()

    def pause(self, ready: Callable[[], bool] = lambda: True) -> None:
        """Yield the turn, until `ready` holds and the schedule returns here."""
        part = self.local.part
        part.ready = ready
        self.back.release()
        part.go.acquire()
        if self.error is not None:
            raise self.error

    def start(self, part: Partition) -> None:
        """Run a partition's thread."""
        self.local.part = part
        part.go.acquire()
        try:
            part.run()
        except BaseException as error:
            self.error = self.error or error
        part.ended = True
        self.back.release()

    def specialize(self, parts: Sequence[tuple[Any, tuple[Any, ...]]], *_: Any) -> None:
        """Run functions side by side, one step of one of them at a time."""
        self.parts = [Partition(lambda f=f, args=args: f(*args)) for f, args in parts]
        threads = [threading.Thread(target=self.start, args=(p,), daemon=True) for p in self.parts]
        for thread in threads:
            thread.start()
        while alive := [part for part in self.parts if not part.ended]:
            able = [part for part in alive if self.error is not None or part.ready()]
            if self.copies and (not able or self.rng.random() < 0.3):
                self.copies.pop(int(self.rng.integers(len(self.copies))))()
                continue
            if not able:
                self.error, able = Deadlock(f"{len(alive)} partitions wait for one another"), alive
            able[int(self.rng.integers(len(able)))].go.release()
            self.back.acquire()
        if self.error is not None:
            raise self.error

    # ------------------------------------------------------------------ barriers and copies

    def wait(self, barrier: Barrier, phase: Any) -> None:
        self.pause(lambda: barrier.phase != int(phase))

    def arrive(self, barrier: Barrier, count: int = 1) -> None:
        barrier.missing -= count
        assert barrier.missing >= 0, "more arrivals than the barrier counts"
        barrier.settle()
        self.pause()

    def expect(self, barrier: Barrier, nbytes: int) -> None:
        barrier.nbytes += nbytes
        self.arrive(barrier)

    def copy(self, source: Descriptor, coordinates: Any, barrier: Barrier, target: Shared) -> None:
        row, column = (int(x) for x in coordinates)
        rows, columns = source.block_shape
        target.data.fill_(torch.nan)

        def land() -> None:
            target.data.copy_(source.base[row : row + rows, column : column + columns])
            barrier.nbytes -= rows * columns * source.base.itemsize
            barrier.settle()

        self.copies.append(land)

    # ---------------------------------------------------------------------------- products

    def multiply(
        self, a: Any, b: Shared, acc: Any, *, use_acc: bool = True, is_async: bool = False
    ) -> Product:
        assert is_async
        product = Product(a, b, acc, use_acc)
        self.local.part.products.append(product)
        return product

    def finish(self, left: int, deps: Sequence[Product]) -> Tensor:
        """Compute what is under way, but for the `left` youngest."""
        products = self.local.part.products
        while len(products) > left:
            products.pop(0).compute()
        (value,) = (product.value for product in deps)
        assert value is not None, "this product may still be under way"
        return value


def load(pointer: Pointer, mask: Any = None, other: float = 0.0) -> Tensor:
    """Load the numbers at a pointer."""
    at = torch.as_tensor(pointer.at)
    if mask is None:
        assert bool(((at >= 0) & (at < pointer.data.numel())).all()), "a load outside of its tensor"
        return pointer.data.view(-1)[at]
    values = pointer.data.view(-1)[at.where(mask, 0)]
    return values.where(mask, torch.tensor(other, dtype=values.dtype))


def store(pointer: Pointer, value: Tensor, mask: Tensor) -> None:
    """Write where the mask is true."""
    mask = mask.broadcast_to(value.shape)
    pointer.data.view(-1)[pointer.at[mask]] = value[mask]


def allocate(dtype: Any, shape: Sequence[int], layout: Any) -> Shared:
    """Allocate shared memory, full of NaN; barriers where an element has 64 bits."""
    if dtype is torch.int64:
        return Shared(np.array([Barrier() for _ in range(shape[0])], dtype=object))
    return Shared(torch.full(tuple(shape), torch.nan, dtype=dtype), dtype)


def set_up(barrier: Barrier, count: int) -> None:
    """Initialize a barrier."""
    barrier.count = barrier.missing = count


def pick(condition: Any, yes: Any, no: Any) -> Any:
    """Select as `where` does, for numbers and tensors."""
    return torch.where(torch.as_tensor(condition), torch.as_tensor(yes), torch.as_tensor(no))


def least(a: Any, b: Any) -> Tensor:
    """Return the smaller of two numbers or tensors."""
    return torch.minimum(torch.as_tensor(a), torch.as_tensor(b))


def most(a: Any, b: Any) -> Tensor:
    """Return the larger of two numbers or tensors."""
    return torch.maximum(torch.as_tensor(a), torch.as_tensor(b))


def no_layout(*_: Any) -> None:
    """Return None: a tensor of torch has no layout."""


def language(block: Block) -> dict[str, Any]:
    """Return the names that a Gluon kernel uses, for one block."""
    gl = SimpleNamespace(
        int32=torch.int32, int64=torch.int64, float32=torch.float32, constexpr=lambda value: value,
        program_id=lambda _: block.program, num_programs=lambda _: block.grid,
        load=load, store=store, arange=lambda a, b, _=None: torch.arange(a, b),
        minimum=least, maximum=most, where=pick, cdiv=lambda a, b: (a + b - 1) // b,
        zeros=lambda shape, dtype, _=None: torch.zeros(shape, dtype=dtype),
        zeros_like=torch.zeros_like, exp2=torch.exp2, max=lambda x, dim: x.amax(dim),
        sum=lambda x, dim: x.sum(dim), convert_layout=lambda x, _: x, static_range=range,
        allocate_shared_memory=allocate, warp_specialize=block.specialize,
        NVMMADistributedLayout=lambda *_: SimpleNamespace(), SliceLayout=no_layout,
        BlockedLayout=no_layout, DotOperandLayout=lambda *_: SimpleNamespace(parent=None),
    )  # fmt: skip
    mbarrier = SimpleNamespace(
        init=set_up, wait=block.wait, arrive=block.arrive, expect=block.expect,
        MBarrierLayout=no_layout,
    )  # fmt: skip
    return {
        "gl": gl, "mbarrier": mbarrier,
        "start_copy": block.copy,
        "warpgroup_mma": block.multiply, "warpgroup_mma_wait": block.finish,
        "fence_async_shared": no_layout,
    }  # fmt: skip


def run_kernel(
    found: dict[str, Any], kernel: str, grid: int, *args: Any, seed: int = 0, **constants: Any
) -> None:
    """Launch a kernel among the names of a module: its programs run one after the other."""
    rng = np.random.default_rng(seed)
    for program in range(grid):
        names = language(Block(program, grid, rng))
        for name, value in found.items():
            if hasattr(value, "fn"):  # a function of the kernel
                names[name] = FunctionType(value.fn.__code__, names, name, value.fn.__defaults__)
            elif name.isupper():
                names[name] = getattr(value, "value", value)
        names[kernel](*args, **constants)


class Emulated:
    """A stand-in for the kernel `kernel` among `names`: launches run here, on ordinary tensors."""

    def __init__(self, names: Mapping[str, Any], kernel: str, seed: int = 0) -> None:
        self.names, self.kernel, self.seed = dict(names), kernel, seed

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(*args: Any, num_warps: int, **constants: Any) -> None:
            seen = [as_argument(arg) for arg in args]
            run_kernel(self.names, self.kernel, grid[0], *seen, seed=self.seed, **constants)

        return launch


def as_argument(arg: Any) -> Any:
    """Convert a tensor to a pointer, and a host's tensor descriptor to a kernel's."""
    if isinstance(arg, Tensor):
        whole = torch.as_strided(arg, (arg.untyped_storage().nbytes() // arg.itemsize,), (1,), 0)
        return Pointer(whole, arg.storage_offset())
    return Descriptor(arg.base, arg.block_shape) if hasattr(arg, "block_shape") else arg
