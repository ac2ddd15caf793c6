"""One server for all clients, with the model that the package ships."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from minisgl.config.paths import resolve_model_path
from tests.serving import Live
from tests.test_tools import HERMES_TEMPLATE, save_model

ASK, ANSWER = "What is 12 + 30?", "12 + 30 = 42"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    with Live(resolve_model_path(None), num_pages=1024, served_model_name="tiny") as live:
        yield f"{live.url}/v1"
        live.assert_pages_home()


@pytest.fixture(scope="session")
def tools_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A random model whose template has tools: it calls because `tool_choice` requires it."""
    folder = save_model(tmp_path_factory.mktemp("tools"), HERMES_TEMPLATE)
    with Live(folder, num_pages=4096, served_model_name="tiny") as live:
        yield f"{live.url}/v1"
        live.assert_pages_home()
