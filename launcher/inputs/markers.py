"""Evaluate the markers of requirements for an image or for another Python of this machine, whatever launch runs on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

Arch = Literal["", "amd64", "arm64"]
"""An architecture of machines; empty: every one."""
ARCHES: Final[dict[Arch, str]] = {"amd64": "x86_64", "arm64": "aarch64"}
"""Architectures of machines as images name them, and as Linux does (platform_machine)."""


def fitting_arches(marker: str, python: str) -> list[Arch]:
    """Return the architectures of the images in which a marker holds; all for an empty one. Where the image's Python is
    unknown (empty), a marker that depends on it holds. Raises packaging's InvalidMarker."""
    pythons = [python] if python else [f"3.{minor}" for minor in range(10, 16)]
    return [arch for arch in ARCHES if not marker or any(holds(marker, each, arch) for each in pythons)]


def holds_here(marker: str, version: Sequence[int]) -> bool:
    """Return whether a marker (maybe empty) holds for a Python of this machine, (3, 12, 1). Raises packaging's
    InvalidMarker."""
    from packaging.markers import Marker

    major, minor, *_ = version
    release = ".".join(map(str, version))
    return not marker or Marker(marker).evaluate(
        {"python_version": f"{major}.{minor}", "python_full_version": release, "implementation_version": release}
    )


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
