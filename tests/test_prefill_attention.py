"""The kernel for long prompts: its own functions, run by an emulator of one thread block."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import warps
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")
from minisgl.attention import hopper_backend
from minisgl.attention.hopper_backend import HopperBackend, HopperPlan, fits_hopper
from minisgl.attention.triton_backend import TritonPlan
from minisgl.kernels import prefill_attention
from minisgl.kernels.device import DeviceLimits
from tests.attention_worlds import Shape, assert_close, make_world, per_request_float32, poison

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the kernel itself")


def attend(shape: Shape, seed: int = 0, sms: int = 3) -> None:
    """Attend by the emulated kernel, and compare."""
    world = make_world(shape, torch.float16)
    poison(world)
    backend = HopperBackend(
        world.pool, world.tables, shape.kv_heads * shape.group, shape.head_dim**-0.5
    )
    backend.fits, backend.num_sms = True, sms
    plan = backend.plan(world.meta, world.out_loc)
    assert isinstance(plan, HopperPlan)
    world.pool.store_kv(world.k, world.v, world.out_loc, 1)
    kernel = warps.Emulated(vars(prefill_attention), "prefill_kernel", seed)
    with mock.patch.object(prefill_attention, "prefill_kernel", kernel):
        got = plan.attend(world.q, world.k, world.v, 1)
    assert_close(got, per_request_float32(world), 4e-3)


CASES = {
    "a prompt": Shape(((0, 300),), page_size=16, group=4, head_dim=64),
    "behind a cached prefix": Shape(((333, 200),), page_size=16, group=4, head_dim=64),
    "several, some short": Shape(
        ((0, 150), (700, 90), (40, 1), (0, 129)), page_size=16, group=4, head_dim=64
    ),
    "a group that divides no tile": Shape(((129, 200),), page_size=32, group=7, head_dim=64),
    "no group": Shape(((0, 400),), page_size=8, group=1, kv_heads=2, head_dim=128),
    "large pages": Shape(((100, 300),), page_size=256, group=2, head_dim=128),
    "whole tiles": Shape(((128, 256),), page_size=64, group=2, head_dim=64),
}


@pytest.mark.parametrize("case", CASES)
def test_the_kernel_attends(case: str) -> None:
    attend(CASES[case])


@settings(max_examples=8, deadline=None)
@given(
    lens=st.lists(st.tuples(st.integers(0, 300), st.integers(130, 200)), min_size=1, max_size=2),
    group=st.sampled_from([2, 3, 4]),
    page=st.sampled_from([8, 16, 128]),
    seed=st.integers(0, 2**16),
)
def test_any_order_of_warps(lens: Any, group: int, page: int, seed: int) -> None:
    """Barriers, not chance, order the reads; no order of events ends in a deadlock."""
    shape = Shape(tuple(lens), page_size=page, group=group, kv_heads=2, head_dim=64, seed=seed)
    attend(shape, seed, sms=1 + seed % 2)


def test_the_emulator_finds_a_missing_arrival() -> None:
    """Without a release the loading warp hangs, and the others with it."""
    broken = SimpleNamespace(fn=lambda ring, number: None)
    with (
        mock.patch.object(prefill_attention, "release", broken),
        pytest.raises(warps.Deadlock, match="wait for one another"),
    ):
        attend(Shape(((0, 600),), page_size=16, group=4, head_dim=64))


POOL = {"itemsize": 2, "quantized": False, "head_dim": 128, "page_size": 16, "capability": 90}


@pytest.mark.parametrize(
    ("change", "fits"),
    [
        ({}, True), ({"head_dim": 64, "page_size": 8}, True), ({"page_size": 48}, True),
        ({"page_size": 4}, False), ({"page_size": 20}, False), ({"head_dim": 96}, False),
        ({"itemsize": 4}, False), ({"itemsize": 1, "quantized": True}, False),
        ({"capability": 89}, False), ({"capability": 100}, False),
    ],
)  # fmt: skip
def test_which_pools_fit(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], fits: bool
) -> None:
    given = POOL | change
    limits = DeviceLimits(40, 232_448, given["capability"])
    monkeypatch.setattr(hopper_backend, "device_limits", lambda device: limits)
    buffer = SimpleNamespace(device=torch.device("cuda"), itemsize=given["itemsize"])
    pool: Any = SimpleNamespace(buffer=buffer, **given)
    assert fits_hopper(pool) == fits
    buffer.device = torch.device("cpu")
    assert not fits_hopper(pool)


@pytest.mark.parametrize(("new", "wide"), [(2000, True), (16, False), (500, False)])
def test_few_tiles_go_to_the_other_kernel(new: int, wide: bool) -> None:
    """Only work for more than all SMs: 2,000 tokens are 64 tiles of a head, 500 are 16."""
    shape = Shape(((0, new),), page_size=16, group=4, kv_heads=1, head_dim=64)
    world = make_world(shape, torch.float16)
    backend = HopperBackend(world.pool, world.tables, 4, 0.125)
    backend.fits = True
    plan = backend.plan(world.meta, world.out_loc)
    assert isinstance(plan, TritonPlan) and isinstance(plan, HopperPlan) == wide


class Launched:
    """A stand-in for a kernel: keeps its launches; a launch returns `compiled`."""

    def __init__(self, name: str, launches: list[Any], compiled: Any = None) -> None:
        self.name, self.launches, self.compiled = name, launches, compiled

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **options: int) -> Any:
            given = (getattr(arg, "base", arg) for arg in args)  # the tensors of descriptors
            pointers = (x.data_ptr() if isinstance(x, torch.Tensor) else x for x in given)
            self.launches.append((self.name, grid, *pointers))
            return self.compiled

        return launch


def test_layers_share_tensor_maps_and_the_compiled_kernel() -> None:
    """Only the first layer of a plan searches; a compiled kernel takes all arguments in order."""
    world = make_world(CASES["behind a cached prefix"], torch.float16)
    backend = HopperBackend(world.pool, world.tables, 8, 0.125)
    backend.fits, backend.num_sms = True, 3
    launches: list[Any] = []
    kernel = Launched("found", launches, Launched("compiled", launches))
    with mock.patch.object(prefill_attention, "prefill_kernel", kernel):
        for _ in range(2):
            plan = backend.plan(world.meta, world.out_loc)
            assert isinstance(plan, HopperPlan) and plan.boxes is backend.boxes
            for layer in (0, 1, 0):
                plan.attend(world.q, world.k, world.v, layer)
    assert [name for name, *_ in launches] == ["found", "compiled", "compiled"] * 2
    names = inspect.signature(prefill_attention.prefill_kernel.fn).parameters
    first, second = (dict(zip(["name", "grid", *names], n, strict=True)) for n in launches[:2])
    differ = {name for name in first if first[name] != second[name]}
    assert differ <= {"name", "k_pages", "v_pages", "out_ptr"} and second["grid"] == (3, 1, 1)
    assert second["GROUP"] == 4 and second["kv_heads"] == world.pool.num_kv_heads
    for name, cache in (("k_pages", world.pool.k_cache(1)), ("v_pages", world.pool.v_cache(1))):
        assert second[name] == cache.data_ptr()
