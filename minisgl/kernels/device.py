"""What of a GPU decides how kernels are cut into programs.

Generated from notebooks/04b_gpu_attention.ipynb: edit there.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton

RESERVED = 1024  # bytes of shared memory that CUDA keeps for itself, of each program


@dataclass(frozen=True)
class DeviceLimits:
    """What a GPU has."""

    sms: int  # multiprocessors
    shared_memory: int  # bytes that a program may use; an SM has `RESERVED` more
    capability: int  # 90 is compute capability 9.0

    @property
    def runs_tiles(self) -> bool:
        """Whether our kernels' tiles fit: before 8.0 there are 64 KiB, and no copies ahead."""
        return self.capability >= 80

    def at_once(self, most: int, nbytes: int) -> int:
        """Programs that run at the same time: `most` on an SM, if `nbytes` of each fit there."""
        room = self.shared_memory + RESERVED
        return self.sms * min(most, room // (nbytes + RESERVED))


H200 = DeviceLimits(sms=132, shared_memory=232_448, capability=90)


@cache
def device_limits(device: torch.device) -> DeviceLimits:
    """The limits of a device; on a CPU kernels are cut as for an H200."""
    if device.type == "cpu":
        return H200
    driver = triton.runtime.driver.active
    found = driver.utils.get_device_properties(device.index or 0)
    arch = driver.get_current_target().arch
    return DeviceLimits(found["multiprocessor_count"], found["max_shared_mem"], int(arch))
