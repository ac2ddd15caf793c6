"""The pool, the pages and the tables, against plain Python models of each."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from minisgl.config.known_models import LLAMA_3_1_8B, QWEN2_5_7B, QWEN3_0_6B
from minisgl.config.model import ModelConfig
from minisgl.kvcache.page_table import (
    MirroredTable,
    OutOfPages,
    OutOfRows,
    PageAllocator,
    TableManager,
)
from minisgl.kvcache.pool import KVPool, kv_bytes_per_token, mapped_zeros

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


# ------------------------------------------------------------------------------------------- bytes


def test_bytes_per_token_by_hand() -> None:
    llama = ModelConfig.from_hf(LLAMA_3_1_8B)
    assert kv_bytes_per_token(llama, 2) == 131072
    assert kv_bytes_per_token(ModelConfig.from_hf(QWEN3_0_6B), 4) == 229376
    # 8 KV heads: split until each rank has one, then copied
    sizes = [kv_bytes_per_token(llama, 2, size) for size in (1, 2, 4, 8, 16)]
    assert sizes == [131072, 65536, 32768, 16384, 16384]
    with pytest.raises(ValueError, match=r"^itemsize: must be a positive integer, got 0$"):
        kv_bytes_per_token(llama, 0)


@pytest.mark.parametrize("size", [0, 3, 6, -1, True])
def test_ranks_that_cannot_share_the_heads(size: int) -> None:
    with pytest.raises(ValueError, match=r"^tp_size: must be "):
        kv_bytes_per_token(ModelConfig.from_hf(QWEN2_5_7B), 2, size)


def test_the_pool_costs_what_the_arithmetic_says() -> None:
    model = ModelConfig.from_hf(QWEN3_0_6B)
    pool = make_pool(num_layers=model.num_layers, num_kv_heads=8, head_dim=128, num_pages=2)
    assert pool.buffer.nbytes == kv_bytes_per_token(model, 4) * (pool.num_slots + pool.page_size)


# -------------------------------------------------------------------------------------------- pool


def make_pool(**changes: Any) -> KVPool:
    sizes: dict[str, Any] = {
        "num_layers": 2,
        "num_pages": 5,
        "page_size": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "dtype": torch.float32,
        "device": "cpu",
    }
    return KVPool(**{**sizes, **changes})


def test_the_dummy_page_comes_after_all_others() -> None:
    pool = make_pool()
    assert (pool.dummy_page, pool.dummy_slot, pool.num_slots) == (5, 20, 20)
    assert pool.k_cache(0).shape == pool.v_cache(1).shape == (6, 4, 2, 8)
    assert not pool.buffer.any(), "masked reads multiply what lies there by 0"


@pytest.mark.parametrize(
    "name", ["num_layers", "num_pages", "page_size", "num_kv_heads", "head_dim"]
)
@pytest.mark.parametrize("wrong", [0, -3, 1.5, True])
def test_wrong_sizes_are_named(name: str, wrong: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{name}: must be a positive integer, got "):
        make_pool(**{name: wrong})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_store_kv_writes_what_and_where_it_is_told(dtype: torch.dtype, device: str) -> None:
    pool = make_pool(dtype=dtype, device=device)
    expected = torch.zeros(2, 2, 24, 2, 8, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    for _ in range(10):
        n = int(torch.randint(0, 9, (), generator=generator))
        slots = torch.randperm(20, generator=generator)[:n]
        packed = torch.randn(n, 6, 8, generator=generator).to(dtype)  # as q, k, v come: strided
        k, v = packed[:, 2:4], packed[:, 4:6]
        layer = int(torch.randint(0, 2, (), generator=generator))
        pool.store_kv(k.to(device), v.to(device), slots.to(device), layer)
        for i, slot in enumerate(slots.tolist()):
            expected[0, layer, slot], expected[1, layer, slot] = k[i], v[i]
    assert torch.equal(pool.buffer.cpu(), expected.view(pool.buffer.shape))
    assert torch.equal(pool.k_cache(1).cpu(), expected[0, 1].view(6, 4, 2, 8))
    assert torch.equal(pool.v_cache(0).cpu(), expected[1, 0].view(6, 4, 2, 8))


def test_padding_may_write_the_dummy_slot_many_times() -> None:
    pool = make_pool()
    k = torch.ones(3, 2, 8)
    pool.store_kv(k, k, torch.tensor([20, 20, 3]), 0)
    assert pool.k_cache(0)[0, 3].eq(1).all()
    pool.buffer[:, :, pool.dummy_page] = 0
    assert pool.buffer.count_nonzero() == 2 * 2 * 8  # one slot of K, one of V


@pytest.mark.parametrize("device", DEVICES)
def test_loads_copy_what_they_are_asked_for_and_take_new_memory_for_more_alone(
    device: str,
) -> None:
    pool = make_pool(device=device)
    pool.buffer.copy_(torch.arange(pool.buffer.numel()).view(pool.buffer.shape))
    random, most, places = np.random.default_rng(0), 0, list[int]()
    for _ in range(50):
        shape, layer = tuple(random.integers(0, 6, random.integers(1, 4))), random.integers(2)
        slots = torch.from_numpy(random.integers(0, pool.num_slots, shape)).to(device)
        loaded = pool.load_kv(slots, layer, random.choice([torch.float32, torch.float64]))
        for found, cache in zip(loaded, (pool.k_cache(layer), pool.v_cache(layer)), strict=True):
            assert torch.equal(found.float(), cache.flatten(0, 1)[slots])
        if loaded[0].dtype == torch.float32 and 0 < slots.numel() <= most:
            assert [part.data_ptr() for part in loaded] == places
        elif slots.numel() > most:
            most = slots.numel()
            places = [part.data_ptr() for part in pool.load_kv(slots, layer, torch.float32)]


def test_a_freed_pool_gives_its_memory_back() -> None:
    pool = make_pool()
    pool.buffer.fill_(1)
    pool.free()
    assert not pool.buffer.any(), "a private mapping reads as zeros once it is given back"
    pool.free()  # nothing left to give


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.int64])
def test_zeros_of_any_dtype(dtype: torch.dtype) -> None:
    zeros, mapping = mapped_zeros((3, 5), dtype)
    assert zeros.shape == (3, 5) and zeros.dtype == dtype and len(mapping) == zeros.nbytes
    assert not zeros.float().any()


# ------------------------------------------------------------------------------------------- pages


def test_last_back_first_out() -> None:
    pages = PageAllocator(6, 4)
    assert pages.allocate(4).tolist() == [0, 1, 2, 3]
    pages.free(np.array([2, 0]))
    assert pages.allocate(2).tolist() == [2, 0] and pages.free_pages == 2
    assert pages.allocate(0).dtype == np.int32


def test_what_was_handed_out_stays_as_it_is() -> None:
    pages = PageAllocator(4, 1)
    mine = pages.allocate(4)
    pages.free(mine[:2].copy())
    pages.allocate(1)
    assert mine.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([4], r"pages of 0 \.\.\. 3, got \[4\]"),  # the dummy page
        ([-1], r"pages of 0 \.\.\. 3, got \[-1\]"),
        ([0, 3], r"pages that are in use, got \[3\]"),
        ([0, 1, 0], r"different pages, got \[0, 1, 0\]"),
    ],
)
def test_a_refused_free_changes_nothing(returned: list[int], message: str) -> None:
    pages = PageAllocator(4, 16)
    pages.allocate(3)
    with pytest.raises(ValueError, match=rf"^free: must be {message}"):
        pages.free(np.array(returned))
    assert pages.free_pages == 1 and pages.free_set().tolist() == [3]
    pages.free(np.array([0, 1, 2]))
    assert pages.free_pages == 4


def test_pitfall_03_double_free() -> None:
    pages = PageAllocator(4, 16)
    mine = pages.allocate(2)
    pages.free(mine)
    with pytest.raises(ValueError, match=r"^free: must be pages that are in use, got \[0, 1\]"):
        pages.free(mine)


def test_out_of_pages_names_both_numbers_and_takes_none() -> None:
    pages = PageAllocator(4, 16)
    pages.allocate(1)
    with pytest.raises(OutOfPages, match=r"^pages: 4 wanted, 3 free$"):
        pages.allocate(4)
    assert pages.free_pages == 3 and pages.allocate(3).tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match=r"^allocate: must be "):
        pages.allocate(-1)


@pytest.mark.parametrize(("count", "size"), [(0, 1), (1, 0), (-1, 1), (True, 1), (1, 1.0)])
def test_wrong_allocators(count: Any, size: Any) -> None:
    with pytest.raises(ValueError, match=r"^(num_pages|page_size): must be a positive integer"):
        PageAllocator(count, size)


# ------------------------------------------------------------------------------------------ tables


def make_tables(**changes: Any) -> TableManager:
    sizes: dict[str, Any] = {
        "num_rows": 3,
        "max_len": 10,
        "page_size": 4,
        "dummy_page": 5,
        "device": "cpu",
        "share_memory": False,
    }
    return TableManager(**{**sizes, **changes})


def test_a_new_table_names_only_the_dummy_page() -> None:
    tables = make_tables()
    assert tables.dummy_row == tables.num_rows == 3
    assert tables.page_table.shape == (4, 12) and tables.page_table.dtype == np.int32
    assert tables.device_page_table.dtype == torch.int32
    assert tables.token_pool.shape == (4, 12) and tables.token_pool.dtype == torch.int64
    for row in (*tables.page_table.tolist(), *tables.device_page_table.tolist()):
        assert row == [20, 21, 22, 23] * 3
    assert not tables.token_pool.any()


def test_rows() -> None:
    tables = make_tables()
    assert [tables.allocate() for _ in range(3)] == [0, 1, 2] and tables.free_rows == 0
    with pytest.raises(OutOfRows, match="3"):
        tables.allocate()
    tables.free(1)
    for wrong in (1, 3, -1):  # twice, the dummy row, unknown
        with pytest.raises(ValueError, match=r"^free: must be a row in use"):
            tables.free(wrong)
    assert tables.allocate() == 1


@pytest.mark.parametrize("device", DEVICES)
def test_the_device_sees_writes_at_the_flush(device: str) -> None:
    tables = make_tables(device=device)
    tables.write(1, 4, np.array([8, 9, 10, 11]))
    tables.write_tokens(2, 1, np.array([70_000, 2]))
    assert tables.page_table[1, 4:8].tolist() == [8, 9, 10, 11]  # the host at once
    assert tables.device_page_table[1].tolist() == [20, 21, 22, 23] * 3
    assert not tables.token_pool.any()
    tables.flush()
    assert tables.device_page_table.tolist() == tables.page_table.tolist()
    assert tables.token_pool[2].tolist() == [0, 70_000, 2] + [0] * 9


@pytest.mark.parametrize("device", DEVICES)
def test_a_flush_touches_only_what_was_written(device: str) -> None:
    """The device writes sampled tokens itself; a flush must not undo them."""
    tables = make_tables(device=device)
    tables.write_tokens(0, 0, np.array([1, 2, 3]))
    tables.flush()
    tables.token_pool[0, 3] = 99  # sampled
    tables.write_tokens(1, 0, np.array([4]))
    tables.write(0, 0, np.array([0]))
    tables.flush()
    assert tables.token_pool[0, :5].tolist() == [1, 2, 3, 99, 0]
    tables.flush()  # nothing is pending
    assert tables.token_pool[1, :2].tolist() == [4, 0]


def test_of_two_writes_to_one_place_the_last_one_counts() -> None:
    tables = make_tables()
    for slots in ([0, 1, 2, 3], [12, 13, 14, 15], [4, 5]):
        tables.write(0, 0, np.array(slots))
        tables.write_tokens(0, 0, np.array(slots) + 100)
    tables.flush()
    assert tables.device_page_table[0, :4].tolist() == [4, 5, 14, 15]
    assert tables.token_pool[0, :4].tolist() == [104, 105, 114, 115]


def test_a_cpu_shares_its_memory() -> None:
    tables = make_tables(share_memory=None)
    tables.write(0, 0, np.array([3]))
    tables.write_tokens(0, 0, np.array([7]))
    assert tables.device_page_table[0, 0] == 3 and tables.token_pool[0, 0] == 7
    assert tables.device_page_table.data_ptr() == tables.page_table.ctypes.data
    tables.flush()
    tables.token_pool[0, 1] = 9
    assert tables.token_pool[0, :2].tolist() == [7, 9]


def test_pitfall_04_a_flush_makes_a_new_staging_array(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy of the last flush may still read its array when the next flush fills one."""
    seen = []
    original = torch.from_numpy

    def spy(array: Any) -> torch.Tensor:
        tensor = original(array)
        seen.append(tensor)
        return tensor

    tables = make_tables()
    monkeypatch.setattr(torch, "from_numpy", spy)
    for _ in range(3):
        tables.write(0, 0, np.array([1, 2]))
        tables.flush()
    assert len({tensor.data_ptr() for tensor in seen}) == len(seen) == 3


