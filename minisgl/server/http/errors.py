"""The HTTP form of every failure: a status and OpenAI's error body.

Generated from notebooks/12b_running.ipynb: edit there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from minisgl.server.frontend import RequestFailed

STATUS_OF_CODE = {"service_unavailable": 503, "internal_error": 500, "deadline_exceeded": 408}
STATUS_OF_CODE |= {"queue_full": 429}
HEADERS = {  # OpenAI's clients read this; a deadline that passed once would pass again
    401: {"www-authenticate": "Bearer"},
    408: {"x-should-retry": "false"},
    429: {"retry-after": "1"},
    503: {"retry-after": "5"},
}


class ErrorBody(BaseModel):
    """Every error: its message, type, param and code."""

    error: dict[str, str | None]


FAILED: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": "What is wrong, and with which field"}
    for status in ("4XX", "5XX")
}


class ApiError(HTTPException):
    """An error that becomes `{"error": {message, type, param, code}}` with an HTTP status."""

    def __init__(
        self, status: int, message: str, *, code: str, param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(status, message, {**HEADERS.get(status, {}), **(headers or {})})
        self.code, self.param = code, param

    def body(self) -> dict[str, Any]:
        kind = {429: "rate_limit_error"}.get(self.status_code, "invalid_request_error")
        kind = kind if self.status_code < 500 else "server_error"
        about = {"message": self.detail, "type": kind, "param": self.param, "code": self.code}
        return {"error": about}


def api_error(failure: Exception) -> ApiError:
    """Convert a failure to its HTTP form; a failure without a known code is the caller's fault."""
    if isinstance(failure, ApiError):
        return failure
    if not isinstance(failure, RequestFailed):
        failure = RequestFailed(f"internal error: {type(failure).__name__}: {failure!s:.500}")
    status, text = STATUS_OF_CODE.get(failure.code, 400), str(failure)
    if failure.code == "context_length_exceeded":  # some clients match these words
        text += "; it is longer than the model's context length on this server"
    return ApiError(status, text, code=failure.code, param=failure.param)


def forget_frames(failure: Exception, error: ApiError) -> None:
    """Drop the frames of a handled failure: they hold its request, and the request holds it."""
    known = HTTPException, RequestFailed, RequestValidationError  # others are still to be logged
    for each in (failure, error) if isinstance(failure, known) else ():
        each.__traceback__ = each.__context__ = each.__cause__ = None
