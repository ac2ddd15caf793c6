"""Access control: API keys, checked before a body is read, and pages of other sites.

Generated from notebooks/12ba_hard_to_hurt.ipynb: edit there.
"""

from __future__ import annotations

import hmac
import ipaddress
import socket
import sys
from collections.abc import Callable, Collection, Coroutine, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from minisgl.config.flags import KEY_VARIABLE
from minisgl.server.http.bodies import SIDE, BodyReader, ReadRequest, SideThread
from minisgl.server.http.errors import ApiError
from minisgl.server.http.hosts import host_name, is_address, is_loopback
from minisgl.server.http.keys import read_keys
from minisgl.server.http.settings import ApiSettings

BEARER = HTTPBearer(auto_error=False)
KEY_NAME = "minisgl.key"  # in an ASGI scope: the name of the matching key


class Access:
    """API keys by name; that of `--api-key` has an empty name. Without keys, access is open."""

    def __init__(self, keys: Mapping[str, str]) -> None:
        self.keys = dict(keys)

    async def check(self, request: Request) -> None:
        """Raise a 401 unless one of the keys matches; store the name of that key."""
        given = await BEARER(request)
        fits = None if self.keys else ""
        for name, key in self.keys.items():  # compare with all of them, each in constant time
            credentials = given.credentials.encode("latin-1") if given else b""
            if hmac.compare_digest(credentials, key.encode()):
                fits = name
        if fits is None:
            raise ApiError(401, "authorization: missing or wrong API key", code="invalid_api_key")
        request.scope[KEY_NAME] = fits

    def lock(self, route: Any) -> None:
        """Require a key on a route that otherwise needs none."""
        open_app = route.app

        async def keyed(scope: Scope, receive: Receive, send: Send) -> None:
            await self.check(Request(scope))
            await open_app(scope, receive, send)

        route.app = keyed


SITE = 48  # bits of an IPv6 address: all below may belong to one customer, below 64 to one host


@lru_cache(256)  # a proxy's header may hold anything
def network_of(host: str, bits: int = SITE) -> str:
    """Return an address, of IPv6 the network of its first `bits`."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address):
        return str(address.ipv4_mapped or ipaddress.ip_network((int(address), bits), False))
    return host


def client_of(request: Request, bits: int = SITE) -> str:
    """Return the client to charge for a request: its named key, or else its peer's address."""
    if name := request.scope.get(KEY_NAME):
        return f"key {name}"
    return "local" if request.client is None else f"address {network_of(request.client.host, bits)}"


def keyed_route(access: Access, side: SideThread) -> type[APIRoute]:
    """Return a route class that checks the key, then reads the body within bounds."""

    class KeyedRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[None, None, Response]]:
            handle, field = super().get_route_handler(), self.body_field
            model: Any = field.field_info.annotation if field else None
            reader = BodyReader(model) if model else None

            async def checked(request: Request) -> Response:
                await access.check(request)
                request.scope[SIDE] = partial(side.run, client_of(request))
                coding = request.headers.get("content-encoding", "identity")
                if coding.lower() != "identity":
                    why = f"content-encoding: {coding!r:.80} is not supported, send the body plain"
                    raise ApiError(415, why, code="unsupported", param="content-encoding")
                if reader is not None:
                    request = ReadRequest(request, reader)
                return await handle(request)

            return checked

    return KeyedRoute


def warn_if_open(host: str, keys: Mapping[str, str], policy: str = "fair") -> None:
    """Warn if the whole network may use the server, or one client can stop the others."""
    if not keys and not is_loopback(host):
        why = f"without {KEY_VARIABLE}: everyone who reaches this machine may use it"
        print(f"minisgl: warning: listening on {host} {why}", file=sys.stderr, flush=True)
    if policy == "fcfs" and (len(keys) > 1 or not is_loopback(host)):
        why = "one client can stop all others; use fair for several clients"
        print(f"minisgl: warning: --schedule-policy fcfs: {why}", file=sys.stderr, flush=True)


class TrustedHosts:
    """Rejects requests from pages of other sites with a 403; `names` and loopback are allowed."""

    def __init__(self, app: ASGIApp, names: Collection[str]) -> None:
        self._app, self._names = app, frozenset(names)

    def foreign(self, headers: Headers) -> ApiError | None:
        """Return the error for a request whose `Host` or `Origin` is not ours, or None."""
        given = [(name, value) for name in ("host", "origin") for value in headers.getlist(name)]
        if len(given) > 3:  # that of an absolute target counts as one (RFC 9112)
            return ApiError(400, f"host, origin: {len(given)} lines", code="too_many_hosts")
        for name, value in given:
            host, asks = host_name(value), name == "origin"
            if not (is_loopback(host) or host in self._names or (is_address(host) and not asks)):
                why = f"{name}: {value!r:.80} is not allowed; see --allow-origin, or set an API key"
                return ApiError(403, why, code="foreign_origin", param=name)
        return None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self.foreign(Headers(scope=scope)) if scope["type"] == "http" else None
        if refusal is None:
            await self._app(scope, receive, send)
        else:
            await JSONResponse(refusal.body(), refusal.status_code)(scope, receive, send)


def secured(settings: ApiSettings, host: str, keys: str | None, pages: str | None) -> ApiSettings:
    """Add a file of keys, and the allowed origins: any origin if the server has a key."""
    settings = replace(settings, named_keys=read_keys(Path(keys)) if keys else {})
    if pages is None:
        pages = "*" if settings.keys else f"{host},{socket.gethostname()}"
    return replace(settings, origins=pages.split(","))


def cors_middleware(origins: Collection[str]) -> tuple[Middleware, list[Middleware]]:
    """Return the CORS middleware and the checks behind it; "*": any page may use the server."""
    names: Any = {name: ["*"] for name in ("allow_methods", "allow_headers")}
    names["expose_headers"] = ["x-request-id", "retry-after", "x-should-retry"]
    if "*" in origins:
        everyone: Any = {"allow_origins": ["*"], "allow_private_network": True}  # web pages, too
        return Middleware(CORSMiddleware, **everyone, **names), []
    names["allow_origin_regex"] = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"
    headers = Middleware(CORSMiddleware, allow_origins=list(origins), **names)
    return headers, [Middleware(TrustedHosts, names=set(map(host_name, origins)))]
