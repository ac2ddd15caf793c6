"""`python -m minisgl`: serve a model.

Generated from notebooks/12f_command_line.ipynb: edit there.
"""

from __future__ import annotations

from minisgl.server.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
