"""Read a container's memory and CPU limits and usage from Linux control groups, version 1 or 2
(https://docs.kernel.org/admin-guide/cgroup-v2.html)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

UNLIMITED = 1 << 60
"""Version 1 represents "no limit" as a number of about eight exabytes."""


@dataclass(frozen=True)
class Cgroup:
    """Folders of this process's group and of its ancestors, innermost first; empty for a missing controller.

    The outermost group that a container sees is its own.
    """

    memory: tuple[Path, ...] = ()
    cpu: tuple[Path, ...] = ()
    used_cpu: tuple[Path, ...] = ()

    @cached_property
    def memory_limit(self) -> int | None:
        """Return the lowest memory limit in bytes; None if there is none."""
        names = ("memory.max", "memory.limit_in_bytes")
        limits = [_read_number(folder / name) for folder in self.memory for name in names]
        return min((limit for limit in limits if limit is not None and limit < UNLIMITED), default=None)

    def memory_used(self) -> int | None:
        """Return the bytes used by the innermost limited group, without inactive file cache; None if unlimited."""
        for folder in self.memory:
            current, limit = folder / "memory.current", folder / "memory.max"
            if not current.is_file():
                current, limit = folder / "memory.usage_in_bytes", folder / "memory.limit_in_bytes"
            if (_read_number(limit) or UNLIMITED) < UNLIMITED and (used := _read_number(current)) is not None:
                stat = _stat(folder / "memory.stat")
                return max(0, used - stat.get("total_inactive_file", stat.get("inactive_file", 0)))
        return None

    @cached_property
    def cpus(self) -> float | None:
        """Return the number of CPUs that may be used; None if there is no quota."""
        return min((quota for folder in self.cpu for quota in _quotas(folder)), default=None)

    def cpu_seconds(self) -> float | None:
        """Return the CPU seconds used by the group, or None."""
        for folder in self.used_cpu:
            if (micros := _stat(folder / "cpu.stat").get("usage_usec")) is not None:
                return micros / 1e6
            if (nanos := _read_number(folder / "cpuacct.usage")) is not None:
                return nanos / 1e9
        return None


def find_cgroup(root: Path = Path("/")) -> Cgroup:
    """Return the groups of this process.

    In a container whose own group is the root, the path is `/`, or a host path that does not exist here.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return Cgroup()
    mount, places = root / "sys/fs/cgroup", dict(_places(lines))
    unified = mount if (mount / "cgroup.controllers").is_file() else mount / "unified"
    return Cgroup(
        memory=_group_folders(mount / "memory", places.get("memory")) or _group_folders(unified, places.get("")),
        cpu=_group_folders(mount / "cpu", places.get("cpu")) or _group_folders(unified, places.get("")),
        used_cpu=_group_folders(mount / "cpuacct", places.get("cpuacct")) or _group_folders(unified, places.get("")),
    )


def cores(root: Path = Path("/")) -> int:
    """Return the number of cores that this process may use; a container may be limited to some."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(available, int(find_cgroup(root).cpus or available)))


def free_memory_bytes(group: Cgroup, meminfo: Path = Path("/proc/meminfo")) -> float:
    """Return the bytes of memory that this process may still take: the container's or the machine's; infinity where
    neither is known."""
    free = float("inf")
    with suppress(OSError, ValueError, IndexError):
        free = 1024.0 * int(meminfo.read_text().partition("MemAvailable:")[2].split()[0])
    if group.memory_limit is not None:
        free = min(free, max(0, group.memory_limit - (group.memory_used() or 0)))
    return free


def _places(lines: list[str]) -> Iterator[tuple[str, PurePosixPath]]:
    """Yield the name of each controller ("" in version 2) and its path."""
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for name in controllers.split(","):
            yield name, PurePosixPath(path.lstrip("/"))


def _group_folders(mount: Path, place: PurePosixPath | None) -> tuple[Path, ...]:
    if place is None or not mount.is_dir():
        return ()
    folders = (mount / path for path in (place, *place.parents))
    return tuple(dict.fromkeys(folder for folder in folders if folder.is_dir()))


def _quotas(folder: Path) -> Iterator[float]:
    with suppress(OSError, ValueError):
        quota, period = (folder / "cpu.max").read_text().split()
        if quota != "max":
            yield int(quota) / int(period)
    quota_us, period_us = _read_number(folder / "cpu.cfs_quota_us"), _read_number(folder / "cpu.cfs_period_us")
    if quota_us and period_us and quota_us > 0:
        yield quota_us / period_us


def _read_number(path: Path) -> int | None:
    """Return the integer in a file, or None."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _stat(path: Path) -> dict[str, int]:
    with suppress(OSError, ValueError):
        return {name: int(value) for name, value in (line.split() for line in path.read_text().splitlines())}
    return {}
