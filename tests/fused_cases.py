"""Cases for the fused kernels that run on a CPU in Triton's interpreter and on a GPU alike."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported

from minisgl.attention.fused_backend import FusedBackend, VerifyBackend
from minisgl.attention.metadata import (
    AttentionMetadata,
    DecodeBuffers,
    ForwardBatch,
    build_metadata,
)
from minisgl.attention.torch_backend import TorchBackend
from minisgl.config.model import ModelConfig
from minisgl.core import Phase
from minisgl.fp8 import Stored
from minisgl.kernels import linear
from minisgl.kernels.rotate_store import rotate_and_store
from minisgl.kvcache.fp8_pool import Fp8KVPool
from minisgl.kvcache.page_table import TableManager
from minisgl.kvcache.pool import KVPool
from minisgl.models.base import CausalLM
from minisgl.models.quantization import quantize_linears
from minisgl.models.registry import build_model
from minisgl.models.weights import load_dummy_weights
from minisgl.parallel.comm import Comm, SingleRank
from tests.checkpoints import base_config


def close(got: torch.Tensor, want: torch.Tensor, limit: float) -> None:
    """The relative distance of two tensors is below `limit`."""
    size = partial(torch.linalg.vector_norm, dtype=torch.float64)  # without a copy of that width
    error = size(got.float() - want.float()) / size(want.float()).clamp(min=1e-30)
    assert error < limit, float(error)


def limit_of(dtype: torch.dtype) -> float:
    return 2e-5 if dtype == torch.float32 else 2e-2


def head_scales(kv: int) -> torch.Tensor:
    """Scales [2, kv] of keys and of values, all different."""
    return torch.stack((torch.linspace(0.25, 1.0, kv), torch.linspace(0.5, 2.2, kv)))


class World:
    """A pool, tables and requests with random cached tokens."""

    def __init__(
        self, lens: list[int], *, kv: int, dim: int, layers: int = 1, page_size: int = 4,
        device: str = "cpu", dtype: torch.dtype = torch.float32, qo: int = 4, seed: int = 0,
        eight_bits: bool = False,
    ) -> None:  # fmt: skip
        """eight_bits: of keys and values; each head has scales of its own."""
        rng = np.random.default_rng(seed)
        pages = [-(-(n + 1) // page_size) for n in lens]
        total = sum(pages)
        sizes: dict[str, Any] = {
            "num_layers": layers, "num_pages": total, "page_size": page_size, "num_kv_heads": kv,
            "head_dim": dim, "device": device,
        }  # fmt: skip
        gen = torch.Generator().manual_seed(seed)
        if eight_bits:
            self.pool: KVPool = Fp8KVPool(**sizes)
            for layer in range(layers):
                self.pool.scales(layer)[..., 0] = head_scales(kv)
        else:
            self.pool = KVPool(dtype=dtype, **sizes)
        self.pool.buffer.copy_(torch.randn(self.pool.buffer.shape, generator=gen))
        width = -(-(max(lens) + 2) // page_size) * page_size
        self.tables = TableManager(len(lens) + 1, width, page_size, self.pool.dummy_page, device)
        shuffled = rng.permutation(total)
        at = 0
        self.rows = []
        for count in pages:
            row = self.tables.allocate()
            slots = shuffled[at : at + count, None] * page_size + np.arange(page_size)
            self.tables.write(row, 0, slots.reshape(-1).astype(np.int32))
            self.rows.append(row)
            at += count
        self.tables.flush()
        self.lens = np.array(lens, np.int32)
        self.device, self.dtype, self.page_size, self.qo = device, dtype, page_size, qo

    def meta(
        self, phase: Phase = Phase.DECODE, extend: list[int] | None = None
    ) -> AttentionMetadata:
        ones = np.ones(len(self.lens), np.int32) if extend is None else np.array(extend, np.int32)
        rows = np.array(self.rows, np.int32)
        return build_metadata(phase, rows, ones, self.lens, self.tables.page_table, self.page_size)

    def places(self, extend: list[int] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions and slots of the last `extend` tokens of each request."""
        ones = [1] * len(self.lens) if extend is None else extend
        positions = np.concatenate([np.arange(n - e, n) for n, e in zip(self.lens, ones)])
        rows = np.repeat(self.rows, ones)
        slots = self.tables.page_table[rows, positions].astype(np.int64)
        return (
            torch.tensor(positions, dtype=torch.int64, device=self.device),
            torch.tensor(slots, device=self.device),
        )

    def backend(self, cls: Any) -> Any:
        return cls(self.pool, self.tables, self.qo, self.pool.head_dim**-0.5)

    def random(self, *shape: int, seed: int = 1) -> torch.Tensor:
        gen = torch.Generator().manual_seed(seed)
        return torch.randn(*shape, generator=gen).to(self.device, self.dtype)


