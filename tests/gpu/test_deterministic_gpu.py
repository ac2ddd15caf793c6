"""Batch invariance on a GPU: compiled kernels, PyTorch's own row functions, and whole engines."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
pytest.importorskip("triton")

from minisgl.kernels.tiled_linear import tiled_linear
from minisgl.layers.invariant import linear, silu
from minisgl.llm import LLM
from tests.attention_worlds import Shape, assert_close, dense_oracle, make_world
from tests.checkpoints import make_checkpoint
from tests.test_deterministic import as_requests, bits, changes, pieces

ROWS = 300
DTYPES = [torch.bfloat16, torch.float16]


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    gen = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=gen, device="cuda").to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "sizes", [(4096, 1024), (1024, 3072), (1152, 896), (151936, 1024), (6144, 4096), (48, 80)]
)
def test_gemm(sizes: tuple[int, int], dtype: torch.dtype) -> None:
    n, k = sizes
    x, weight = normal(ROWS, k, dtype=dtype), normal(n, k, dtype=dtype, seed=1) / k**0.5
    bias = normal(n, dtype=dtype, seed=2)
    assert changes(lambda x: linear(x, weight, bias), x) == []
    want = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(linear(x, weight, bias).double(), want, rtol=2e-2, atol=2e-2)


def test_float32_is_refused() -> None:
    with pytest.raises(ValueError, match="dtype must be float16 or bfloat16"):
        tiled_linear(normal(1, 64, dtype=torch.float32), normal(64, 64, dtype=torch.float32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [64, 128, 896, 1024, 4096, 5120])
def test_functions_of_a_row(size: int, dtype: torch.dtype) -> None:
    """PyTorch's norms, with and without a weight, the activation, the log-softmax."""
    x, weight = normal(ROWS, size, dtype=dtype), normal(size, dtype=dtype, seed=1)
    assert changes(lambda x: F.rms_norm(x, (size,), weight, 1e-6), x) == []
    assert changes(lambda x: silu(x.chunk(2, -1)[0]), x) == []
    assert changes(lambda x: x.float().log_softmax(-1), x) == []
    heads = normal(ROWS, 12 * 128, dtype=dtype).view(ROWS, 12, 128)
    for count in (1, 2, 5, 10):  # a slice, as of queries and keys beside values
        assert changes(lambda x: F.rms_norm(x[:, :count], (128,), None, 1e-6), heads) == []


@pytest.mark.parametrize("vocab", [1792, 32000, 128256, 151936])
def test_log_probabilities(vocab: int) -> None:
    logits = normal(40, vocab, dtype=torch.bfloat16)
    assert changes(lambda x: x.float().log_softmax(-1), logits) == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim, group", [(64, 2), (128, 4), (128, 8), (256, 1)])
def test_attention(head_dim: int, group: int, dtype: torch.dtype) -> None:
    shape = Shape(
        lens=((0, 700), (0, 90), (0, 5), (0, 300)), kv_heads=2, group=group, page_size=16,
        head_dim=head_dim,
    )  # fmt: skip
    world = make_world(shape, dtype=dtype)
    whole = pieces(world, "triton", [700], 0)
    assert_close(whole, dense_oracle(world)[:700], 2e-2)
    for step, beside in ((1, 0), (1, 3), (37, 2), (256, 1)):
        cuts = [*range(step, 700, step), 700]
        assert torch.equal(pieces(world, "triton", cuts, beside), whole), (step, beside)


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("record", [0, 8])
def test_engine(arch: str, record: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Alone and eager, against any batch, with chunks, a cache, captured steps and overlap."""
    folder = make_checkpoint(
        tmp_path_factory.mktemp(arch), arch, seed=3, vocab_size=512, hidden_size=512,
        intermediate_size=1024, head_dim=64, num_attention_heads=8, max_position_embeddings=512,
        dtype=torch.bfloat16,
    )  # fmt: skip
    shapes = [(40 * (i % 3), 1 + 9 * i, 24, i % 2 * 1.0) for i in range(16)]
    prompts, params = as_requests(shapes)
    common = {"device": "cuda", "dtype": "bfloat16", "deterministic": True}
    with LLM(folder, cache_type="naive", overlap=False, cuda_graph_max_bs=0,
             num_pages=2000, **common) as llm:  # fmt: skip
        want = [bits(llm.generate([p], [s])[0]) for p, s in zip(prompts, params)]
    ways = [
        {"num_pages": 2000},
        {"num_pages": 2000, "max_extend_tokens": 33, "page_size": 4},
        {"num_pages": 130, "page_size": 4, "reserve_tokens": 1},
    ]
    for way in ways:
        with LLM(folder, cuda_graph_max_bs=record, **way, **common) as llm:  # type: ignore[arg-type]
            assert [bits(answer) for answer in llm.generate(prompts, params)] == want
            again = llm.generate(prompts[::-1], params[::-1])[::-1]
            assert [bits(answer) for answer in again] == want
