"""The lock of an attempt, on a local run folder."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from launch_train import runfolder
from launch_train.common.storage import open_storage
from launcher.services.local.attempts import (
    End,
    lock,
    newest_attempt,
    newest_checkpoint,
    read_end,
    read_facts,
    write_end,
)


def test_attempts_are_numbered_and_say_what_they_are(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    assert [lock(storage, {"region": "local"}), lock(storage, {"region": "local"})] == [1, 2]
    body = json.loads((tmp_path / "attempts" / "0002.json").read_text())
    assert body["region"] == "local"
    assert body["time"] > 0


def test_ten_at_once_get_ten_numbers(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    with ThreadPoolExecutor(10) as pool:
        numbers = list(pool.map(lambda _: lock(storage, {}), range(10)))
    assert sorted(numbers) == list(range(1, 11))


def test_an_end_record_is_not_an_attempt(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    assert (newest_attempt(storage), read_end(storage, 1)) == (0, None)
    end = End(exit_codes={"a": 0, "b": -9}, seconds=1.5, time=12.0)
    write_end(storage, lock(storage, {"job": "x"}), end)
    assert (newest_attempt(storage), read_end(storage, 1)) == (1, end)
    assert read_facts(storage, 1)["job"] == "x"
    assert not end.succeeded
    assert End(exit_codes={"a": 0}, seconds=0.0, time=0.0).succeeded
    assert not End(exit_codes={}, seconds=0.0, time=0.0).succeeded


def test_unreadable_records_are_ignored(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    for text in (b"", b"[]", b"{", b'{"exit_codes": 3}'):
        storage.write(runfolder.attempt_end(1), text)
        storage.write(runfolder.attempt_lock(1), text if text != b'{"exit_codes": 3}' else b"[1]")
        assert read_end(storage, 1) is None
        assert read_facts(storage, 1) == {}


def test_the_newest_checkpoint_is_the_highest_step_with_a_manifest(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    assert newest_checkpoint(storage) is None
    for step, start in ((9, "0001-0000"), (100, "0002-0001"), (20, "0003-0000")):
        storage.write(runfolder.manifest(step, start), b"{}")
    storage.write(f"{runfolder.checkpoint_folder(300, '0003-0000')}/0.distcp", b"")
    storage.write(runfolder.LATEST, b"{}")
    assert newest_checkpoint(storage) == 100
