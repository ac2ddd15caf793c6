"""Request bodies: bounded before parsing, and validated off the event loop.

Generated from notebooks/12ba_hard_to_hurt.ipynb: edit there.
"""

from __future__ import annotations

import asyncio
import reprlib
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from fastapi import Request
from pydantic import BaseModel, ValidationError
from pydantic_core import SchemaValidator, core_schema
from starlette.requests import ClientDisconnect

from minisgl.core import MAX_CONTAINERS, MAX_VALUES, check_values, count_values, load_json
from minisgl.server.http.errors import ApiError, api_error

T = TypeVar("T")
MAX_FIELDS = 256  # of one object
LISTS = ("list", "tuple", "set", "frozenset")
OPAQUE = ("cls", "config", "custom_init", "function", "metadata", "serialization")  # no schemas


def at_most(most: int) -> Callable[[Any], Any]:
    """Return a check that an object has at most `most` fields."""

    def check(given: Any) -> Any:
        if isinstance(given, dict) and len(given) > most:
            raise ValueError(f"must have at most {most} fields, got {len(given)}")
        return given

    return check


def fail_fast(schema: Any) -> Any:
    """Copy a core schema: its lists stop at the first error, its objects check their size first."""
    if isinstance(schema, list | tuple):
        return type(schema)(map(fail_fast, schema))
    if not isinstance(schema, dict):
        return schema
    found = {name: v if name in OPAQUE else fail_fast(v) for name, v in schema.items()}
    kind = schema.get("type")
    if kind in LISTS:
        found["fail_fast"] = True
    most = MAX_FIELDS if kind == "model" else schema.get("max_length") if kind == "dict" else None
    if most is None:
        return found
    return core_schema.no_info_before_validator_function(
        at_most(most), found, ref=found.pop("ref", None)
    )


@cache
def validator_of(model: type[BaseModel]) -> SchemaValidator:
    """Return a validator of a model that fails fast."""
    # Without the last argument pydantic would use the models' own validators again.
    return SchemaValidator(fail_fast(model.__pydantic_core_schema__), _use_prebuilt=False)


INLINE_BYTES, INLINE_VALUES = 2**14, 2**11  # of a body that is read on the event loop


def check_count(body: bytes) -> None:
    """Raise a 413 for a body with too many values."""
    try:
        check_values(body)
    except ValueError as error:
        raise ApiError(413, f"body: {error}", code="body_too_large") from None


class Short(reprlib.Repr):
    """A `repr` of at most about 80 characters, at a bounded cost."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = 80

    def repr_bytes(self, value: bytes, level: int) -> str:
        return repr(value[:80])


def brief(value: Any) -> str:
    """Format a value for an error."""
    return f"{Short().repr(value):.80}"


def invalid(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """Convert pydantic's errors to one sentence that begins with the field."""
    # Of two equally deep errors, take the one with the right type; locations name types, too.
    first = max(errors, key=lambda e: (len(e["loc"]), not e["type"].endswith("_type")))
    place = [p for p in map(str, first["loc"]) if p not in ("body", "str") and "[" not in p]
    where = ".".join(place) or "body (JSON with Content-Type: application/json)"
    reason = f"{where:.200}: {first['msg']}, got {brief(first.get('input'))}"
    return ApiError(400, reason, code="invalid_value", param=place[0] if place else None)


def parse(validator: SchemaValidator, body: bytes) -> Any:
    """Parse a body into its model; an `ApiError` names the field at fault."""
    try:
        given = load_json(str(body, "utf-8"))
    except UnicodeDecodeError as error:
        raise ApiError(400, f"body: not UTF-8 ({error})", code="invalid_json") from None
    except (ValueError, RecursionError) as error:
        why = getattr(error, "msg", None) or f"cannot be parsed, {error}"
        raise ApiError(400, f"body: invalid JSON ({why})", code="invalid_json") from None
    try:
        return validator.validate_python(given)
    except ValidationError as error:
        raise invalid(error.errors(include_url=False)) from None


@contextmanager
def renamed_errors(names: Mapping[str, str]) -> Iterator[None]:
    """Report errors of a translated request under the client's field names."""
    try:
        yield
    except (ApiError, ValidationError) as failure:
        error = failure if isinstance(failure, ApiError) else invalid(failure.errors())
        if name := names.get(error.param or ""):
            error.detail = error.detail.replace(str(error.param), name, 1)
            error.param = name
        raise error from failure


class SideThread:
    """A thread for work too long for the event loop; it runs one job per client at a time."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "bodies")
        self._turns = WeakValueDictionary[str, asyncio.Lock]()

    async def run(self, client: str, work: Callable[..., T], *args: Any) -> T:
        """Call `work(*args)` in the thread, after the other jobs of the same client."""
        async with self._turns.setdefault(client, asyncio.Lock()):
            return await asyncio.get_running_loop().run_in_executor(self._pool, work, *args)


SIDE, LARGE = "minisgl.side", "minisgl.large"  # in an ASGI scope: how to run large work
HOLD = "minisgl.hold"  # in an ASGI scope: `Body.hold` of this request
TOGETHER = 16  # answers to one prompt that travel in one message (chapter 12)
VALUE, CONTAINER = 16, 128  # bytes that count for each: less than the objects take in Python


async def build(request: Request, work: Callable[[], T], large: bool = False) -> T:
    """Call `work`; off the event loop if the request's body or work is `large`."""
    large = large or request.scope.get(LARGE, False)
    return await request.scope[SIDE](work) if large else work()


def width(body: bytes) -> int:
    """Return the bytes that a character of a valid body's texts takes, at most."""
    text = str(body, "utf-8")  # one emoji makes four bytes of each
    return 4 if rb"\u" in body else sys.getsizeof(text) // len(text)


class BodyReader:
    """Reads the bodies of one route, whose model is `model`."""

    def __init__(self, model: type[BaseModel]) -> None:
        self._validator = validator_of(model)

    async def read(self, request: Request) -> Any:
        """Read and validate a body, or raise an `ApiError`."""
        body = await request.body()
        values, containers = count_values(body[:INLINE_BYTES])
        if len(body) <= INLINE_BYTES and values + 8 * containers <= INLINE_VALUES:
            return parse(self._validator, body)
        request.scope[LARGE] = True
        return await request.scope[SIDE](self._read_large, body, request.scope.get(HOLD, int))

    def _read_large(self, body: bytes, hold: Callable[[int], None]) -> Any:
        check_count(body)
        values, containers = count_values(body)  # above the limits only in texts
        hold(VALUE * min(values, MAX_VALUES) + CONTAINER * min(containers, MAX_CONTAINERS))
        given = parse(self._validator, body)
        copies = ((getattr(given, "n", None) or 1) - 1) // TOGETHER
        hold((width(body) - 1 + copies) * len(body))
        return given


class ReadRequest(Request):
    """A request whose body is validated by a `BodyReader`."""

    def __init__(self, request: Request, reader: BodyReader) -> None:
        super().__init__(request.scope, request.receive)
        self._reader = reader

    async def json(self) -> Any:
        try:
            return await self._reader.read(self)
        except (ApiError, ClientDisconnect):
            raise
        except Exception as fault:  # ours: FastAPI would answer with a 400
            traceback.print_exc()
            raise api_error(fault) from fault
