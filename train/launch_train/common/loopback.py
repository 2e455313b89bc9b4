"""Recognise loopback addresses, to which launch and the trainer connect without TLS and without credentials."""

from __future__ import annotations

import ipaddress
import re

_ADDRESS = r"(?is)(?:[a-z][a-z0-9+.-]*://)?(localhost|[0-9.]+|\[[0-9a-f:.]+\])(?::[0-9]*)?(?:[/?#].*)?"
"""An optional scheme, a host and a port. A user name before the host is not accepted: parsers disagree on which part
around an @ and a backslash is the host."""


def is_loopback(address: str) -> bool:
    """Return whether a URL, or a host with or without a port, is localhost, in 127.0.0.0/8, or ::1.

    Names are not resolved, so other names of this machine, such as a.localhost, don't count.
    """
    if not any(char.isdigit() or char == "[" for char in address) and "localhost" not in address.lower():
        return False  # nearly all addresses: the pattern need not be compiled
    match = re.fullmatch(_ADDRESS, address)
    if not match:
        return False
    host = match[1].strip("[]").lower()
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_plain_loopback(url: str) -> bool:
    """Return whether a URL is of a server of this machine without TLS: a test's."""
    return url.lower().startswith("http://") and is_loopback(url)
