"""Types of fields, and the form of all error messages: field, rule, value.

Generated from notebooks/01_requests.ipynb: edit there.
"""

from __future__ import annotations

import numbers
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    create_model,
)


def shown(value: object) -> str:
    """Format a value for a message, cut after 300 characters.

    An integer that Python refuses to print becomes "a number too long to print".
    """
    try:
        return f"{value!r:.300}"
    except ValueError:  # Python prints no integer of more than 4,300 digits
        return "a number too long to print"


def refuse(name: str, must: str, got: object) -> ValueError:
    """Make a ValueError in the form of all error messages: field, rule, value."""
    return ValueError(f"{name}: must be {must}, got {shown(got)}")


def check_positive(**sizes: object) -> None:
    """Raise ValueError for the first size that is not an integer of at least 1."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, numbers.Integral) or size < 1:
            raise refuse(name, "a positive integer", size)


@contextmanager
def file_of(field: str, path: Path) -> Iterator[None]:
    """Turn OSError and UnicodeError in the block into a ValueError: field, path and reason."""
    try:
        yield
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ValueError(f"{field}: cannot use {str(path)!r} ({why})") from error


MAX_INT = 2**63 - 1  # the limit of tensors and messages
STRICT = ConfigDict(strict=True, frozen=True)  # "16" and True are not 16


def plain_number(value: Any) -> Any:
    """Convert numpy's and other numbers to Python's own; return anything else, and bools, as is."""
    if isinstance(value, bool):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) else value


Count = Annotated[int, BeforeValidator(plain_number), Field(ge=0, le=MAX_INT)]
Positive = Annotated[int, BeforeValidator(plain_number), Field(ge=1, le=MAX_INT)]
Number = Annotated[float, BeforeValidator(plain_number), Field(allow_inf_nan=False)]
PositiveNumber = Annotated[Number, Field(gt=0)]
Text = Annotated[str, Field(min_length=1)]


def as_tuple(value: Any) -> Any:
    """Convert a list to a tuple, which can be hashed; return anything else as it is."""
    return tuple(value) if isinstance(value, list) else value


def spelled(pattern: str, wanted: str) -> AfterValidator:
    """Refuse a string that does not match `pattern`; the message is `wanted`."""

    def check(text: str) -> str:
        if re.fullmatch(pattern, text):
            return text
        raise ValueError(f"must be {wanted}")

    return AfterValidator(check)


def explain(error: ValidationError) -> ValueError:
    """Convert pydantic's first message to our form."""
    first = error.errors(include_url=False)[0]
    name = first["loc"][0] if first["loc"] else error.title
    if first["type"] == "missing":
        return ValueError(f"{name}: missing")
    must = re.sub(r"^(Value error, must|\w+ should)", "must", first["msg"])
    return ValueError(f"{name}: {must}, got {shown(first['input'])}")


@cache
def fields_model(cls: type) -> type[BaseModel]:
    """Create a pydantic model with the fields of a dataclass."""
    hints = get_type_hints(cls, include_extras=True)
    wanted: dict[str, Any] = {field.name: (hints[field.name], ...) for field in fields(cls)}
    return create_model(cls.__name__, __config__=STRICT, **wanted)


class Validated:
    """Base of frozen dataclasses that check their fields against the types once, at construction.

    ValueError names field and value. Fields are stored in their final form, a list as a tuple.
    """

    def __post_init__(self) -> None:
        """Check all fields."""
        cls: type = type(self)
        values = {field.name: getattr(self, field.name) for field in fields(cls)}
        try:
            checked = fields_model(cls).model_validate(values)
        except ValidationError as error:
            raise explain(error) from None
        vars(self).update(vars(checked))  # the only write to a frozen object
