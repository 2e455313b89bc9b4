"""Evaluate the markers of requirements for an image, whatever machine launch runs on."""

from __future__ import annotations

from typing import Final, Literal

Arch = Literal["", "amd64", "arm64"]
"""An architecture of machines; empty: every one."""
ARCHES: Final[dict[Arch, str]] = {"amd64": "x86_64", "arm64": "aarch64"}
"""Architectures of machines as images name them, and as Linux does (platform_machine)."""


def holds(marker: str, python: str, arch: Arch) -> bool:
    """Return whether a marker (`sys_platform == 'linux'`) holds in an image with a Python (`3.12`) and an architecture
    (`amd64`). Raises packaging's InvalidMarker."""
    from packaging.markers import Marker

    full = f"{python}.99"  # the newest patch release, whichever it is
    return Marker(marker).evaluate(
        {
            "implementation_name": "cpython",
            "implementation_version": full,
            "os_name": "posix",
            "platform_machine": ARCHES[arch],
            "platform_python_implementation": "CPython",
            "platform_release": "",
            "platform_system": "Linux",
            "platform_version": "",
            "python_full_version": full,
            "python_version": python,
            "sys_platform": "linux",
            "extra": "",
        }
    )
