"""The interpreter's own check: a kernel that leaves the memory of its arguments is stopped."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="memcheck does this on a GPU")


@triton.jit
def copy_kernel(x_ptr, y_ptr, count, at, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(y_ptr + at + i, tl.load(x_ptr + i, mask=i < count), mask=i < count)
    tl.atomic_add(y_ptr + at, 0.0)


@pytest.mark.parametrize(
    ("count", "at", "wrong"),
    [(8, 0, None), (9, 0, "1 of 9"), (8, 2, "2 of 8"), (8, -1, "1 of 8"), (0, 8, "1 of 1")],
)
def test_strange_addresses_are_found(count: int, at: int, wrong: str | None) -> None:
    """Reads, writes and atomics; an offset into a tensor counts from its own start."""
    x, y = torch.ones(8), torch.zeros(8)
    if wrong is None:
        copy_kernel[(1,)](x, y, count, at, 16)
        assert torch.equal(x, y)
    else:
        with pytest.raises(InterpreterError, match=wrong):
            copy_kernel[(1,)](x, y, count, at, 16)


def test_a_launch_that_a_time_limit_ended_spoils_no_later_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The limit may strike while functions of `triton.language` are being replaced."""

    def end(*_: object) -> None:
        raise TimeoutError

    x, y = torch.ones(8), torch.zeros(8)
    with monkeypatch.context() as patch:
        patch.setattr(interpreter, "_patch_attr", end)
        with pytest.raises(TimeoutError):
            copy_kernel[(1,)](x, y, 8, 0, 16)
    copy_kernel[(1,)](x, y, 8, 0, 16)
    assert torch.equal(x, y)
