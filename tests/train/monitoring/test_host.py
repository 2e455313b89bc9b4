"""CPUs, memory, disk and network of this machine, and the limits of containers in folders like the kernel's."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace as Space

import psutil
import pytest

from launch_train.common.cgroup import Cgroup, find_cgroup
from launch_train.monitoring import host
from launch_train.monitoring.host import Host, open_host


def test_this_machine(tmp_path: Path) -> None:
    here = open_host(tmp_path, os.getpid())
    assert here is not None
    first = here.sample()
    assert "cpu" not in first
    assert "net_rx_mbps" not in first
    time.sleep(0.01)
    row = here.sample()
    names = {"cpus", "cpu", "load", "ram_gb", "ram_limit_gb", "swap_gb", "processes_gb", "disk_free_gb", "disk_gb"}
    assert names | {"net_rx_mbps", "net_tx_mbps", "shm_gb", "shm_limit_gb"} <= row.keys()
    assert 0 < row["processes_gb"] <= row["ram_limit_gb"]
    assert 0 < row["ram_gb"] <= row["ram_limit_gb"] <= psutil.virtual_memory().total / 1e9 + 0.001
    assert 0 <= row["disk_free_gb"] <= row["disk_gb"]


def test_without_psutil_there_is_no_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "psutil", None)
    assert open_host(tmp_path, 1) is None


class FakePsutil:
    """A machine of 100 GB with two network cards and a bridge."""

    def __init__(self) -> None:
        self.moved = 0

    def cpu_percent(self) -> float:
        return 25.0

    def virtual_memory(self) -> Space:
        return Space(total=100_000_000_000, available=40_000_000_000)

    def swap_memory(self) -> Space:
        return Space(used=0)

    def disk_io_counters(self) -> Space:
        return Space(read_bytes=self.moved, write_bytes=2 * self.moved)

    def net_io_counters(self, *, pernic: bool) -> dict[str, Space]:
        assert pernic
        one = Space(bytes_recv=self.moved, bytes_sent=0)
        return {"lo": one, "eth0": one, "eth1": one, "docker0": one}


def limited(folder: Path) -> Cgroup:
    return Cgroup((folder,), (folder,), (folder,))


def files(folder: Path, **texts: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def test_rates_and_the_limits_of_a_container(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    now = 50.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(host, "NETWORKS", tmp_path / "net")
    for card in ("eth0", "eth1"):
        (tmp_path / "net" / card / "device").mkdir(parents=True)
    group = files(
        tmp_path / "group",
        memory__max="16000000000",
        memory__current="9000000000",
        memory__stat="anon 5\ninactive_file 1000000000\n",
        cpu__max="400000 100000",
        cpu__stat="usage_usec 10000000\nuser_usec 1\n",
    )
    machine = FakePsutil()
    here = Host(machine, tmp_path, os.getpid(), limited(group))
    row = here.sample()
    assert (row["cpus"], row["ram_gb"], row["ram_limit_gb"], "cpu" in row) == (4.0, 8.0, 16.0, False)
    now += 2
    machine.moved = 100_000_000
    files(group, cpu__stat="usage_usec 14000000\n")
    row = here.sample()
    assert (row["cpu"], row["disk_read_mb_s"], row["disk_write_mb_s"]) == (0.5, 50.0, 100.0)
    assert (row["net_rx_mbps"], row["net_tx_mbps"]) == (800.0, 0.0), "of both cards, and not of the bridge"


def test_the_group_of_version_2(tmp_path: Path) -> None:
    mount = files(tmp_path / "sys/fs/cgroup", cgroup__controllers="cpu memory")
    files(mount / "a", memory__max="max", memory__current="7", cpu__max="max 100000")
    files(
        mount / "a/b",
        memory__max="max",
        memory__current="5",
        cpu__max="150000 100000",
        cpu__stat="usage_usec 3000000\n",
    )
    files(tmp_path / "proc/self", cgroup="0::/a/b\n")
    group = find_cgroup(tmp_path)
    assert (group.memory_limit, group.memory_used(), group.cpus, group.cpu_seconds()) == (None, None, 1.5, 3.0)
    files(mount / "a", memory__max="1000")
    group = find_cgroup(tmp_path)
    assert (group.memory_limit, group.memory_used()) == (1000, 7), "of the group that the limit is of"


def test_the_groups_of_version_1(tmp_path: Path) -> None:
    mount = tmp_path / "sys/fs/cgroup"
    files(
        mount / "memory/docker/x",
        memory__limit_in_bytes="2000",
        memory__usage_in_bytes="900",
        memory__stat="inactive_file 1\ntotal_inactive_file 100\n",
    )
    files(mount / "memory", memory__limit_in_bytes="9223372036854771712", memory__usage_in_bytes="99999")
    files(mount / "cpu", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    files(mount / "cpuacct", cpuacct__usage="2500000000")
    files(tmp_path / "proc/self", cgroup="4:memory:/docker/x\n2:cpuacct:/\n1:cpu:/\n0::/\n")
    group = find_cgroup(tmp_path)
    assert (group.memory_limit, group.memory_used(), group.cpus, group.cpu_seconds()) == (2000, 800, None, 2.5)
    files(mount / "cpu", cpu__cfs_quota_us="50000")
    assert find_cgroup(tmp_path).cpus == 0.5


def test_a_machine_without_groups(tmp_path: Path) -> None:
    group = find_cgroup(tmp_path)
    assert (group.memory_limit, group.memory_used(), group.cpus, group.cpu_seconds()) == (None, None, None, None)
