"""Which addresses are this machine's own. There launch and the trainer speak without TLS and without credentials."""

from __future__ import annotations

import ipaddress
import re

_ADDRESS = re.compile(
    r"(?:[a-z][a-z0-9+.-]*://)?(localhost|[0-9.]+|\[[0-9a-f:.]+\])(?::[0-9]*)?(?:[/?#].*)?", re.IGNORECASE | re.DOTALL
)
"""A scheme, which may be left out, a host and a port. With a user's name before the host it is none: parsers differ in
which of two hosts around a @ and a backslash they take."""


def is_loopback(address: str) -> bool:
    """Return whether a URL, or a host with or without a port, is localhost, in 127.0.0.0/8, or ::1.

    Nothing is looked up, so a name that leads here, such as a.localhost, is none.
    """
    found = _ADDRESS.fullmatch(address)
    if not found:
        return False
    host = found[1].strip("[]").lower()
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_plain_loopback(url: str) -> bool:
    """Return whether a URL is of a server of this machine without TLS: a test's."""
    return url.lower().startswith("http://") and is_loopback(url)