@pytest.mark.parametrize(
    ("row", "start", "count"),
    [(-1, 0, 1), (3, 0, 1), (4, 0, 1), (0, -1, 1), (0, 11, 2), (0, 13, 0)],
)
def test_writes_outside_are_refused(row: int, start: int, count: int) -> None:
    tables = make_tables()
    for action in (tables.write, tables.write_tokens):
        with pytest.raises(ValueError, match=r"^write"):
            action(row, start, np.zeros(count, dtype=np.int32))
    tables.flush()
    assert tables.device_page_table.tolist() == [[20, 21, 22, 23] * 3] * 4


@pytest.mark.parametrize("name", ["num_rows", "max_len", "page_size"])
@pytest.mark.parametrize("wrong", [0, -1, 2.0, True])
def test_wrong_tables(name: str, wrong: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{name}: must be a positive integer"):
        make_tables(**{name: wrong})


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 7), st.integers(0, 5)), max_size=8))
def test_pending_places(writes: list[tuple[int, int, int]]) -> None:
    mirror = MirroredTable(np.zeros((4, 12), dtype=np.int32), torch.device("cpu"), False)
    expected = []
    for row, start, count in writes:
        mirror.write(row, start, np.ones(count))
        expected += [row * 12 + start + i for i in range(count)]
    assert mirror.take_pending().tolist() == expected
    assert mirror.take_pending().size == 0


