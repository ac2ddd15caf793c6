"""The circumstances of a measurement: hardware, date, versions and command; and its file.

Generated from notebooks/13_benchmark.ipynb: edit there.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch


def processor_name() -> str:
    """Return the processor's name, as the system reports it."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages in the measurement."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("transformers", "triton", "flashinfer-python"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def circumstances() -> dict[str, Any]:
    """Return hardware, versions and date (UTC)."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "hardware": {"cpu": processor_name(), "cores": os.cpu_count(), "gpus": gpus},
        "threads": torch.get_num_threads(),
        "versions": versions(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def save(path: Path, results: Mapping[str, Any], command: str) -> None:
    """Write results with their circumstances as JSON; makes the folder if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    about = circumstances() | {"command": command}
    path.write_text(json.dumps({**about, "results": results}, indent=1) + "\n")
