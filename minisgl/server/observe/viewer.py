"""`GET /viewer`: the recording of a live server as a page.

Generated from notebooks/12e_operations.ipynb: edit there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import HTMLResponse
from starlette.concurrency import run_in_threadpool
from starlette.types import Receive, Scope, Send

from minisgl.server.http.access import check_access
from minisgl.viewer.page import page_of


def lock(route: Any, api_key: str | None) -> None:
    """Ask for the key before a route that needs none answers."""
    open_app = route.app

    async def keyed(scope: Scope, receive: Receive, send: Send) -> None:
        await check_access(Request(scope), api_key)
        await open_app(scope, receive, send)

    route.app = keyed


def add_viewer_route(app: FastAPI, recording: Path, api_key: str | None) -> None:
    """Add `GET /viewer`, the page of a recording that is being written, behind the key."""

    @app.get("/viewer", response_class=HTMLResponse)
    async def viewer() -> HTMLResponse:
        try:
            return HTMLResponse(await run_in_threadpool(page_of, recording))
        except ValueError as error:  # nothing was written yet
            raise HTTPException(503, f"no recording yet: {error}") from error

    lock(app.routes[-1], api_key)
