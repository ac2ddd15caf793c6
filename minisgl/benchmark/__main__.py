"""`python -m minisgl.benchmark`.

Generated from notebooks/13c_online.ipynb: edit there.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from minisgl.benchmark import cli, serving_cli


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of `python -m minisgl.benchmark`; returns the exit status."""
    return cli.main(sys.argv[1:] if argv is None else argv, serving_cli.COMMANDS)


if __name__ == "__main__":
    raise SystemExit(main())
