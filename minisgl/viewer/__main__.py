"""`python -m minisgl.viewer`: turn a recording into a page.

Generated from notebooks/09d_viewer.ipynb: edit there.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from minisgl.config.rules import file_of
from minisgl.viewer.page import page_of, pair_of


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page of a recording; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m minisgl.viewer", description=main.__doc__)
    parser.add_argument("recording", type=Path, help="a file of --record or LLM(record=...)")
    parser.add_argument("-o", "--output", type=Path, help="the page; none: beside the recording")
    parser.add_argument(
        "--beside", type=Path, metavar="RECORDING", help="a second run, on one clock"
    )
    parser.add_argument("--book", default="", metavar="URL", help="where the book's chapters are")
    args = parser.parse_args(argv)
    output = args.output or args.recording.with_suffix(".html")
    try:
        if args.beside is None:
            page = page_of(args.recording, book=args.book)
        else:
            runs = {"1": args.recording, "2": args.beside}
            titled = {f"{number}: {path.stem}": path for number, path in runs.items()}
            page = pair_of(titled, book=args.book)
        with file_of("output", output):
            output.write_text(page, encoding="utf-8")
    except ValueError as error:
        print(f"minisgl.viewer: {error}", file=sys.stderr)
        return 1
    print(output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
