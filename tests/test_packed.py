"""Chapter 05h: weights of 16 and 8 bits for a CPU."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from minisgl import LLM, SamplingParams
from minisgl.config.model import ModelConfig
from minisgl.engine.memory import tensor_bytes
from minisgl.models import packed
from minisgl.models.packed import (
    HalfRows,
    HalfTable,
    Int8Rows,
    PackedWeight,
    fits,
    hadamard,
    mix,
    mixing_matrix,
    pack_model,
    packed_linear,
    packed_weight,
)
from minisgl.models.quantization import quantize_model
from minisgl.models.registry import build_model
from minisgl.models.weights import load_dummy_weights, load_weights
from minisgl.parallel.comm import SingleRank
from tests.checkpoints import make_checkpoint, make_fp8_checkpoints
from tests.dense import dense_batch

pytestmark = pytest.mark.skipif(not packed.has_kernels(), reason="FBGEMM is for x86 CPUs")

ALONE: Any = SingleRank()
PROMPTS = [[5, 9, 200, 31, 7, 7, 280, 14], list(range(40, 75))]


def open_model(
    folder: Path, quantization: str, comm: Any = ALONE, dtype: torch.dtype = torch.float32
) -> nn.Module:
    """The model of a folder with its weights, or one rank's part of it."""
    model = build_model(ModelConfig.from_path(folder), comm, dtype=dtype)
    quantize_model(model, quantization, folder)
    pack_model(model, quantization)
    load_weights(model, folder, comm, device="cpu", dtype=dtype, progress=False)
    return model


def logits(model: nn.Module) -> Tensor:
    with torch.inference_mode():
        found: Tensor = model(dense_batch(PROMPTS))
    return found


def rounded_rows(x: Tensor, steps: int) -> Tensor:
    """Round each row to integers of its own scale."""
    scale = x.abs().amax(1, keepdim=True).clamp(min=1e-30) / steps
    return (x / scale).round() * scale


def exact_int8(x: Tensor, weight: Tensor, steps: int) -> Tensor:
    """Compute the product of `Int8Rows` in float64."""
    matrix = mixing_matrix(weight.shape[1]).double()
    sides = (mix(x.double(), matrix), mix(weight.double(), matrix) / len(matrix))
    return rounded_rows(sides[0], steps) @ rounded_rows(sides[1], 127).T


shapes = st.tuples(st.integers(1, 40), st.integers(1, 130), st.integers(1, 33))


@settings(max_examples=40, deadline=None)
@given(shape=shapes, seed=st.integers(0, 999), outlier=st.sampled_from([1.0, 40.0, 3e3]))
def test_products_are_those_of_rounded_numbers(
    shape: tuple[int, int, int], seed: int, outlier: float
) -> None:
    n, k, m = shape
    gen = torch.Generator().manual_seed(seed)
    weight, x = torch.randn(n, k, generator=gen), torch.randn(m, k, generator=gen)
    x[0] *= outlier
    x[-1, :] = 0
    half = HalfRows(weight)(x)
    want = x.double() @ weight.half().double().T
    assert (half - want).abs().max() <= 1e-6 * k**0.5 * (1 + x.abs().max() * weight.abs().max())
    for steps in (63, 127):
        want = exact_int8(x, weight, steps)
        row = x.abs().amax(1, keepdim=True) * weight.abs().amax() * k
        if steps == 63 or torch.cpu._is_vnni_supported():
            gap = (Int8Rows(weight, steps)(x) - want).abs()
            # A number that lies between two integers may be rounded to either.
            assert (gap <= 2 * row / steps + 1e-6).all()
            assert gap.median() <= 1e-4 * (1 + want.abs().median())


@pytest.mark.parametrize("kind", [HalfRows, Int8Rows])
@pytest.mark.parametrize("k", [64, 96, 7, 576])
def test_a_row_is_independent_of_its_batch(kind: Any, k: int) -> None:
    """Bit for bit, also beside rows that are not finite."""
    gen = torch.Generator().manual_seed(0)
    product, x = kind(torch.randn(50, k, generator=gen)), torch.randn(37, k, generator=gen)
    whole = product(x)
    for rows in (1, 2, 5, 16, 31):
        assert torch.equal(product(x[:rows]), whole[:rows]), rows
    broken = x.clone()
    broken[3], broken[5, 0], broken[8, -1] = torch.nan, torch.inf, -torch.inf
    fine = [i for i in range(37) if i not in (3, 5, 8)]
    assert torch.equal(product(broken)[fine], whole[fine])
    assert not product(broken)[[3, 5, 8]].isfinite().any()
    assert product(x[:0]).shape == (0, 50)


