"""A CUDA graph for machines without a GPU: records PyTorch operations, and repeats them.

Chapter 07 captures and replays with it on a CPU, and so do the tests; the package never does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def storages(values: Any) -> set[int]:
    """Return the identities of the memory behind all tensors in nested arguments."""
    leaves = tree_leaves(values)
    return {leaf.untyped_storage()._cdata for leaf in leaves if isinstance(leaf, Tensor)}


@dataclass(frozen=True)
class RecordedCall:
    """One operation: the tensors that it read and wrote, by reference."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[Tensor, ...]  # those that own new memory; in-place results and views do not

    def run(self) -> None:
        """Compute again, from what the inputs hold now into the memory of the outputs."""
        result = tree_leaves(self.function(*self.args, **self.kwargs))
        fresh = [leaf for leaf in result if isinstance(leaf, Tensor)]
        for old, new in zip(self.outputs, fresh):
            old.copy_(new)


def reads_on_host(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True if the host would have to wait for a value: `.item()`, a boolean index."""
    if torch.Tag.data_dependent_output in function.tags:
        return True
    if torch.Tag.dynamic_output_shape not in function.tags or "output_size" in kwargs:
        return False
    leaves = [leaf for leaf in tree_leaves(args[1:]) if isinstance(leaf, Tensor)]
    is_index = function.overloadpacket is torch.ops.aten.index
    return not is_index or any(leaf.dtype in (torch.bool, torch.uint8) for leaf in leaves)


class Recorder(TorchDispatchMode):
    """Runs every operation of a region and appends it to `calls`."""

    def __init__(self, calls: list[RecordedCall]) -> None:
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Record each operation; PyTorch calls this below autograd."""
        kwargs = kwargs or {}
        if reads_on_host(func, args, kwargs):
            raise RuntimeError(
                f"capture: {func} needs a value on the host; a graph stores addresses, not values"
            )
        result = func(*args, **kwargs)
        leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if func._schema.is_mutable:
            self.calls.append(RecordedCall(func, args, kwargs, ()))
        elif "empty" not in func.overloadpacket.__name__ and storages(leaves) - storages(
            (args, kwargs)
        ):  # neither a view nor memory without values
            self.calls.append(RecordedCall(func, args, kwargs, tuple(leaves)))
        return result


class RecordingGraph:
    """`torch.cuda.CUDAGraph` on any device: a replay reads what is at the recorded addresses then.

    Unlike the original, the capture also computes.
    """

    def __init__(self) -> None:
        self.calls: list[RecordedCall] = []
        self.recorder: Recorder | None = None

    def capture_begin(self, pool: Any = None) -> None:
        """Start to record; there is no memory pool to share."""
        if self.calls or self.recorder is not None:
            raise RuntimeError("capture: this graph is captured already")
        self.recorder = Recorder(self.calls)
        self.recorder.__enter__()

    def capture_end(self) -> None:
        """Stop to record."""
        if self.recorder is None:
            raise RuntimeError("capture: capture_end() without capture_begin()")
        self.recorder.__exit__(None, None, None)
        self.recorder = None

    def replay(self) -> None:
        """Repeat what was recorded, in order; Python between the operations does not run again."""
        if not self.calls:
            raise RuntimeError("replay: nothing was captured")
        with torch.inference_mode():
            for call in self.calls:
                call.run()