# ----------------------------------------------------------------------------------- state machine


class Requests(RuleBasedStateMachine):
    """Requests come, grow, rewrite their rows and go; dictionaries hold the expected state."""

    @initialize(pages=st.integers(1, 12), size=st.sampled_from([1, 2, 4, 16]), shared=st.booleans())
    def start(self, pages: int, size: int, shared: bool) -> None:
        self.size, self.num_pages = size, pages
        self.pages = PageAllocator(pages, size)
        self.tables = TableManager(4, 40, size, pages, "cpu", share_memory=shared)
        self.shared = shared
        self.owned: dict[int, list[int]] = {}  # row to pages
        self.ids: dict[int, list[int]] = {}  # row to tokens
        self.device: dict[tuple[int, int], tuple[int, int]] = {}  # what the last flush promised
        self.tokens = 0

    def slots(self, row: int) -> list[int]:
        return [page * self.size + i for page in self.owned[row] for i in range(self.size)]

    @rule()
    def admit(self) -> None:
        if len(self.owned) == 4:
            with pytest.raises(OutOfRows):
                self.tables.allocate()
            return
        row = self.tables.allocate()
        assert row not in self.owned and row != self.tables.dummy_row
        self.owned[row], self.ids[row] = [], []

    @precondition(lambda self: self.owned)
    @rule(data=st.data(), count=st.integers(1, 9))
    def grow(self, data: st.DataObject, count: int) -> None:
        row = data.draw(st.sampled_from(sorted(self.owned)))
        length = min(len(self.ids[row]) + count, 40)
        needed = -(-length // self.size) - len(self.owned[row])
        free = self.num_pages - sum(map(len, self.owned.values()))
        if needed > free:
            with pytest.raises(OutOfPages, match=f"{needed} wanted, {free} free"):
                self.pages.allocate(needed)
            return
        fresh = self.pages.allocate(needed)
        start = len(self.owned[row]) * self.size
        self.owned[row] += fresh.tolist()
        self.tables.write(row, start, np.array(self.slots(row)[start:], dtype=np.int32))
        old = len(self.ids[row])
        self.ids[row] += range(self.tokens, self.tokens + length - old)
        self.tokens += length - old
        self.tables.write_tokens(row, old, np.array(self.ids[row][old:], dtype=np.int32))

    @precondition(lambda self: any(self.owned.values()))
    @rule(data=st.data())
    def exchange_a_page(self, data: st.DataObject) -> None:
        """As when a cache holds the tokens elsewhere: take a page, rewrite, give one back."""
        row = data.draw(st.sampled_from(sorted(r for r, p in self.owned.items() if p)))
        if not self.pages.free_pages:
            return
        index = data.draw(st.integers(0, len(self.owned[row]) - 1))
        [fresh] = self.pages.allocate(1).tolist()
        old, self.owned[row][index] = self.owned[row][index], fresh
        slots = self.slots(row)[index * self.size : (index + 1) * self.size]
        self.tables.write(row, index * self.size, np.array(slots, dtype=np.int32))
        self.pages.free(np.array([old]))

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.owned)))
        pages = np.array(self.owned.pop(row), dtype=np.int32)
        del self.ids[row]
        self.pages.free(pages)
        self.tables.free(row)
        if pages.size:
            with pytest.raises(ValueError, match="in use"):
                self.pages.free(pages[:1])
        with pytest.raises(ValueError, match="in use"):
            self.tables.free(row)

    @rule()
    def flush(self) -> None:
        self.tables.flush()
        for row in self.owned:
            slots, ids = self.slots(row), self.ids[row]
            assert self.tables.device_page_table[row, : len(slots)].tolist() == slots
            assert self.tables.token_pool[row, : len(ids)].tolist() == ids

    @invariant()
    def every_page_is_in_one_place(self) -> None:
        owned = [page for pages in self.owned.values() for page in pages]
        assert sorted(owned + self.pages.free_set().tolist()) == list(range(self.num_pages))
        assert self.pages.free_pages == self.num_pages - len(owned)
        assert self.tables.free_rows == 4 - len(self.owned)

    @invariant()
    def rows_name_their_own_slots(self) -> None:
        for row in self.owned:
            slots = self.slots(row)
            assert self.tables.page_table[row, : len(slots)].tolist() == slots

    @invariant()
    def the_dummy_row_is_untouched(self) -> None:
        row = self.tables.page_table[self.tables.dummy_row]
        assert set(row.tolist()) <= set(
            range(self.num_pages * self.size, (self.num_pages + 1) * self.size)
        )


TestRequests = Requests.TestCase
TestRequests.settings = settings(max_examples=60, stateful_step_count=40)
