"""FP8 weights on a GPU, against plain PyTorch and end to end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
pytest.importorskip("triton")

from minisgl import LLM, SamplingParams
from minisgl.attention.fused_backend import FusedBackend
from minisgl.attention.metadata import DecodeBuffers
from minisgl.attention.torch_backend import TorchBackend
from minisgl.attention.triton_backend import TritonBackend
from minisgl.fp8 import FP8, Fp8Weight, fp8_weight, quantize
from minisgl.kernels import fp8_linear, moe
from minisgl.kernels import linear as kernels
from minisgl.kernels.linear import FEW_ROWS
from minisgl.kernels.norm import add_norm, gemm_input
from minisgl.kernels.scaled_mm import quantize_rows
from minisgl.kernels.store_kv import store_kv
from minisgl.layers.moe import grouped_experts, route
from tests.checkpoints import make_fp8_checkpoints
from tests.fused_cases import (
    World,
    check_eight_bits,
    check_model,
    check_rotate,
    close,
    small_model,
)
from tests.moe_cases import skewed_logits

BF16 = torch.bfloat16
if torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9):
    pytest.skip("float8 needs compute capability 8.9", allow_module_level=True)
WEIGHTS = [(6144, 4096), (4096, 12288), (5120, 17408), (1024, 2048)]
GROUPS = [0, 128]  # one scale a row, or one for each 128 columns


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = BF16) -> torch.Tensor:
    gen = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=gen, device="cuda").to(dtype)


def random_weight(n: int, k: int, group: int) -> Fp8Weight:
    weight = fp8_weight(n, k, device="cuda", group=group)
    weight.copy_((normal(n, k, seed=1, dtype=torch.float32) * 50).to(FP8))
    weight.scale.copy_(normal(*weight.scale.shape, seed=2).float().abs() * 0.001 + 0.0005)
    return weight


def silu_mul(y: torch.Tensor) -> torch.Tensor:
    gate, up = y.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


@pytest.mark.parametrize("size", WEIGHTS)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 16, 17, 33, 64, 65, 128, 200, 256, 300])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_gemms(rows: int, group: int, size: tuple[int, int], dtype: torch.dtype) -> None:
    """Where a kernel widens, only the result is rounded; where both sides have eight bits, a number
    is off by 2.6 % on average, and a gate multiplies two such sums.
    """
    n, k = size
    weight, x, bias = random_weight(n, k, group), normal(rows, k, dtype=dtype), normal(n).to(dtype)
    library = fp8_linear.has_scaled_mm(weight, dtype)
    widened = 5e-3 if dtype is BF16 else 1e-3
    limit = 5e-2 if library and rows > fp8_linear.WIDENED else widened
    exact = x.double() @ weight.dequantized(torch.float64).T
    close(kernels.linear(x, weight, bias), exact + bias, limit)
    close(kernels.gated_linear(x, weight), silu_mul(exact), limit)
    limit = 5e-2 if library and rows > (FEW_ROWS if group else fp8_linear.WIDENED) else widened
    close(kernels.split_k_linear(x, weight).sum(0), exact, limit)


@pytest.mark.parametrize("size", WEIGHTS)
@pytest.mark.parametrize("rows", [17, 64, 65, 128, 200, 256])
def test_eight_bits_on_both_sides(rows: int, size: tuple[int, int]) -> None:
    """Beside the sum of what both factors stand for."""
    n, k = size
    weight, x = random_weight(n, k, 0), normal(rows, k)
    values = quantize_rows(x, k)
    exact = (values.double() * values.scale)[:rows] @ weight.dequantized(torch.float64).T
    close(kernels.split_k_linear(x, weight).sum(0), exact, 1e-2)
    close(kernels.gated_linear(x, weight), silu_mul(exact), 1e-2)


@pytest.mark.parametrize("size", WEIGHTS)
@pytest.mark.parametrize("rows", [17, 64, 65, 128, 200, 256])
def test_eight_bits_on_both_sides_in_a_replay(rows: int, size: tuple[int, int]) -> None:
    """Twice the same; a test of its own, as memcheck, without torch's cache, cannot record."""
    weight, x = random_weight(*size, 0), normal(rows, size[1])
    found = kernels.split_k_linear(x, weight)
    graph, static = torch.cuda.CUDAGraph(), torch.zeros_like(x)
    with torch.cuda.graph(graph):
        again = kernels.split_k_linear(static, weight)
    static.copy_(x)
    graph.replay()
    assert torch.equal(again, found)