def test_large_columns_do_not_set_the_scale_alone() -> None:
    """One input in 64 is 500 times larger; the other columns keep their bits."""
    gen = torch.Generator().manual_seed(0)
    weight, x = torch.randn(64, 256, generator=gen), torch.randn(8, 256, generator=gen)
    x[:, 7] *= 500
    quiet = weight.clone()
    quiet[:, 7] = 0  # only the usual columns count
    want = x @ quiet.T
    got, plain = Int8Rows(quiet)(x), rounded_rows(x, 127) @ rounded_rows(quiet, 127).T
    assert (got - want).norm() < 0.3 * (plain - want).norm()


@pytest.mark.parametrize("size", [1, 2, 8, 64])
def test_hadamard_undoes_itself(size: int) -> None:
    matrix = hadamard(size)
    assert torch.equal(matrix, matrix.T)
    assert torch.equal(matrix @ matrix, size * torch.eye(size))


@pytest.mark.parametrize(
    ("values", "fine"),
    [([0.0], True), ([65504.0], True), ([-65520.0], False), ([2.0**-14], True),
     ([2.0**-15], False), ([float("nan")], False), ([float("inf")], False)],
)  # fmt: skip
def test_range_of_float16(values: list[float], fine: bool) -> None:
    assert fits(torch.tensor(values), HalfRows.smallest, HalfRows.largest) is fine


@pytest.mark.parametrize("kind", ["fp16", "int8"])
@pytest.mark.parametrize("number", [1e32, -1e32, torch.nan])
def test_a_weight_out_of_range_stays_in_float32(
    kind: str, number: float, caplog: pytest.LogCaptureFixture
) -> None:
    weight, x = torch.randn(6, 8), torch.randn(3, 8)
    weight[2, 3] = number
    parameter = packed_weight((6, 8), kind)
    with caplog.at_level(logging.WARNING, "minisgl.weights"):
        parameter.pack(weight)
    assert f"[6, 8] is out of the range of {kind}" in caplog.text
    torch.testing.assert_close(
        packed_linear(x, parameter), F.linear(x, weight), equal_nan=True, rtol=0, atol=0
    )
    assert parameter.nbytes == weight.nbytes


CHECKPOINTS = {
    "llama": {"arch": "llama"},
    "biases and a tied head": {"arch": "qwen2", "tie_word_embeddings": True},
    "norms of heads": {"arch": "qwen3", "vocab_size": 321},
}


@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.parametrize(("kind", "bound"), [("fp16", 1e-3), ("int8", 0.06)])
def test_model_is_close_to_float32(tmp_path: Path, name: str, kind: str, bound: float) -> None:
    folder = make_checkpoint(tmp_path, dtype=torch.bfloat16, **CHECKPOINTS[name])
    ours, theirs = open_model(folder, kind), open_model(folder, "none")
    weights = {n: p for n, p in ours.named_parameters() if p.dim() == 2 and "norm" not in n}
    assert len(weights) > 8
    for path, weight in weights.items():
        assert isinstance(weight, HalfTable if "embed" in path else PackedWeight), path
    gap = (logits(ours) - logits(theirs)).norm() / logits(theirs).norm()
    assert 0 < gap < bound
    matrices = sum(p.nbytes for p in theirs.parameters() if p.dim() == 2)
    saved = tensor_bytes(theirs) - tensor_bytes(ours)
    assert saved > 0.3 * matrices  # a tied head is packed beside its table


@pytest.mark.parametrize("kind", ["fp16", "int8"])
def test_ranks_pack_their_parts(tmp_path: Path, kind: str) -> None:
    """Each rank's products are those of its rows or columns, of a vocabulary with padding."""
    folder = make_checkpoint(tmp_path, arch="qwen2", vocab_size=321, dtype=torch.bfloat16)
    x = torch.randn(3, 64)
    for rank in range(2):
        comm: Any = SimpleNamespace(rank=rank, size=2)
        plain = dict(open_model(folder, "none", comm).named_parameters())
        for name, weight in open_model(folder, kind, comm).named_parameters():
            if isinstance(weight, PackedWeight):
                x = torch.randn(3, weight.shape[1])
                want = F.linear(x, plain[name])
                gap = (packed_linear(x, weight) - want).norm() / want.norm()
                assert gap < (1e-3 if kind == "fp16" else 0.05), (rank, name)
            elif isinstance(weight, HalfTable):
                assert torch.equal(weight.float(), plain[name]), (rank, name)


