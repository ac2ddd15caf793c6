"""Clients that people use, where they are installed; the embedded model answers them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from minisgl.config.paths import resolve_model_path
from tests.serving import Live

ASK, ANSWER = "What is 12 + 30?", "12 + 30 = 42"

pytestmark = pytest.mark.clock


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with Live(resolve_model_path(None), num_page_override=1024, served_model_name="tiny") as live:
        yield f"{live.url}/v1"
        live.assert_pages_home()


def test_langchain(url: str) -> None:
    langchain = pytest.importorskip("langchain_openai")
    chat = langchain.ChatOpenAI(
        base_url=url, api_key="x", model="tiny", temperature=0, max_tokens=16
    )
    whole = chat.invoke(ASK)
    assert whole.content == ANSWER and whole.usage_metadata["total_tokens"] > 16
    assert "".join(chunk.content for chunk in chat.stream(ASK)) == ANSWER
    assert [reply.content for reply in chat.batch([ASK, ASK])] == [ANSWER, ANSWER]
    assert chat.invoke(ASK, stop=["="]).content == ANSWER.split("=")[0]
    told = chat.bind(logprobs=True, top_logprobs=2).invoke(ASK).response_metadata["logprobs"]
    assert "".join(entry["token"] for entry in told["content"]) == ANSWER
    plain = langchain.OpenAI(base_url=url, api_key="x", model="tiny", temperature=0, max_tokens=5)
    assert plain.invoke("Once upon a time")


def test_litellm(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm = pytest.importorskip("litellm")
    where = {"model": "openai/tiny", "api_base": url, "api_key": "x"}
    ask = {"messages": [{"role": "user", "content": ASK}], "max_tokens": 16, "temperature": 0}
    assert litellm.completion(**where, **ask).choices[0].message.content == ANSWER
    chunks = litellm.completion(**where, **ask, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**where, messages=[{"role": "user", "content": "and " * 5000}])


def test_llm(url: str, tmp_path: Path) -> None:
    if find_spec("llm") is None:
        pytest.skip("llm is not installed")
    models = f"- model_id: here\n  model_name: tiny\n  api_base: {url}\n"
    (tmp_path / "extra-openai-models.yaml").write_text(models)
    for flags in ([], ["--no-stream"]):
        done = subprocess.run(
            [sys.executable, "-m", "llm", "--key", "x", "-m", "here", *flags, ASK],
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, "LLM_USER_PATH": str(tmp_path)},
        )
        assert done.returncode == 0 and done.stdout.strip() == ANSWER, done.stderr