@pytest.mark.parametrize("size", WEIGHTS)
@pytest.mark.parametrize("group", GROUPS)
def test_one_row(group: int, size: tuple[int, int]) -> None:
    n, k = size
    first, weight = random_weight(k, 1024, group), random_weight(n, k, group)
    x, residual, norm = normal(1, 1024), normal(1, k), normal(k)
    made = kernels.gemv_add_norm(x, first, residual, norm)
    assert made is not None
    total = residual.double() + x.double() @ first.dequantized(torch.float64).T
    close(made.total, total, 1e-2)
    y = torch.nn.functional.rms_norm(total, (k,), norm.double(), 1e-6)
    y = y @ weight.dequantized(torch.float64).T
    got = kernels.gemv(made, weight, eps=1e-6)
    assert got is not None
    close(got, y, 1e-2)
    got = kernels.gemv(made, weight, eps=1e-6, gated=True)
    assert got is not None
    close(got, silu_mul(y), 1e-2)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize(("n", "kind"), [(1, "even"), (7, "hot"), (64, "even"), (700, "empty")])
def test_experts(n: int, kind: str, group: int) -> None:
    """Sixteen experts of Qwen3-30B-A3B, against the dequantized weights."""
    each = (1536, 2048), (2048, 768)
    made = [[random_weight(*size, group) for _ in range(16)] for size in each]
    packed = []
    for parts in made:
        packed.append(fp8_weight(16, *parts[0].shape, device="cuda", group=group))
        for i, part in enumerate(parts):
            part.scale *= 1 + i / 8
            packed[-1].data[i].copy_(part)
            packed[-1].scale[i].copy_(part.scale * 0.02)
    x, router = normal(n, 2048), skewed_logits(n, 16, kind, n).cuda()
    got = moe.expert_sum(x, router[None], *packed, 4, True)
    wide = [weight.dequantized(torch.float32) for weight in packed]
    close(got, grouped_experts(x.float(), *route(router, 4, True), *wide), 2e-2)


@pytest.mark.parametrize("group", [1024, 128])
def test_rows_are_quantized_as_weights_are(group: int) -> None:
    x = normal(70, 1024)
    x[3] = 0
    values, (expected, expected_scale) = quantize_rows(x, group), quantize(x, group)
    torch.testing.assert_close(values.scale[:70], expected_scale)
    close(values[:70].float(), expected.float(), 1e-2)  # a division may round to the neighbour


@pytest.mark.parametrize("rows", [17, 65, 200, 1000])
def test_rows_are_quantized_where_they_are_made(rows: int) -> None:
    """Behind a norm and a gate of Qwen3-14B, as by kernels of their own."""
    gate_up, down = random_weight(34816, 5120, 0), random_weight(5120, 17408, 0)
    gate_up.scale *= 0.01
    parts, residual, norm = normal(3, rows, 5120), normal(rows, 5120, seed=3), normal(5120)
    x, _ = add_norm(parts, residual, norm, 1e-6, gemm_input(gate_up, residual))
    wide, _ = add_norm(parts, residual, norm, 1e-6)
    apart = quantize_rows(wide, 5120)
    assert x.dtype is FP8
    close(x[:rows].float(), apart[:rows].float(), 1e-3)  # a sum may begin at another end
    found = kernels.mlp(down, x, gate_up).sum(0)
    again = kernels.split_k_linear(kernels.gated_linear(wide, gate_up), down).sum(0)
    close(found, again, 5e-3)


