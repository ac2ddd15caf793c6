"""Who may ask: the API key, checked before a body is read.

Generated from notebooks/12b_running.ipynb: edit there.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Coroutine

from fastapi import Request, Response
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer

from minisgl.server.http.errors import ApiError

BEARER = HTTPBearer(auto_error=False)


async def check_access(request: Request, api_key: str | None) -> None:
    """401 unless the key fits; without a configured key, any is welcome."""
    given = await BEARER(request)
    # Compared in constant time: how long a refusal takes must not tell how much was right.
    if api_key is not None and not (
        given and hmac.compare_digest(given.credentials.encode("latin-1"), api_key.encode())
    ):
        raise ApiError(401, "authorization: missing or wrong API key", code="invalid_api_key")


def keyed_route(api_key: str | None) -> type[APIRoute]:
    """A class for routes that want this key."""

    class KeyedRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[None, None, Response]]:
            handle = super().get_route_handler()

            async def checked(request: Request) -> Response:
                await check_access(request, api_key)
                coding = request.headers.get("content-encoding", "identity")
                if coding.lower() != "identity":
                    why = f"content-encoding: {coding!r:.80} is not supported, send the body plain"
                    raise ApiError(415, why, code="unsupported", param="content-encoding")
                return await handle(request)

            return checked

    return KeyedRoute