EPS = 1e-6
Norms = tuple[torch.Tensor, torch.Tensor]


def turn(
    x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, norm: torch.Tensor | None
) -> torch.Tensor:
    """x [n, heads, d], normalised if there is a norm [d], and rotated, in plain PyTorch."""
    wide = x.float()
    if norm is not None:
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
        wide = (wide * scale * norm.float()).to(x.dtype).float()
    (a, b), (cos, sin) = wide.chunk(2, -1), table[positions][:, None].chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def norms_and_table(world: World, normed: bool) -> tuple[Norms | None, torch.Tensor]:
    """Random weights for the norms of q and k (None if not asked), and a table of angles."""
    dim = world.pool.head_dim
    q_norm, k_norm = (world.random(dim, seed=7 + i).abs() + 0.5 for i in range(2))
    angles = world.random(int(world.lens.max()) + 1, dim // 2, seed=9).float() * 3
    return ((q_norm, k_norm) if normed else None), torch.cat((angles.cos(), angles.sin()), -1)


def check_decode(
    lens: list[int], *, qo: int, kv: int, dim: int, turned: bool = False, normed: bool = False,
    **where: Any,
) -> None:  # fmt: skip
    """The fused backend equals the torch backend, twice in a row, and stores the same.

    `turned`: its kernel gets q and k as they leave their projection; `normed`: with norms, too.
    """
    world = World(lens, kv=kv, dim=dim, qo=qo, **where)
    bs = len(lens)
    q, k, v = (world.random(bs, h, dim, seed=i) for i, h in enumerate((qo, kv, kv)))
    positions, out_loc = world.places()
    raw: dict[str, Any] = {}
    ready = [q, k]
    if turned:
        norms, table = norms_and_table(world, normed)
        weights = norms or (None, None)
        ready = [turn(x, positions, table, g) for x, g in zip(ready, weights, strict=True)]
        raw = {"norms": norms, "eps": EPS, "table": table}
    before = world.pool.buffer.clone()
    want = world.backend(TorchBackend).plan(world.meta(), out_loc).run(*ready, v, 0)
    stored = world.pool.buffer.clone()
    rows = torch.tensor(world.rows, dtype=torch.int64, device=world.device)
    fused = world.backend(FusedBackend)
    plan = fused.graph_plan(bs, DecodeBuffers(rows, positions, out_loc))
    for _ in range(2):
        world.pool.buffer.copy_(before)
        got = plan.decode(q, k, v, 0, **raw) if turned else plan.run(q, k, v, 0)
        close(got, want, limit_of(world.dtype))
        if turned:  # a rounding may differ
            close(world.pool.buffer, stored, limit_of(world.dtype) / 10)
        else:
            assert torch.equal(world.pool.buffer, stored)
        assert int(fused.scratch.done.sum()) == 0
    close(fused.plan(world.meta(), out_loc).attend(*ready, v, 0), want, limit_of(world.dtype))


def check_eight_bits(
    backend: Any, lens: list[int], extend: list[int] | None, limit: float, *, qo: int = 4,
    kv: int = 2, dim: int = 32, **where: Any,
) -> None:  # fmt: skip
    """A backend over an FP8 pool equals plain attention over its values."""
    sizes = {"kv": kv, "dim": dim, "qo": qo, **where}
    world, plain = World(lens, eight_bits=True, **sizes), World(lens, **sizes)
    phase = Phase.DECODE if extend is None else Phase.PREFILL
    meta, (_, out_loc) = world.meta(phase, extend), world.places(extend)
    q, k, v = (world.random(len(out_loc), h, dim, seed=i) for i, h in enumerate((qo, kv, kv)))
    before = world.pool.buffer.clone()
    world.pool.store_kv(k, v, out_loc, 0)
    stored = world.pool.buffer.float()
    scales = head_scales(kv).view(2, 1, 1, 1, kv, 1).to(world.device)
    plain.pool.buffer.copy_(stored * scales)
    seen = [part.clone() for part in plain.pool.load_kv(out_loc, 0, world.dtype)]
    want = plain.backend(TorchBackend).plan(meta, out_loc).attend(q, *seen, 0)
    world.pool.buffer.copy_(before)
    close(world.backend(backend).plan(meta, out_loc).run(q, k, v, 0), want, limit)
    close(world.pool.buffer.float(), stored, limit)
    new, expected = (x.flatten(2, 3)[:, :, out_loc] for x in (world.pool.buffer.float(), stored))
    close(new, expected, limit)


def check_rotate(
    lens: list[int], *, qo: int, kv: int, dim: int, normed: bool, limit: float = 0.0, **where: Any
) -> None:
    """`rotate_and_store` equals plain PyTorch for all tokens of `lens`, and fills their slots.

    limit: of the distance between its values and those of plain PyTorch in an FP8 pool.
    """
    world = World(lens, kv=kv, dim=dim, qo=qo, eight_bits=limit > 0, **where)
    norms, table = norms_and_table(world, normed)
    positions, slots = world.places(lens)
    qkv = world.random(len(positions), (qo + 2 * kv) * dim)
    q, k, v = qkv.clone().view(len(qkv), -1, dim).split((qo, kv, kv), 1)
    weights = norms or (None, None)
    want = [turn(x, positions, table, g) for x, g in zip((q, k), weights, strict=True)]
    free = torch.ones(world.pool.k_cache(0).shape[:2].numel(), dtype=torch.bool)
    free[slots.cpu()] = False
    caches = world.pool.k_cache(0), world.pool.v_cache(0)
    before = [cache.flatten(0, 1).cpu()[free] for cache in caches]
    scales = world.pool.scales(0)
    got = rotate_and_store(qkv, norms, EPS, table, positions, slots, *caches, qo, scales)
    for one, other in zip(got[:2], want, strict=True):
        close(one, other, limit_of(world.dtype) / 10)
    assert torch.equal(got[2], v), "values are copied only"
    for one, cache, kept in zip(got[1:], caches, before, strict=True):
        if scales is None:
            assert torch.equal(cache.flatten(0, 1)[slots], one)
        now = cache.flatten(0, 1).cpu()[free]
        assert torch.equal(now.float(), kept.float()), "other slots stay as they were"
    if scales is not None:
        stored = world.pool.load_kv(slots, 0, torch.float32)
        world.pool.store_kv(*got[1:], slots, 0)
        for one, other in zip(stored, world.pool.load_kv(slots, 0, torch.float32), strict=True):
            close(one, other, limit)


def small_model(
    arch: str, device: str = "cpu", dtype: torch.dtype = torch.float32, scales: str = "",
    comm: Comm | None = None, **changes: Any,
) -> CausalLM:  # fmt: skip
    """A model of random weights whose sizes suit every kernel.

    scales: "channel" or "block" for FP8 weights.
    """
    sizes = {
        "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 16,
        "num_key_value_heads": 4, "head_dim": 64, "num_hidden_layers": 2,
        "max_position_embeddings": 2048,
    }  # fmt: skip
    config = ModelConfig.from_hf({**base_config(arch), **sizes, **changes})
    model = build_model(config, comm or SingleRank(), dtype=dtype, device="meta")
    if scales:
        quantize_linears(model, Stored("", 128, 128) if scales == "block" else None)
    load_dummy_weights(model, device=device, dtype=dtype)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.uniform_(0.5, 1.5)
        if name.endswith("bias"):
            parameter.data.normal_()
    for layer in model.model.layers:  # heads share one weight
        norm = layer.self_attn.qk_norm
        if norm is not None:
            norm.weight.data[: norm.num_qo_heads] = norm.weight.data[0].clone()
            norm.weight.data[norm.num_qo_heads :] = norm.weight.data[norm.num_qo_heads].clone()
    return model


def check_model(
    model: CausalLM, lens: list[int], extend: list[int] | None, limit: float = 0.0,
    eight_bits: bool = False, turned: int = 0,
) -> None:  # fmt: skip
    """The fused model equals the plain one: a decode step, or a prefill of `extend` tokens.

    limit: of their relative distance; 0: what the dtype of the weights allows. eight_bits: of keys
    and values. turned: rows of logits that may be any, as rounding can turn a choice of experts.
    """
    from minisgl.models.fused import FusedModel

    config, weight = model.config, model.model.embed_tokens.weight
    heads = cast(Any, model.model.layers[0]).self_attn  # of this rank
    world = World(
        lens, kv=heads.num_kv_heads, dim=config.head_dim, layers=config.num_layers,
        device=str(weight.device), dtype=weight.dtype, qo=heads.num_qo_heads,
        eight_bits=eight_bits,
    )  # fmt: skip
    phase = Phase.DECODE if extend is None else Phase.PREFILL
    meta = world.meta(phase, extend)
    positions, out_loc = world.places(extend)
    gen = torch.Generator().manual_seed(3)
    ids = torch.randint(0, config.vocab_size, (len(positions),), generator=gen).to(weight.device)
    last = None
    if extend is not None:
        last = torch.tensor(np.cumsum(extend) - 1, device=weight.device)
    before = world.pool.buffer.clone()

    def run(forward: Any, backend: Any) -> torch.Tensor:
        world.pool.buffer.copy_(before)
        plan = world.backend(backend).plan(meta, out_loc)
        fb = ForwardBatch(phase, ids, positions, out_loc, last, plan)
        with torch.inference_mode():
            return forward(fb)

    want = run(model, TorchBackend)
    kept = world.pool.buffer.clone()
    for backend in (TorchBackend, FusedBackend) if extend is None else (TorchBackend,):
        got = run(FusedModel(model), backend)
        off = (got.float() - want.float()).norm(dim=-1) / want.float().norm(dim=-1)
        usual = off.argsort()[: len(off) - turned]
        close(got[usual], want[usual], limit or 2 * limit_of(weight.dtype))
        close(world.pool.buffer.float(), kept.float(), limit or limit_of(weight.dtype))


def drafted(extend: list[int], world: World) -> tuple[torch.Tensor, DecodeBuffers]:
    """The last tokens of each request as rows of one decode step, in reverse order: who stores
    what a row reads comes after it."""
    positions, out_loc = world.places(extend)
    order = torch.arange(len(positions) - 1, -1, -1, device=world.device)
    rows = torch.tensor(np.repeat(world.rows, extend), dtype=torch.int64, device=world.device)
    return order, DecodeBuffers(rows[order], positions[order], out_loc[order])


def check_drafts(backend: Any, *, qo: int, kv: int, dim: int, **where: Any) -> None:
    """Rows of one request see each other's keys and values, as in a prefill."""
    extend = [4, 1]
    world = World([12, 3], kv=kv, dim=dim, qo=qo, **where)
    order, buffers = drafted(extend, world)
    q, k, v = (world.random(sum(extend), h, dim, seed=i) for i, h in enumerate((qo, kv, kv)))
    before = world.pool.buffer.clone()
    out_loc = world.places(extend)[1]
    meta = world.meta(Phase.PREFILL, extend)
    want = world.backend(TorchBackend).plan(meta, out_loc).run(q, k, v, 0)[order]
    stored = world.pool.buffer.clone()
    size = len(order)
    lens = (buffers.positions + 1).cpu().numpy()
    rows = buffers.rows.cpu().numpy()
    ones = np.ones(size, np.int32)
    table, page = world.tables.page_table, world.page_size
    decode = build_metadata(Phase.DECODE, rows, ones, lens, table, page)
    made = world.backend(backend)
    plans = [made.graph_plan(size, buffers), made.plan(decode, buffers.out_loc)]
    for plan in plans:
        world.pool.buffer.copy_(before)
        close(plan.run(q[order], k[order], v[order], 0), want, limit_of(world.dtype))
        assert torch.equal(world.pool.buffer, stored)


def check_drafts_of_model(model: CausalLM) -> None:
    """The fused model verifies as the plain one computes a prompt."""
    from minisgl.models.fused import FusedModel

    config, weight, extend = model.config, model.model.embed_tokens.weight, [4, 1]
    world = World(
        [20, 9], kv=config.num_kv_heads, dim=config.head_dim, layers=config.num_layers,
        device=str(weight.device), dtype=weight.dtype, qo=config.num_qo_heads,
    )  # fmt: skip
    order, buffers = drafted(extend, world)
    positions, out_loc = world.places(extend)
    ids = torch.randint(0, config.vocab_size, (5,), generator=torch.Generator().manual_seed(3))
    ids, before = ids.to(weight.device), world.pool.buffer.clone()
    meta = world.meta(Phase.PREFILL, extend)
    with torch.inference_mode():
        plan = world.backend(TorchBackend).plan(meta, out_loc)
        want = model(ForwardBatch(Phase.PREFILL, ids, positions, out_loc, None, plan))
        stored = world.pool.buffer.clone()
        world.pool.buffer.copy_(before)
        plan = world.backend(VerifyBackend).graph_plan(5, buffers)
        places = (ids[order], buffers.positions, buffers.out_loc)
        got = FusedModel(model)(ForwardBatch(Phase.DECODE, *places, None, plan))
    close(got, want[order], 2 * limit_of(weight.dtype))
    close(world.pool.buffer, stored, limit_of(weight.dtype))


def enlarge_blocks(replace_by: Callable[[Any, str, Any], None]) -> None:
    """Large blocks: the interpreter takes as long as there are programs, however large they are."""
    real, choose = linear.choose_gemv_block, linear.choose_tiling

    def wide(*of: Any) -> tuple[int, ...] | None:
        block = real(*of)
        return None if block is None else (min(128, of[0] & -of[0]), *block[1:])

    def coarse(*of: Any, **how: Any) -> linear.Tiling | None:
        found = choose(*of, **how)
        return found and replace(found, bn=256, bk=512, splits=min(2, found.splits))

    replace_by(linear, "choose_gemv_block", wide)
    replace_by(linear, "choose_tiling", coarse)


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    enlarge_blocks(monkeypatch.setattr)
