"""The built site in a real browser: accessibility, weight, first paint, no request to elsewhere.

The site is in $MINISGL_SITE, or in book/_build/html; the tests are skipped where there is none.
"""

from __future__ import annotations

import functools
import http.server
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser import cpu_clock, faults

ROOT = Path(__file__).resolve().parents[1]
SITE = Path(os.environ.get("MINISGL_SITE", ROOT / "book/_build/html"))
PAGES = ["intro.html", "notebooks/03_radix_cache.html", "notebooks/00_tour.html"]
FIRST_LOAD = 2 << 20  # bytes
FIRST_PAINT_MS = 2000

pytestmark = pytest.mark.skipif(not (SITE / "intro.html").exists(), reason=f"no site at {SITE}")


class Files(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        """Print nothing."""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    handler = functools.partial(Files, directory=str(SITE))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("path", PAGES)
def test_axe_finds_no_fault(browser: Any, address: str, path: str, scheme: str) -> None:
    page = browser.new_page(color_scheme=scheme)
    page.goto(address + path, wait_until="load")
    assert page.get_attribute("html", "data-theme") == scheme
    assert faults(page) == []
    page.close()


@pytest.mark.parametrize("path", PAGES)
def test_first_visit_is_light_and_asks_nobody_else(browser: Any, address: str, path: str) -> None:
    """First paint within two seconds: of CPU time, so that a busy machine does not fail it."""
    page = browser.new_context().new_page()
    cpu_ms = cpu_clock(page)
    asked: list[Any] = []
    page.on("requestfinished", lambda request: asked.append((request.url, request.sizes())))
    page.on("requestfailed", lambda request: asked.append((request.url, {})))
    page.goto(address + path, wait_until="load")
    page.wait_for_function("performance.getEntriesByName('first-contentful-paint').length > 0")
    painted = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    total = sum(sizes.get("responseBodySize", 0) for _, sizes in asked)
    cpu = cpu_ms()
    print(f"{path}: {total / 1e6:.2f} MB in {len(asked)} requests, first paint after "
          f"{painted:.0f} ms, {cpu:.0f} ms of CPU until it is loaded")  # fmt: skip
    assert [url for url, _ in asked if not url.startswith((address, "data:", "about:"))] == []
    assert [url for url, sizes in asked if not sizes] == []
    assert total < FIRST_LOAD and cpu < FIRST_PAINT_MS
    page.context.close()


@pytest.mark.parametrize("path", PAGES)
def test_no_page_is_wider_than_a_phone(browser: Any, address: str, path: str) -> None:
    page = browser.new_page(viewport={"width": 420, "height": 800})
    page.goto(address + path, wait_until="load")
    assert page.evaluate("document.documentElement.scrollWidth") <= 420
    page.close()
