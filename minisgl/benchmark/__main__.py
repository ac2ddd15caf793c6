"""`python -m minisgl.benchmark`.

Generated from notebooks/13b_floor.ipynb: edit there.
"""

from __future__ import annotations

from minisgl.benchmark import cli

main = cli.main


if __name__ == "__main__":
    raise SystemExit(main())
