"""How many processes make a rank's batches."""

from __future__ import annotations

import os
from pathlib import Path

from launch_train.common.cgroup import Cgroup, cores, free_memory_bytes
from launch_train.common.config import Loader
from launch_train.data.loader import Resources, choose_workers


def many(
    loader: Loader, *here: float, need: int = 1000, memory: float = 1e12, dataset: int = 0
) -> tuple[int, int, str, str]:
    found = choose_workers(loader, Resources(int(here[0]), int(here[1]), here[2], memory), need, dataset)
    return found.workers, found.prefetch, found.choice.chosen, found.choice.why


def test_as_many_processes_as_there_are_cores_left() -> None:
    assert many(Loader(), 208, 8, 1e9) == (25, 2, "25 processes", "208 cores for 8 ranks")  # a3-highgpu-8g
    assert many(Loader(), 12, 1, 1e9) == (11, 2, "11 processes", "12 cores for 1 rank")
    assert many(Loader(), 12, 4, 1e9) == (2, 2, "2 processes", "12 cores for 4 ranks")
    assert many(Loader(), 1, 1, 1e9) == (0, 2, "main process", "1 cores for 1 rank")
    assert many(Loader(), 2, 8, 1e9)[0] == 0
    assert many(Loader(workers=20, prefetch=5), 2, 1, 1e9) == (20, 5, "20 processes", "set in the spec")
    assert many(Loader(workers=0), 16, 1, 1e9)[2] == "main process"


def test_no_more_than_shared_memory_has_room_for() -> None:
    tight = {"need": 10 << 20}
    assert many(Loader(), 9, 1, 64 << 20, **tight)[:2] == (2, 2)
    assert many(Loader(), 9, 2, 64 << 20, **tight)[:2] == (1, 2)
    assert many(Loader(workers=8), 9, 4, 64 << 20, **tight)[:2] == (1, 1)
    assert many(Loader(), 9, 1, 5 << 20, **tight) == (0, 1, "main process", "/dev/shm has only 5.24MB free")


def test_half_of_the_free_memory_bounds_the_number_of_workers() -> None:
    """A container with 4 GB on a machine of 64 cores; and a dataset that each worker has a copy of."""
    assert many(Loader(), 64, 1, 1e9, memory=4e9) == (19, 2, "19 processes", "4.00GB of memory free, 105MB per worker")
    assert many(Loader(), 208, 8, 1e9, memory=1e12, dataset=int(2e10))[:2] == (3, 2)
    assert many(Loader(workers=64), 64, 1, 1e9, memory=4e9)[0] == 64


def test_the_free_memory_is_the_containers_or_the_machines(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  900 kB\nMemAvailable:  300 kB\n")
    limited = Cgroup(memory=(tmp_path,))
    (tmp_path / "memory.max").write_text("250000\n")
    (tmp_path / "memory.current").write_text("90000\n")
    assert free_memory_bytes(Cgroup(), meminfo) == 307_200
    assert free_memory_bytes(limited, meminfo) == 160_000
    assert free_memory_bytes(Cgroup(), tmp_path / "nothing") == float("inf")


def test_a_container_may_have_a_part_of_the_cores(tmp_path: Path) -> None:
    group = tmp_path / "sys/fs/cgroup"
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    group.mkdir(parents=True)
    (group / "cgroup.controllers").touch()
    (group / "cpu.max").write_text("100000 100000\n")
    assert cores(tmp_path) == 1
    (group / "cpu.max").write_text("max 100000\n")
    assert cores(tmp_path) == cores(tmp_path / "nothing") == len(os.sched_getaffinity(0))