def test_dummy_weights_are_packed(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, dtype=torch.bfloat16, tie_word_embeddings=True)
    model = build_model(ModelConfig.from_path(folder), ALONE, dtype=torch.float32)
    pack_model(model, "int8")
    load_dummy_weights(model, device="cpu", dtype=torch.float32)
    assert logits(model).isfinite().all()
    head, table = model.lm_head.weight, model.model.embed_tokens.weight
    x = torch.randn(2, 64)
    want = F.linear(x, table.float())
    assert (packed_linear(x, head) - want).norm() / want.norm() < 0.05


def test_a_table_that_does_not_fit_is_float32() -> None:
    table = packed.half_table((4, 2), None, "cpu")
    packed.fill_table(table, (slice(0, 2),), torch.tensor([[1.0, 2.0], [3.0, 1e5]]))
    assert table.dtype is torch.float32 and table[1, 1] == 1e5
    assert packed.lookup(torch.tensor([0]), table).dtype is torch.float32


REFUSED = [
    ("int8", {"dtype": torch.bfloat16}, "auto or none for dtype torch.bfloat16, got 'int8'"),
    ("fp16", {"device": "cuda"}, "auto, none or fp8 on a GPU, got 'fp16'"),
    ("int8", {"arch": "qwen3_moe"}, "auto, none or fp8 for a mixture of experts, got 'int8'"),
    ("int8", {"fp8": True}, "auto or none for a checkpoint in FP8, got 'int8'"),
]


@pytest.mark.parametrize(("kind", "case", "rule"), REFUSED)
def test_what_cannot_be_packed_is_refused(
    tmp_path: Path, kind: str, case: dict[str, Any], rule: str
) -> None:
    """By name; "auto" leaves such a model as it is."""
    if case.get("fp8"):
        folder, _ = make_fp8_checkpoints(tmp_path, "channel")
    else:
        folder = make_checkpoint(tmp_path, arch=case.get("arch", "qwen3"), dtype=torch.bfloat16)
    config = ModelConfig.from_path(folder)
    model = build_model(config, ALONE, dtype=case.get("dtype", torch.float32))
    quantize_model(model, kind, folder)
    with pytest.raises(ValueError, match=f"quantization: must be {rule}"):
        pack_model(model, kind, case.get("device", "cpu"))
    pack_model(model, "auto", case.get("device", "cpu"))
    assert not any(isinstance(p, PackedWeight) for p in model.parameters())


def test_other_cpus_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "has_kernels", lambda: False)
    folder = make_checkpoint(tmp_path, dtype=torch.bfloat16)
    model = build_model(ModelConfig.from_path(folder), ALONE, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"quantization: .*x86 CPU with AVX2, got 'fp16'"):
        pack_model(model, "fp16")
    pack_model(model, "auto")
    assert not any(isinstance(p, PackedWeight) for p in model.parameters())


@pytest.mark.parametrize(
    ("dtype", "small", "packs"),
    [(torch.bfloat16, 0, True), (torch.float32, 0, False), (torch.bfloat16, packed.SMALL, False)],
)
def test_auto_packs_where_it_gains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, small: int, packs: bool
) -> None:
    """Sixteen bits are packed as such; 32 bits stay, and so does a model that caches hold."""
    monkeypatch.setattr(packed, "SMALL", small)
    folder = make_checkpoint(tmp_path, dtype=dtype)
    with LLM(folder, device="cpu", num_pages=32) as llm:
        found = {type(p) for p in llm.scheduler.engine.model.parameters()}
        assert (PackedWeight in found) is packs


def test_engine_answers_as_float32_does(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, dtype=torch.bfloat16)
    greedy = SamplingParams(max_tokens=12, ignore_eos=True)
    answers = []
    for kind in ("fp16", "none"):
        with LLM(folder, device="cpu", num_pages=32, quantization=kind) as llm:
            answers.append([out["token_ids"] for out in llm.generate(PROMPTS, greedy)])
    assert answers[0] == answers[1]


@pytest.mark.parametrize(("dtype", "kind", "field"), [
    (torch.bfloat16, "none", "dtype"), (torch.float32, "fp8", "quantization"),
    (torch.float32, "auto", None),
])  # fmt: skip
def test_a_slow_choice_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype, kind: str, field: str | None,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    folder = make_checkpoint(tmp_path, dtype=torch.bfloat16)
    with caplog.at_level(logging.WARNING, "minisgl.weights"):
        open_model(folder, kind, dtype=dtype)
    found = [record.message.split(":")[0] for record in caplog.records]
    assert found == ([] if field is None else [field])
