"""`python -m minisgl`: serve a model.

Generated from notebooks/12f_command_line.ipynb: edit there.
"""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    from minisgl.server import cli  # only in the first process

    return cli.main(argv)


if __name__ == "__main__":
    raise SystemExit(main())
