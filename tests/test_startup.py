"""Imports of each process: most of a start, so none loads a module that it does not use."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = {
    "fastapi", "httpx", "huggingface_hub", "jinja2", "llguidance", "prometheus_client",
    "prompt_toolkit", "safetensors", "tokenizers", "torch", "transformers", "uvicorn",
}  # fmt: skip
BUILD = "from minisgl.config.paths import resolve_model_path as path\n"
CASES = {
    "the API": (
        BUILD + "import minisgl.server.cli\n"
        "from minisgl.config.engine import ServerConfig\n"
        "from minisgl.server.http.settings import settings_for\n"
        "settings_for(ServerConfig(), path(None))",
        {"fastapi", "prometheus_client", "uvicorn"},
    ),
    "a text worker": (
        BUILD + "from minisgl.server.workers import text_process as worker\n"
        "worker.build_text_worker(worker.Tokenizer(path(None)), None, None, 4096)",
        {"jinja2", "tokenizers"},
    ),
    "the scheduler": (
        "import minisgl.server.workers.scheduler_process as worker\n"
        "from minisgl.config.engine import ServerConfig\n"
        "config, hold = ServerConfig(device='cpu', num_pages=300), worker.GrammarQueue()\n"
        "worker.build_scheduler(config, None, hold=hold)",
        {"jinja2", "llguidance", "safetensors", "tokenizers", "torch"},
    ),
    "a notebook": (
        "from minisgl import LLM\nLLM(device='cpu', num_pages=300)",
        {"jinja2", "llguidance", "safetensors", "tokenizers", "torch"},
    ),
    "the benchmarks, one of which compares with transformers": (
        "import minisgl.benchmark.__main__",
        HEAVY - {"fastapi", "prometheus_client", "prompt_toolkit", "uvicorn"},
    ),
    "a worker of the command minisgl": ("import minisgl.__main__", set()),
}


@pytest.mark.parametrize("process", CASES)
def test_a_process_imports_only_what_it_uses(process: str) -> None:
    code, allowed = CASES[process]
    code += f"\nimport sys; print(*sorted({HEAVY!r} & sys.modules.keys()))"
    run = [sys.executable, "-c", code]
    loaded = set(subprocess.run(run, check=True, capture_output=True, text=True).stdout.split())
    assert loaded <= allowed, f"{process} imports {', '.join(sorted(loaded - allowed))}"
