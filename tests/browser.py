"""A real browser for tests of pages: Chromium, driven by playwright, with axe-core in it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Start Chromium from /usr/bin/chromium or $CHROMIUM; skip the test without it."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if shutil.which(CHROMIUM) is None:
        pytest.skip(f"no Chromium at {CHROMIUM}")
    with api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield running
        running.close()


def faults(page: Any) -> list[tuple[str, str]]:
    """Return the serious and critical violations of axe-core, each with an element."""
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="axe is not installed"
    )
    page.add_style_tag(content="* { transition: none !important; }")  # colours in between count
    found = axe.Axe().run(page, options={"resultTypes": ["violations"]}).response["violations"]
    return [
        (f"{one['impact']} {one['id']}: {one['help']}", one["nodes"][0]["html"])
        for one in found
        if one["impact"] in ("serious", "critical")
    ]


def cpu_clock(page: Any) -> Callable[[], float]:
    """Return a clock of the CPU time of a page's main thread, in ms: a busy machine adds none."""
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})

    def read() -> float:
        metrics = session.send("Performance.getMetrics")["metrics"]
        return 1e3 * float(next(one["value"] for one in metrics if one["name"] == "ThreadTime"))

    return read


def whole_cpu_clock(browser: Any) -> Callable[[], float]:
    """Return a clock of the CPU time of all threads from a script to its pixels, in ms."""
    session = browser.new_browser_cdp_session()

    def read() -> float:
        processes = session.send("SystemInfo.getProcessInfo")["processInfo"]
        return 1e3 * sum(one["cpuTime"] for one in processes if one["type"] in ("renderer", "GPU"))

    return read
