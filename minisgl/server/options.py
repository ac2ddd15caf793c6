"""What an operator decides: limits, patience, logs and traces; each with its rule.

Generated from notebooks/12b_operations.ipynb: edit there.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from minisgl.config.rules import Rule, apply_rules, flag, integer, number, optional, text, word


@dataclass(frozen=True, kw_only=True)
class Operations:
    """How a server is run; times in seconds, sizes in bytes, None is no limit or nothing."""

    max_queue: int = 1024  # answers that may wait beyond those that run
    max_body_size: int = 8 * 2**20
    request_timeout: float | None = None
    stall_timeout: float = 30.0
    drain_timeout: float = 30.0
    worker_timeout: float = 60.0
    step_timeout: float = 600.0
    log_format: str = "text"
    log_prompts: bool = False
    trace: str | None = None
    debug: bool = False

    def __post_init__(self) -> None:
        apply_rules(self, OPERATION_RULES, {})


OPERATION_RULES: dict[str, Rule] = {
    "max_queue": integer(0),
    "max_body_size": integer(1),
    "request_timeout": optional(number(0, above=True)),
    "stall_timeout": number(0, above=True),
    "drain_timeout": number(0),
    "worker_timeout": number(0),
    "step_timeout": number(0),
    "log_format": word("text", "json", "none"),
    "log_prompts": flag,
    "trace": optional(text),
    "debug": flag,
}


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address. An unknown name is not."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
