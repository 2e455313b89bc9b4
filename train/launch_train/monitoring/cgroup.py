"""What a container may use of its machine: its memory and its share of the CPUs, by Linux's control groups of both
versions (https://docs.kernel.org/admin-guide/cgroup-v2.html)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

UNLIMITED = 1 << 60
"""Version 1 writes no limit as a number of about eight exabytes."""


@dataclass(frozen=True)
class Cgroup:
    """The folders of this process's group and of those around it, innermost first; empty where there are none.

    The outermost that a container sees is its own.
    """

    memory: tuple[Path, ...] = ()
    cpu: tuple[Path, ...] = ()
    used_cpu: tuple[Path, ...] = ()

    @cached_property
    def memory_limit(self) -> int | None:
        """Bytes; the least of all limits. None: no limit."""
        names = ("memory.max", "memory.limit_in_bytes")
        limits = [limit for folder in self.memory for name in names if (limit := _number(folder / name)) is not None]
        return min((limit for limit in limits if limit < UNLIMITED), default=None)

    def memory_used(self) -> int | None:
        """Bytes, of the innermost group that has a limit, without files that the kernel can drop at once."""
        for folder in self.memory:
            current, limit = folder / "memory.current", folder / "memory.max"
            if not current.is_file():
                current, limit = folder / "memory.usage_in_bytes", folder / "memory.limit_in_bytes"
            if (_number(limit) or UNLIMITED) < UNLIMITED and (used := _number(current)) is not None:
                stat = _stat(folder / "memory.stat")
                return max(0, used - stat.get("total_inactive_file", stat.get("inactive_file", 0)))
        return None

    @cached_property
    def cpus(self) -> float | None:
        """CPUs that may be used; None: all."""
        return min((quota for folder in self.cpu for quota in _quotas(folder)), default=None)

    def cpu_seconds(self) -> float | None:
        """Of CPU time that the group has used."""
        for folder in self.used_cpu:
            if (micros := _stat(folder / "cpu.stat").get("usage_usec")) is not None:
                return micros / 1e6
            if (nanos := _number(folder / "cpuacct.usage")) is not None:
                return nanos / 1e9
        return None


def find_cgroup(root: Path = Path("/")) -> Cgroup:
    """The group of this process. A container that sees its own group as the outermost is in `/` or, by the host's
    name, in a folder that isn't there."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return Cgroup()
    mount, places = root / "sys/fs/cgroup", dict(_places(lines))
    unified = mount if (mount / "cgroup.controllers").is_file() else mount / "unified"
    return Cgroup(
        memory=_folders(mount / "memory", places.get("memory")) or _folders(unified, places.get("")),
        cpu=_folders(mount / "cpu", places.get("cpu")) or _folders(unified, places.get("")),
        used_cpu=_folders(mount / "cpuacct", places.get("cpuacct")) or _folders(unified, places.get("")),
    )


def _places(lines: list[str]) -> Iterator[tuple[str, PurePosixPath]]:
    """By the name of a controller, "" for version 2."""
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for name in controllers.split(","):
            yield name, PurePosixPath(path.lstrip("/"))


def _folders(mount: Path, place: PurePosixPath | None) -> tuple[Path, ...]:
    if place is None or not mount.is_dir():
        return ()
    folders = (mount / path for path in (place, *place.parents))
    return tuple(dict.fromkeys(folder for folder in folders if folder.is_dir()))


def _quotas(folder: Path) -> Iterator[float]:
    with suppress(OSError, ValueError):
        quota, period = (folder / "cpu.max").read_text().split()
        if quota != "max":
            yield int(quota) / int(period)
    quota_us, period_us = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    if quota_us and period_us and quota_us > 0:
        yield quota_us / period_us


def _number(path: Path) -> int | None:
    """What a file says, if it says a number."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _stat(path: Path) -> dict[str, int]:
    with suppress(OSError, ValueError):
        return {name: int(value) for name, value in (line.split() for line in path.read_text().splitlines())}
    return {}
