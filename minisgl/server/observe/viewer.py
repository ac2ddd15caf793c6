"""`GET /viewer`: the recording of a live server as a page.

Generated from notebooks/12e_operations.ipynb: edit there.
"""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI, HTTPException
from fastapi.responses import HTMLResponse
from starlette.concurrency import run_in_threadpool

from minisgl.server.http.access import Access
from minisgl.viewer.page import page_of


def add_viewer_route(app: FastAPI, recording: Path, access: Access) -> None:
    """Add `GET /viewer`, the page of a recording that is being written, behind the key."""

    @app.get("/viewer", response_class=HTMLResponse)
    async def viewer() -> HTMLResponse:
        try:
            return HTMLResponse(await run_in_threadpool(page_of, recording))
        except ValueError as error:  # nothing was written yet
            raise HTTPException(503, f"no recording yet: {error}") from error

    access.lock(app.routes[-1])
