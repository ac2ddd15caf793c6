"""Settings of all tests, of those in this folder and of the chapters that nbval runs.

pytest reads a `conftest.py` only for files beside or below it, so `notebooks/` has one that
takes over what is here.
"""

from __future__ import annotations

import os
from pathlib import Path

import build  # notebooks/build.py
import pytest
from hypothesis import HealthCheck, Phase, settings

GPU = build.has_gpu()
# Before anything imports torch or triton: threads, no network, Triton's interpreter on a CPU.
build.run_environment(Path(__file__).resolve().parents[1], GPU)

# A busy machine is slow, and that is no fault of a test.
settings.register_profile(
    "book", deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip
# A mutated package must fail a test; there is no need to find the smallest example of it.
settings.register_profile(
    "mutation", settings.get_profile("book"), phases=[Phase.explicit, Phase.generate]
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "book"))


def pytest_configure(config: pytest.Config) -> None:
    """Name our markers, and find nbval's rules from any working directory."""
    config.addinivalue_line("markers", "gpu: needs an NVIDIA GPU, skipped where there is none")
    config.addinivalue_line("markers", "clock: has deadlines in real time; may try three times")
    rules = getattr(config.option, "nbval_sanitize_with", None)
    if rules:
        config.option.nbval_sanitize_with = str(config.rootpath / rules)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu`, and cells of a chapter tagged so, on a machine without a GPU.

    Tests marked `clock` are run again when they fail: the machine may have been busy with something
    else. The summary says which (R).
    """
    skip = pytest.mark.skip(reason="no GPU")
    for item in items:
        if item.get_closest_marker("clock"):
            item.add_marker(pytest.mark.flaky(reruns=2))
        tags = getattr(item, "cell", {}).get("metadata", {}).get("tags", [])
        if not GPU and ("gpu" in tags or item.get_closest_marker("gpu")):
            item.add_marker(skip)
