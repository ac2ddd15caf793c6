"""The command that searches tiles for models on this GPU, and stores them for its engines.

Generated from notebooks/13f_tuning.ipynb: edit there.
"""

from __future__ import annotations

import fcntl
import json
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from minisgl.benchmark.options import at_least, stored_command
from minisgl.benchmark.report import circumstances
from minisgl.config.known_models import KNOWN_CONFIGS
from minisgl.config.rules import file_of
from minisgl.server.options import Parser


def keep(path: Path, rows: list[dict[str, Any]], command: str) -> None:
    """Add rows and their entries to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with (path.parent / f".{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        old = json.loads(path.read_text()) if path.exists() else {"tiles": {}, "rows": []}
        tiles = old["tiles"] | {key: one for row in rows for key, one in row["found"].items()}
        about = circumstances() | {"command": command}
        text = json.dumps({**about, "tiles": tiles, "rows": old["rows"] + rows})
        fresh = path.parent / f".{path.name}.new"
        fresh.write_text(text)
        fresh.replace(path)  # a starting engine reads the old file or the new one


SIZES = (1, 8, 32, 64, 128, 256)  # of decode steps


def make_parser() -> Parser:
    """Build the parser of the command line."""
    what = "Search for the tiles that make decode steps fastest on this GPU."
    parser = Parser(prog="python -m minisgl.benchmark.tune", description=what)
    names = ", ".join(name.split("/")[1] for name in KNOWN_CONFIGS)
    parser.add_argument("models", nargs="+", metavar="MODEL", help=f"a folder, or one of {names}")
    parser.add_argument("--tp", type=at_least(1), default=1, metavar="N",
                        help="search for one of N ranks (default 1)")  # fmt: skip
    parser.add_argument("--quantization", choices=("none", "fp8"), default="none",
                        help="of the weights (default none)")  # fmt: skip
    parser.add_argument("--batch-sizes", type=at_least(1), nargs="+", default=SIZES, metavar="N",
                        help="rows of a step (default 1 8 32 64 128 256)")  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="FILE",
                        help="default: a file for this GPU in ~/.cache/minisgl/tiles")  # fmt: skip
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Search for all named models, and store the entries."""
    parser = make_parser()
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("tiles are searched for on an NVIDIA GPU; torch finds none here")
    steps, device = (import_module(f"minisgl.{name}")  # Triton may be missing
                     for name in ("benchmark.tune_steps", "kernels.device"))  # fmt: skip
    path = args.out or device.tile_files(torch.cuda.get_device_name())[1]
    given = sys.argv[1:] if argv is None else argv
    command = stored_command("minisgl.benchmark.tune", given)
    try:  # check now, not after a search
        for model in args.models:
            steps.config_of(model, args.tp)
        with file_of("out", path):
            keep(path, [], command)
    except (OSError, ValueError, KeyError, TypeError) as error:
        parser.error(f"{type(error).__name__}: {error}")
    for model in args.models:
        rows = steps.tune(model, args.tp, args.quantization, sorted(args.batch_sizes))
        keep(path, rows, command)
        for row in rows:
            print(f"{model}, {row['rows']} rows: {row['ms_before']} -> {row['ms']} ms")
    print(f"kept in {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
