"""One start of a run may write its checkpoints: the newest."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path

import pytest

from launch_train import runfolder
from launch_train.checkpointing import lease
from launch_train.checkpointing.lease import Lease
from launch_train.common.errors import OutputError, SupersededError
from launch_train.common.storage import LocalFolder


def test_a_later_start_takes_over_and_keeps_the_pointer(tmp_path: Path) -> None:
    storage = LocalFolder(tmp_path)
    first = Lease(storage, "0001-0000")
    first.advance(10, "manifest")
    second = Lease(storage, "0001-0001")
    held, _ = lease.read(storage)
    assert (held["start"], held["step"], held["manifest"]) == ("0001-0001", 10, "manifest")
    with pytest.raises(SupersededError, match="attempt 0001, generation 0001 has taken over this run"):
        first.check()
    with pytest.raises(SupersededError, match=r"this start \(0001-0000\) exits"):
        first.advance(20, "other")
    second.check()
    second.advance(30, "its own")
    assert lease.read(storage)[0]["step"] == 30


def test_a_swap_that_only_seemed_to_fail_is_no_other_start(tmp_path: Path) -> None:
    """It had its effect, but we heard of an error: the pointer has another version, and is ours."""

    class Deaf(LocalFolder):
        def swap(self, name: str, data: bytes, version: str) -> str:
            super().swap(name, data, version)
            raise OutputError("no answer")

    mine = Lease(LocalFolder(tmp_path), "0001-0000")
    with pytest.raises(OutputError):
        mine.advance(10, "manifest", Deaf(tmp_path))
    mine.check()
    mine.advance(20, "next")
    assert lease.read(LocalFolder(tmp_path))[0]["step"] == 20
    again = Lease(LocalFolder(tmp_path), "0001-0001")
    with pytest.raises(OutputError):
        again.advance(30, "manifest", Deaf(tmp_path))
    again.advance(40, "later")
    assert lease.read(LocalFolder(tmp_path))[0]["step"] == 40


@pytest.mark.parametrize("late", ["0001-0004", "0001-0005"])
def test_the_same_or_an_older_start_is_refused(tmp_path: Path, late: str) -> None:
    Lease(LocalFolder(tmp_path), "0001-0005")
    with pytest.raises(SupersededError):
        Lease(LocalFolder(tmp_path), late)


def test_a_damaged_pointer_stops_nobody(tmp_path: Path) -> None:
    """Readers trust manifests only."""
    storage = LocalFolder(tmp_path)
    for text in (b"", b"{", b"[]", b'{"start": 3}', b"\xff"):
        storage.write(runfolder.LATEST, text)
        Lease(storage, "0001-0000").advance(1, "manifest")


def test_a_start_of_the_same_name_that_took_over_a_damaged_pointer_ends_the_first(tmp_path: Path) -> None:
    storage = LocalFolder(tmp_path)
    first = Lease(storage, "0001-0000")
    storage.write(runfolder.LATEST, b"{")
    second = Lease(storage, "0001-0000")
    with pytest.raises(SupersededError, match=r"another process writes this run as the same start \(0001-0000\)"):
        first.check()
    with pytest.raises(SupersededError):
        first.advance(1, "manifest")
    second.advance(1, "manifest")


def taken_at_once(folder: Path, starts: list[str]) -> list[Lease]:
    """The leases that were taken by as many threads at one moment."""
    taken, gate = list[Lease](), threading.Barrier(len(starts))

    def take(start: str) -> None:
        gate.wait()
        with suppress(SupersededError):
            taken.append(Lease(LocalFolder(folder), start))

    threads = [threading.Thread(target=take, args=(start,)) for start in starts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return taken


def test_of_many_at_once_with_one_name_one_wins(tmp_path: Path) -> None:
    (won,) = taken_at_once(tmp_path, ["0001-0000"] * 8)
    won.check()


def test_of_many_at_once_the_newest_wins(tmp_path: Path) -> None:
    *others, newest = sorted(
        taken_at_once(tmp_path, [runfolder.start_name(1, number) for number in range(6)]), key=lambda one: one.start
    )
    assert newest.start == "0001-0005"
    newest.check()
    for other in others:
        with pytest.raises(SupersededError):
            other.check()


def test_the_next_name_for_who_has_none(tmp_path: Path) -> None:
    storage = LocalFolder(tmp_path)
    assert lease.acquire(storage, {}).start == "0001-0001"
    Lease(storage, "0003-0041")
    assert lease.acquire(storage, {}).start == "0003-0042"
