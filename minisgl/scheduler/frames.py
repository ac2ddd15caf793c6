"""Messages as bytes between processes: what messages share travels once.

Generated from notebooks/08d_messages.ipynb: edit there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from minisgl.config.rules import as_tuple
from minisgl.core import SamplingParams
from minisgl.scheduler.messages import PLAIN


@dataclass(frozen=True)
class SentParams(SamplingParams):
    """Parameters from another of our processes, which has checked them."""

    def __post_init__(self) -> None:
        """Convert lists to tuples."""
        lists = {name: tuple(v) for name, v in vars(self).items() if isinstance(v, list)}
        vars(self).update(lists, bad_words=tuple(map(as_tuple, self.bad_words)))


def with_seed(params: SamplingParams, seed: int | None) -> SamplingParams:
    """Return the same parameters with another seed; they share all other fields."""
    copy = SamplingParams.__new__(SamplingParams)
    vars(copy).update(vars(params), seed=seed)
    return copy


def same_but_seed(one: SamplingParams, other: SamplingParams) -> bool:
    """Return True if two sets of parameters share all fields except for the seed."""
    return all(v is getattr(other, name) for name, v in vars(one).items() if name != "seed")


class Tables(msgspec.Struct, omit_defaults=True):
    """Objects that the messages of a frame share."""

    sampling_params: list[SentParams] = []
    input_ids: list[list[int]] = []
    text: list[str] = []
    messages: list[list[dict[str, Any]]] = []
    template_kwargs: list[dict[str, Any]] = []
    stop: list[tuple[str, ...]] = []


Refs = list[tuple[int, str, int]]  # of a message, by its place: which table, and where in it
ParamRefs = list[tuple[int, int, int | None]]  # of a message: which parameters, and its seed
BLANK: dict[str, Any] = {
    "input_ids": [],
    "text": None,
    "messages": None,
    "template_kwargs": {},
    "stop": (),
}


def pick(table: list[Any], index: int, what: str) -> Any:
    """Return an entry of a table; `msgspec.ValidationError` if there is none."""
    if not 0 <= index < len(table):
        raise msgspec.ValidationError(f"{what}: must be below {len(table)}, got {index}")
    return table[index]


class Codec:
    """Encodes and decodes frames of messages of the union `kind`."""

    def __init__(self, kind: Any) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: Any = msgspec.msgpack.Decoder(tuple[Tables, list[kind], Refs, ParamRefs])

    def encode(self, messages: Any) -> bytes:
        """Return a frame of these messages."""
        tables, wire, refs, params = Tables(), [*messages], list[Any](), list[Any]()
        places: dict[Any, int] = {}  # of objects in the tables, by identity

        def place(key: Any, name: str, value: Any) -> int:
            table = getattr(tables, name)
            if key not in places:
                places[key] = len(table)
                table.append(value)
            return places[key]

        for at, msg in enumerate(messages):
            blank = dict[str, Any]()
            for name in getattr(msg, "shared", ()):
                if value := getattr(msg, name):
                    refs.append((at, name, place((name, id(value)), name, value)))
                    blank[name] = BLANK[name]
            if given := getattr(msg, "sampling_params", None):
                key = tuple(id(v) for name, v in vars(given).items() if name != "seed")
                params.append((at, place(key, "sampling_params", given), given.seed))
                blank["sampling_params"] = PLAIN
            if blank:  # most messages are tokens, which share nothing
                wire[at] = msgspec.structs.replace(msg, **blank)
        return self._encoder.encode((tables, wire, refs, params))

    def decode(self, frame: bytes) -> list[Any]:
        """Return the messages of a frame, or raise `msgspec.DecodeError`."""
        try:
            tables, messages, refs, params = self._decoder.decode(frame)
        except (UnicodeDecodeError, RecursionError) as error:
            raise msgspec.DecodeError(f"frame: must be text and flat, got {error}") from None
        for at, name, index in refs:
            msg = pick(messages, at, "message")
            if name not in getattr(msg, "shared", ()):
                raise msgspec.ValidationError(f"name: must be a shared field, got {name!r}")
            setattr(msg, name, pick(getattr(tables, name), index, name))
        made: dict[Any, SamplingParams] = {}
        for at, index, seed in params:
            msg = pick(messages, at, "message")
            if not hasattr(msg, "sampling_params"):
                raise msgspec.ValidationError(f"message: must have parameters, got {at}")
            if (index, seed) not in made:
                common = pick(tables.sampling_params, index, "sampling_params")
                made[index, seed] = with_seed(common, seed)
            msg.sampling_params = made[index, seed]
        return messages
