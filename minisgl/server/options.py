"""What an operator decides: limits, patience, logs and traces; each with its rule.

Generated from notebooks/12e_command_line.ipynb: edit there.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from minisgl.config.rules import Count, Number, Positive, PositiveNumber, Text, Validated

NotNegative = Annotated[Number, Field(ge=0)]


@dataclass(frozen=True, kw_only=True)
class Operations(Validated):
    """How a server is run; times in seconds, sizes in bytes, None is no limit or nothing."""

    max_queue: Count = 1024  # answers that may wait beyond those that run
    max_body_size: Positive = 8 * 2**20
    request_timeout: PositiveNumber | None = None
    stall_timeout: PositiveNumber = 30.0
    drain_timeout: NotNegative = 30.0
    worker_timeout: NotNegative = 60.0
    step_timeout: NotNegative = 600.0
    log_format: Literal["text", "json", "none"] = "text"
    log_prompts: bool = False
    trace: Text | None = None
    debug: bool = False


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address. An unknown name is not."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
