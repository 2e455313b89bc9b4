"""A moved run goes on in its new place alone, whatever interrupts the move."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launch_train import runfolder
from launch_train.common.errors import SupersededError
from launch_train.common.storage import LocalFolder
from launch_train.node.run_record import RunRecord
from launcher.errors import LaunchError, UsageError
from launcher.runs.context import LocalContext
from launcher.runs.find import FoundRun, exact_run
from launcher.runs.ledger import Ledger
from launcher.runs.moving import move_run
from launcher.services.local import run_folder
from launcher.services.local.run_folder_job import read_job

RUN = "tiny-0123abcd"


def a_run(folder: Path) -> FoundRun:
    storage = LocalFolder(folder / RUN)
    storage.write("attempts/0001.json", json.dumps({"time": 1.0}).encode())
    storage.write("metrics/0001-0000-0000-000000.jsonl", b'{"step": 1, "loss": 1.0}\n')
    storage.write(runfolder.LATEST, b'{"step": 1, "nonce": "n"}')
    storage.write(runfolder.PLAN, json.dumps({"run": RUN}).encode())
    return found(folder)


def found(folder: Path) -> FoundRun:
    job = read_job(folder / RUN)
    assert job
    return FoundRun(id=RUN, jobs=(job,), context=LocalContext())


def content(folder: Path) -> dict[str, bytes]:
    storage = LocalFolder(folder / RUN)
    return {name: storage.read(name) for name in storage.list()}


def say(_text: str) -> None:
    pass


def test_a_moved_run_is_whole_there_and_closed_here(tmp_path: Path) -> None:
    run, before = a_run(tmp_path / "a"), content(tmp_path / "a")
    assert move_run(run, str(tmp_path / "b"), say) == str(tmp_path / "b" / RUN)
    assert content(tmp_path / "b") == before
    with (
        pytest.raises(UsageError, match=f"was moved to {tmp_path}/b/{RUN}; continue it there"),
        run_folder.opened(str(tmp_path / "a" / RUN)),
    ):
        pass
    with pytest.raises(SupersededError, match="was moved"):
        RunRecord(LocalFolder(tmp_path / "a" / RUN)).take("job", None)
    ledger = Ledger(LocalFolder(tmp_path / "a" / RUN))
    ledger.entries()
    assert "was moved" in ledger.closed
    with run_folder.opened(str(tmp_path / "b" / RUN)):
        pass


def test_a_run_can_come_back_with_what_it_did_meanwhile(tmp_path: Path) -> None:
    move_run(a_run(tmp_path / "a"), str(tmp_path / "b"), say)
    there = LocalFolder(tmp_path / "b" / RUN)
    there.write("metrics/0002-0000-0000-000000.jsonl", b'{"step": 2, "loss": 0.5}\n')
    there.delete("metrics/0001-0000-0000-000000.jsonl")
    after = content(tmp_path / "b")
    move_run(found(tmp_path / "b"), str(tmp_path / "a"), say)
    assert content(tmp_path / "a") == after
    with run_folder.opened(str(tmp_path / "a" / RUN)):
        pass
    with pytest.raises(UsageError, match="was moved"), run_folder.opened(str(tmp_path / "b" / RUN)):
        pass


def test_an_interrupted_move_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, before = a_run(tmp_path / "a"), content(tmp_path / "a")
    written: list[str] = []
    write = LocalFolder.write

    def failing(self: LocalFolder, name: str, data: Any, **options: Any) -> str:
        if self.folder == tmp_path / "b" / RUN:
            written.append(name)
            if name == runfolder.LATEST:
                raise KeyboardInterrupt
        return write(self, name, data, **options)

    with monkeypatch.context() as patch:
        patch.setattr(LocalFolder, "write", failing)
        with pytest.raises(KeyboardInterrupt):
            move_run(run, str(tmp_path / "b"), say)
    for place in ("a", "b"):  # neither is the run now
        with pytest.raises(UsageError, match="moved to"), run_folder.opened(str(tmp_path / place / RUN)):
            pass
    with pytest.raises(UsageError, match=f"was moved to {tmp_path}/b/{RUN}"):
        move_run(run, str(tmp_path / "c"), say)
    move_run(run, str(tmp_path / "b"), say)
    assert content(tmp_path / "b") == before


def test_a_damaged_file_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, read_version = a_run(tmp_path / "a"), LocalFolder.read_version

    def damaged(self: LocalFolder, name: str) -> tuple[bytes, str]:
        data, version = read_version(self, name)
        return (data.replace(b"1.0", b"1.1"), version) if name.startswith("metrics") else (data, version)

    monkeypatch.setattr(LocalFolder, "read_version", damaged)
    with pytest.raises(LaunchError, match="was damaged on its way"):
        move_run(run, str(tmp_path / "b"), say)


def test_another_run_in_the_way_stays(tmp_path: Path) -> None:
    run, _ = a_run(tmp_path / "a"), a_run(tmp_path / "b")
    with pytest.raises(UsageError, match="has another run"):
        move_run(run, str(tmp_path / "b"), say)
    with pytest.raises(UsageError, match="is already in"):
        move_run(run, str(tmp_path / "a"), say)
    with run_folder.opened(str(tmp_path / "a" / RUN)):
        pass


def test_a_repeated_move_leaves_what_the_run_did_since(tmp_path: Path) -> None:
    move_run(a_run(tmp_path / "a"), str(tmp_path / "b"), say)
    there = LocalFolder(tmp_path / "b" / RUN)
    there.write("metrics/0002-0000-0000-000000.jsonl", b'{"step": 2, "loss": 0.5}\n')
    move_run(found(tmp_path / "a"), str(tmp_path / "b"), say)
    assert "metrics/0002-0000-0000-000000.jsonl" in there.list()
    move_run(found(tmp_path / "b"), str(tmp_path / "c"), say)
    move_run(found(tmp_path / "a"), str(tmp_path / "b"), say)
    with pytest.raises(UsageError, match="was moved"), run_folder.opened(str(tmp_path / "b" / RUN)):
        pass


def test_a_link_is_left_out(tmp_path: Path) -> None:
    run, said = a_run(tmp_path / "a"), list[str]()
    (tmp_path / "a" / RUN / "last.ckpt").symlink_to("plan.json")
    move_run(run, str(tmp_path / "b"), said.append)
    assert said == ["last.ckpt was left out: it is a link, a pipe or a device"]
    assert not (tmp_path / "b" / RUN / "last.ckpt").exists()


def test_an_id_follows_the_moved_run_and_a_path_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`launch rm runs/RUN` deletes the closed folder, never the run that has moved away."""
    monkeypatch.chdir(tmp_path)
    move_run(a_run(tmp_path / "runs"), str(tmp_path / "b"), say)
    by_id, by_path = exact_run(RUN), exact_run(f"runs/{RUN}")
    assert by_id
    assert by_path
    assert (by_id.folder, by_path.folder) == (str(tmp_path / "b" / RUN), str(tmp_path / "runs" / RUN))
