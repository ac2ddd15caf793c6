"""openai for Node and Vercel's AI SDK. MINISGL_NODE_MODULES names a folder that has them:

npm install openai ai @ai-sdk/openai @ai-sdk/openai-compatible zod
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

MODULES = os.environ.get("MINISGL_NODE_MODULES", "")


@pytest.mark.skipif(not MODULES, reason="MINISGL_NODE_MODULES is not set")
@pytest.mark.parametrize("which", ["openai", "aiSdk", "aiSdkTools"])
def test_node(request: pytest.FixtureRequest, tmp_path: Path, which: str) -> None:
    url = request.getfixturevalue("tools_url" if which == "aiSdkTools" else "url")
    script = shutil.copy(Path(__file__).parent / "node.mjs", tmp_path)
    (tmp_path / "node_modules").symlink_to(Path(MODULES).resolve())
    done = subprocess.run(["node", script, url, which], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
