"""Bugs of GGUF files: header, config, tokenizer, tensors and their folder."""

from __future__ import annotations

from tests.mutations import Mutation

T = "tests/test_gguf.py::"
HEADER = "minisgl.models.gguf.header"
CONFIG = "minisgl.models.gguf.config"
VOCABULARY = "minisgl.models.gguf.vocabulary"
TENSORS = "minisgl.models.gguf.tensors"
FOLDER = "minisgl.models.gguf.folder"

MUTATIONS = [
    Mutation(
        "gguf: a count is believed",
        HEADER,
        "if count * smallest > len(self.data) - self.at:",
        "if False:",
        T + "test_hostile_headers_are_one_error_and_take_no_memory",
    ),
    Mutation(
        "gguf: a tensor may end behind the file",
        HEADER,
        "if tensor.start % alignment or start + size > len(self.data):",
        "if tensor.start % alignment:",
        T + "test_hostile_tensors",
    ),
    Mutation(
        "gguf: tensors may share bytes",
        HEADER,
        "if settled.start < end:",
        "if False:",
        T + "test_tensors_that_share_bytes_are_refused",
    ),
    Mutation(
        "gguf: a pipe is waited for",
        HEADER,
        "if path.exists() and not path.is_file():",
        "if False:",
        T + "test_what_is_no_regular_file_is_refused_at_once",
    ),
    Mutation(
        "gguf: queries and keys stay in llama.cpp's order",
        TENSORS,
        'turned = arch == "llama" and',
        'turned = arch == "" and',
        T + "test_rows_of_a_llama_are_put_back",
    ),
    Mutation(
        "gguf: rows of all architectures are moved",
        TENSORS,
        'turned = arch == "llama" and',
        "turned = bool(arch) and",
        T + "test_every_family_on_every_rank",
    ),
    Mutation(
        "gguf: each expert is the first",
        TENSORS,
        "first = 0 if expert is None else expert * shape[0]",
        "first = 0",
        T + "test_every_family_on_every_rank",
    ),
    Mutation(
        "gguf: sizes are believed",
        CONFIG,
        "def check_sizes(header: Header, found: dict[str, Any]) -> None:\n",
        "def check_sizes(header: Header, found: dict[str, Any]) -> None:\n    return\n",
        T + "test_fields_are_refused_by_name",
    ),
    Mutation(
        "gguf: fields that are not computed are ignored",
        CONFIG,
        "if name not in known:",
        "if False:",
        T + "test_fields_are_refused_by_name",
    ),
    Mutation(
        "gguf: any divisors are those of Llama 3",
        CONFIG,
        "if not np.allclose(divisors, llama3_divisors(head_dim, base, factor), rtol=1e-4):",
        "if False:",
        T + "test_divisors_of_another_formula_are_refused",
    ),
    Mutation(
        "gguf: SmolLM's digits stay together",
        VOCABULARY,
        'elif pre == "smollm":',
        "elif False:",
        T + "test_tokens_equal_those_of_transformers",
    ),
    Mutation(
        "gguf: a file that changed keeps its folder",
        FOLDER,
        "\\0{state.st_mtime_ns}",
        "",
        T + "test_folder_is_written_once_and_again_for_another_file",
    ),
]
