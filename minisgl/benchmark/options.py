"""Flags that the benchmarks share, and what they mean: model, engine, integers.

Generated from notebooks/13a_kernels.ipynb: edit there.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

from minisgl.config import flags
from minisgl.config.engine import SchedulerConfig
from minisgl.config.flags import ENGINE_FIELDS as ENGINE_FIELDS
from minisgl.config.flags import Group as Group
from minisgl.config.flags import engine_fields as engine_fields
from minisgl.config.known_models import KNOWN_CONFIGS
from minisgl.config.paths import resolve_model_path


class Parser(argparse.ArgumentParser):
    """Complains in one line and exits with status 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def at_least(low: int) -> Callable[[str], int]:
    """The type of a flag that must be an integer of at least `low`, which is not negative."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < low:
            raise argparse.ArgumentTypeError(f"must be an integer of at least {low}, got {text!r}")
        return int(text)

    return read


def known_name(name: str | None) -> str | None:
    """The hub id of a model by that, or by the part behind the slash; None if it is unknown."""
    if name is None or Path(name).is_dir():
        return None
    for known in KNOWN_CONFIGS:
        if name.lower() in (known.lower(), known.lower().split("/")[1]):
            return known
    return None


@contextmanager
def model_folder(name: str | None, shapes_only: bool) -> Iterator[Path]:
    """The model's folder; if its weights are not wanted, a known name gives one with a config."""
    known = known_name(name) if shapes_only else None
    if known is None:
        yield resolve_model_path(name)
        return
    with TemporaryDirectory(prefix="minisgl-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(KNOWN_CONFIGS[known]))
        yield Path(folder)


def add_integer(group: Group, names: str, what: str, low: int = 1, **more: Any) -> None:
    """A flag, or several names of one, that takes an integer or as many as `nargs` says."""
    fields: dict[str, Any] = {"metavar": "N", "type": at_least(low), "help": what, **more}
    group.add_argument(*names.split(), **fields)


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Which model, with which weights, where."""
    known = ", ".join(name.split("/")[1] for name in KNOWN_CONFIGS)
    which = f"folder, hub id, or with --dummy-weight one of {known}; none: the embedded model"
    flags.add_model_flags(parser.add_argument_group("model"), which)


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """What an engine may be told."""
    flags.add_engine_flags(parser.add_argument_group("engine"), SchedulerConfig())
