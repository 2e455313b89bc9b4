"""Sample this node's CPUs, memory, disk and network with psutil. A container's limits count as the machine's."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch_train.common.cgroup import Cgroup, find_cgroup
from launch_train.monitoring.rates import Rates
from launch_train.telemetry.rows import Row

SHM = Path("/dev/shm")  # noqa: S108 - only read
PROC, NETWORKS = Path("/proc"), Path("/sys/class/net")


def open_host(scratch: Path, pid: int) -> Host | None:
    """Return the host for the disk of `scratch` and the processes under `pid`; None if psutil is not installed."""
    try:
        import psutil
    except ImportError:
        return None
    return Host(psutil, scratch, pid, find_cgroup())


@dataclass
class Host:
    """Samples the host; values that this machine does not report are omitted."""

    psutil: Any
    scratch: Path
    pid: int
    cgroup: Cgroup
    _rates: Rates = field(default_factory=Rates)

    def sample(self) -> Row:
        """Return a row: shares (0 to 1), GB (1e9 bytes), MB/s and Mbit/s. Rates start with the second sample."""
        rates = self._rates.of(dict(self._counters()), time.monotonic())
        row = self._cpu(rates) | self._memory() | self._disk()
        for name, unit in (("disk_read", 1e6), ("disk_write", 1e6)):
            if name in rates:
                row[f"{name}_mb_s"] = round(rates[name] / unit, 2)
        for name in ("net_rx", "net_tx"):
            if name in rates:
                row[f"{name}_mbps"] = round(rates[name] * 8 / 1e6, 2)
        return row

    def _counters(self) -> Iterator[tuple[str, float]]:
        busy = self.cgroup.cpu_seconds() if self.cgroup.cpus else None
        if busy is not None:
            yield "cpu", busy
        if disk := self.psutil.disk_io_counters():
            yield "disk_read", disk.read_bytes
            yield "disk_write", disk.write_bytes
        cards = self.psutil.net_io_counters(pernic=True)
        names = physical(cards)
        yield "net_rx", sum(cards[name].bytes_recv for name in names)
        yield "net_tx", sum(cards[name].bytes_sent for name in names)

    def _cpu(self, rates: dict[str, float]) -> Row:
        """Return CPU use: `cpu` is the share of the `cpus` that may be used."""
        allowed, machine = self.cgroup.cpus, self.psutil.cpu_percent() / 100
        row: Row = {"cpus": allowed or os.cpu_count() or 1, "load": round(os.getloadavg()[0], 2)}
        if allowed and "cpu" in rates:
            return row | {"cpu": round(rates["cpu"] / allowed, 4)}
        return row | ({"cpu": round(machine, 4)} if rates and not allowed else {})

    def _memory(self) -> Row:
        whole, swap = self.psutil.virtual_memory(), self.psutil.swap_memory()
        limit, used = whole.total, whole.total - whole.available
        if (own := self.cgroup.memory_limit) is not None and own < limit:
            limit, used = own, self.cgroup.memory_used() or used
        row = {"ram_gb": used / 1e9, "ram_limit_gb": limit / 1e9, "swap_gb": swap.used / 1e9}
        if resident := sum(_resident(pid) for pid in family(self.pid)):
            row["processes_gb"] = resident / 1e9
        return {name: round(value, 3) for name, value in row.items()}

    def _disk(self) -> Row:
        row: Row = {}
        with suppress(OSError):
            disk = shutil.disk_usage(self.scratch)
            row |= {"disk_free_gb": round(disk.free / 1e9, 3), "disk_gb": round(disk.total / 1e9, 3)}
        with suppress(OSError):
            shared = shutil.disk_usage(SHM)
            row |= {"shm_gb": round(shared.used / 1e9, 3), "shm_limit_gb": round(shared.total / 1e9, 3)}
        return row


def physical(names: Any) -> list[str]:
    """Return the physical network interfaces, since a bridge counts their bytes again.

    In a container no interface has a device: there, return all but the loopback.
    """
    others = [name for name in names if name != "lo"]
    return [name for name in others if (NETWORKS / name / "device").exists()] or others


def family(pid: int, proc: Path = PROC) -> Iterator[int]:
    """Yield a process and its descendants. Linux lists children; asking each process for its parent is far slower."""
    yield pid
    for path in (proc / str(pid) / "task").glob("*/children"):
        with suppress(OSError):
            for child in path.read_text().split():
                yield from family(int(child), proc)


def _resident(pid: int) -> int:
    """Return a process's resident memory in bytes, shared pages included; 0 if it has exited."""
    try:
        return int((PROC / str(pid) / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
