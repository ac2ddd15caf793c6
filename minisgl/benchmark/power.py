"""What a GPU draws while it works, and whether that is all it may draw.

Generated from notebooks/13b_floor.ipynb: edit there.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable
from importlib import import_module
from types import TracebackType
from typing import NamedTuple, Self

import torch


class Sample(NamedTuple):
    """What the driver says at one moment."""

    watts: float
    sm_mhz: int
    capped: bool  # the clock is down because more power is not allowed


class PowerReader(NamedTuple):
    """A GPU that can be asked, and its limits."""

    limit_watts: float
    max_sm_mhz: int
    read: Callable[[], Sample]


def power_reader(device: torch.device) -> PowerReader | None:
    """Ask NVIDIA's management library about a GPU; None where it cannot be asked.

    That is on a CPU, without nvidia-ml-py, and where the driver does not answer.
    """
    if device.type != "cuda":
        return None
    try:
        nvml = import_module("pynvml")
    except ImportError:
        return None

    def read() -> Sample:
        watts = nvml.nvmlDeviceGetPowerUsage(gpu) / 1e3
        mhz = nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM)
        reasons = nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu)
        return Sample(watts, mhz, bool(reasons & nvml.nvmlClocksEventReasonSwPowerCap))

    try:
        nvml.nvmlInit()
        # By its own name: NVML numbers all GPUs, torch those that the process may see.
        gpu = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        limit = nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1e3
        clock = nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_SM)
        read()
    except nvml.NVMLError:
        return None
    return PowerReader(limit, clock, read)


class PowerWatch:
    """Asks in a thread of its own for as long as the `with` block runs."""

    def __init__(self, reader: PowerReader | None, every: float = 0.1) -> None:
        """`every`: seconds between two samples; without a reader there are none."""
        self.reader, self.every = reader, every
        self.samples: list[Sample] = []
        self.error: Exception | None = None
        self.done = threading.Event()
        self.thread = threading.Thread(target=self.run, name="power", daemon=True)

    def run(self) -> None:
        """The thread: a sample at once, and then one every so often."""
        try:
            while self.reader is not None:
                self.samples.append(self.reader.read())
                if self.done.wait(self.every):
                    return
        except Exception as error:  # a benchmark is worth more than its power: go on without
            self.error = error

    def __enter__(self) -> Self:
        self.thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.done.set()
        self.thread.join()

    def summary(self) -> dict[str, float] | None:
        """Medians beside the limits, and the share of samples in which power was the limit.

        None without a reader, and where the driver stopped to answer: what came before is no run.
        """
        if self.reader is None or not self.samples or self.error is not None:
            return None
        return {
            "watts": round(statistics.median(s.watts for s in self.samples), 1),
            "limit_watts": self.reader.limit_watts,
            "sm_mhz": statistics.median(s.sm_mhz for s in self.samples),
            "least_sm_mhz": min(s.sm_mhz for s in self.samples),
            "max_sm_mhz": self.reader.max_sm_mhz,
            "capped": round(statistics.mean(s.capped for s in self.samples), 3),
        }