@pytest.mark.parametrize("scales", ["channel", "block"])
@pytest.mark.parametrize(
    ("lens", "extend"), [([70], None), ([300, 5, 64], None), ([40, 9], [10, 9])]
)
def test_fused_model_equals_the_plain_one(
    scales: str, lens: list[int], extend: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With activations in sixteen bits, as the plain model has them."""
    monkeypatch.setattr(fp8_linear, "has_scaled_mm", lambda weight, dtype: False)
    check_model(small_model("qwen3", "cuda", BF16, scales=scales), lens, extend)


@pytest.mark.parametrize("backend", [FusedBackend, TritonBackend, TorchBackend])
@pytest.mark.parametrize(
    ("lens", "extend"), [([1], None), ([700, 3, 64, 2000], None), ([300, 5, 64], [20, 5, 1])]
)
@pytest.mark.parametrize(
    ("qo", "kv", "dim"), [(32, 8, 128), (16, 8, 128), (8, 1, 64), (40, 8, 128)]
)
def test_attention_over_eight_bits(
    backend: Any, lens: list[int], extend: list[int] | None, qo: int, kv: int, dim: int
) -> None:
    if backend is FusedBackend and extend is not None:
        pytest.skip("it only decodes")
    where = {"page_size": 16, "device": "cuda", "dtype": BF16}
    check_eight_bits(backend, lens, extend, 1e-2, qo=qo, kv=kv, dim=dim, **where)


@pytest.mark.parametrize("heads", [(16, 8), (28, 4), (5, 1)])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_rotate_and_store_eight_bits(heads: tuple[int, int], dtype: torch.dtype) -> None:
    where = {"page_size": 16, "device": "cuda", "dtype": dtype}
    check_rotate([300, 1, 77], qo=heads[0], kv=heads[1], dim=128, normed=True, limit=1e-2, **where)


@pytest.mark.parametrize("kv", [8, 1])
def test_store_kv_of_eight_bits(kv: int) -> None:
    """The kernel against the pool's own: a division may round to the neighbour."""
    world = World([300, 9], kv=kv, dim=128, eight_bits=True, device="cuda")
    (k, v), slots = normal(2, 4, kv, 128), torch.tensor([3, 250, 14, 0], device="cuda")
    world.pool.store_kv(k, v, slots, 0)
    want = world.pool.buffer.float()
    world.pool.buffer.zero_()
    pool = world.pool
    store_kv(k, v, pool.k_cache(0), pool.v_cache(0), slots, pool.scales(0))
    got = pool.buffer.float().flatten(2, 3)[:, :, slots]
    close(got, want.flatten(2, 3)[:, :, slots], 1e-2)
    assert int(pool.buffer.float().any(-1).sum()) == 2 * 4 * kv


@pytest.mark.parametrize(("lens", "extend"), [([300, 5, 64], None), ([40, 9], [10, 9])])
def test_fused_model_over_eight_bits(lens: list[int], extend: list[int] | None) -> None:
    """Every layer's scales reach its kernels; what differs in its last bit may be stored apart."""
    check_model(small_model("qwen3", "cuda", BF16), lens, extend, 5e-2, eight_bits=True)


@pytest.mark.parametrize("backend", [FusedBackend, TritonBackend])
def test_a_replay_reads_the_scales_of_now(backend: Any) -> None:
    """A captured step stores their addresses, not their values."""
    world = World(
        [70, 300], kv=8, dim=128, qo=16, page_size=16, device="cuda", dtype=BF16, eight_bits=True
    )
    q, k, v = (world.random(2, h, 128, seed=h) for h in (16, 8, 8))
    positions, out_loc = world.places()
    rows = torch.tensor(world.rows, device="cuda")
    plan = world.backend(backend).graph_plan(2, DecodeBuffers(rows, positions, out_loc))
    plan.run(q, k, v, 0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = plan.run(q, k, v, 0)
    found = []
    for factor in (1.0, 1.5):
        world.pool.scales(0).mul_(factor)
        graph.replay()
        found.append(recorded.clone())
        assert torch.equal(found[-1], plan.run(q, k, v, 0))
    assert not torch.equal(*found)


def test_many_requests_over_eight_bits() -> None:
    """More programs than the GPU runs at once: the smallest tiles."""
    lens = [100 + 7 * i for i in range(128)]
    where = {"page_size": 16, "device": "cuda", "dtype": BF16}
    check_eight_bits(FusedBackend, lens, None, 1e-2, qo=32, kv=8, dim=128, **where)


SUMS = [[{"role": "user", "content": f"What is {a} + {b}?"}] for a in (7, 31, 208) for b in (5, 44)]
GREEDY = SamplingParams(max_tokens=40)


def texts(**fields: Any) -> list[str]:
    with LLM(device="cuda", num_pages=512, **fields) as llm:
        return [answer["text"] for answer in llm.chat(SUMS, GREEDY)]


@pytest.mark.parametrize(
    "how",
    [
        {"quantization": "fp8"},
        {"kv_cache_dtype": "fp8"},
        {"quantization": "fp8", "kv_cache_dtype": "fp8"},
        {"quantization": "fp8", "kv_cache_dtype": "fp8", "attention_backend": "triton"},
        {"quantization": "fp8", "kv_cache_dtype": "fp8", "num_speculative_tokens": 3},
    ],
)
def test_replay_answers_like_eager(how: dict[str, Any]) -> None:
    found = texts(cuda_graph_max_bs=8, **how)
    assert found == texts(cuda_graph_max_bs=0, **how)
    expected = [a + b for a in (7, 31, 208) for b in (5, 44)]
    right = [str(total) in text for total, text in zip(expected, found, strict=True)]
    assert sum(right) >= 5, found


@pytest.mark.parametrize("layout", ["block", "channel"])
def test_checkpoints_of_eight_bits(tmp_path: Path, layout: str) -> None:
    """Log probabilities of the first token, beside the dequantized checkpoint's."""
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 64}
    folders = make_fp8_checkpoints(tmp_path, layout, **sizes)
    first = SamplingParams(max_tokens=1, logprobs=0, ignore_eos=True)
    found = []
    for folder in folders:
        with LLM(folder, device="cuda", num_pages=64) as llm:
            answer = llm.generate([[5, 9, 200, 31, 7, 7, 280, 14]], first)[0]
            found.append(answer["logprobs"][0]["logprob"])
    assert abs(found[0] - found[1]) < 0.1
