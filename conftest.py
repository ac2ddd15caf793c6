"""Loads nbval later than pytest would: after `build.py`, which makes nbformat quick to import."""

import build  # noqa: F401  # notebooks/build.py

pytest_plugins = ["nbval.plugin"]
