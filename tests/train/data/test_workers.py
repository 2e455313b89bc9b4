"""How many processes make a rank's batches."""

from __future__ import annotations

import os
from pathlib import Path

from launch_train.common.config import Loader
from launch_train.data.loader import Resources, choose_workers, cores


def many(loader: Loader, *here: float, need: int = 1000) -> tuple[int, int, str, str]:
    found = choose_workers(loader, Resources(int(here[0]), int(here[1]), here[2]), need)
    return found.workers, found.prefetch, found.choice.chosen, found.choice.why


def test_as_many_processes_as_there_are_cores_left() -> None:
    assert many(Loader(), 12, 1, 1e9) == (8, 2, "8 processes", "12 cores for 1 rank")
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


def test_a_container_may_have_a_part_of_the_cores(tmp_path: Path) -> None:
    limit = tmp_path / "cpu.max"
    limit.write_text("100000 100000\n")
    assert cores(limit) == 1
    limit.write_text("max 100000\n")
    assert cores(limit) == cores(tmp_path / "nothing") == len(os.sched_getaffinity(0))
