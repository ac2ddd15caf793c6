"""Host names: which are addresses, and which mean this machine.

Generated from notebooks/12ba_hard_to_hurt.ipynb: edit there.
"""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit


def host_name(host: str) -> str:
    """Return the name in a `Host` header or an origin, without scheme and port."""
    try:
        return urlsplit(host if "://" in host else f"//{host}").hostname or ""
    except ValueError:
        return ""


def is_address(name: str) -> bool:
    """Return True for an IP address, which no name server assigns."""
    try:
        return bool(ipaddress.ip_address(name))
    except ValueError:
        return False


def is_loopback(name: str) -> bool:
    """Return True if only this machine can be meant; False for an unknown name."""
    if is_address(name):
        return ipaddress.ip_address(name).is_loopback
    return name == "localhost" or name.endswith(".localhost")
