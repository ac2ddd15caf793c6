"""`GET /viewer`: the recording of a live server as a page.

Generated from notebooks/12e_operations.ipynb: edit there.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import HTMLResponse, Response

from minisgl.server.http.access import KEY_NAME, Access
from minisgl.server.http.errors import ApiError
from minisgl.server.http.hosts import is_loopback
from minisgl.server.http.schemas import SlicedResponse
from minisgl.viewer.page import page_in_process


class LivePage:
    """The page of a growing recording, made once and kept ten times as long as that took."""

    def __init__(self, recording: Path) -> None:
        self._recording, self._making = recording, asyncio.Lock()
        self._page, self._until = b"", 0.0

    async def read(self) -> bytes:
        async with self._making:
            if (start := time.monotonic()) >= self._until:
                self._page = await asyncio.to_thread(page_in_process, self._recording)
                end = time.monotonic()
                self._until = end + 10 * (end - start)
            return self._page


def add_viewer_route(app: FastAPI, recording: Path, access: Access) -> None:
    """Add `GET /viewer`, the page of a recording that is being written, for the operator."""
    live = LivePage(recording)

    @app.get("/viewer", response_class=HTMLResponse)
    async def viewer(request: Request) -> Response:
        passed_on = {"forwarded", "x-forwarded-for", "via"}.intersection(request.headers)
        foreign = passed_on or request.headers.get("sec-fetch-site") == "cross-site"
        near = request.client and is_loopback(request.client.host) and not foreign
        if request.scope.get(KEY_NAME) or not (access.keys or near):
            why = "authorization: the page shows all clients' answers and needs --api-key's key"
            raise ApiError(403, why, code="operator_only")
        try:
            page = SlicedResponse(await live.read(), media_type="text/html")
            page.common = True
            return page
        except ValueError as error:  # nothing was written yet
            raise HTTPException(503, f"no recording yet: {error}") from error

    access.lock(app.routes[-1])
