"""What the node reads from the run folder, and the claim of an attempt."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch_train import runfolder
from launch_train.common import contract
from launch_train.common.errors import SupersededError
from launch_train.common.storage import LocalFolder, MemoryFolder
from launch_train.node.run_record import DuplicateError, RunRecord, ended_jobs


@pytest.fixture
def folder(tmp_path: Path) -> LocalFolder:
    return LocalFolder(tmp_path)


def lock(folder: LocalFolder, attempt: int) -> None:
    folder.write(runfolder.attempt_lock(attempt), b"{}", create=True)


def claim(folder: LocalFolder, attempt: int) -> str:
    return str(json.loads(folder.read(runfolder.claim(attempt)))["job"])


def test_only_a_step_with_a_manifest_is_durable(folder: LocalFolder) -> None:
    record = RunRecord(folder)
    assert record.newest_checkpoint() == 0
    folder.write(runfolder.manifest(300, "0001-0000"), b"{}")
    folder.write(f"{runfolder.checkpoint_folder(400, '0001-0000')}/model-0000.part", b"x")
    folder.write(runfolder.LATEST, b"{}")
    assert record.newest_checkpoint() == 300
    folder.write(runfolder.manifest(300, "0001-0001"), b"{}")
    assert record.newest_checkpoint() == 300
    folder.write(runfolder.manifest(123456789, "0002-0000"), b"{}")
    folder.write(runfolder.manifest(99999999, "0002-0000"), b"{}")
    assert record.newest_checkpoint() == 123456789


def test_the_nodes_of_a_job_share_its_claim_and_another_job_is_a_duplicate(folder: LocalFolder) -> None:
    lock(folder, 1)
    lock(folder, 2)
    assert [RunRecord(folder).take("projects/p/jobs/1") for _ in range(3)] == [2, 2, 2]
    before = folder.list()
    with pytest.raises(DuplicateError, match="job projects/p/jobs/1 already runs attempt 2 of this run; exiting"):
        RunRecord(folder).take("projects/p/jobs/2")
    assert folder.list() == before
    assert claim(folder, 2) == "projects/p/jobs/1"


def test_a_job_keeps_its_attempt_until_another_job_has_claimed_a_later_one(folder: LocalFolder) -> None:
    lock(folder, 1)
    assert RunRecord(folder).take("old") == 1
    lock(folder, 2)
    assert RunRecord(folder).take("old") == 1  # a container that was started again: the lock alone is nobody's yet
    assert RunRecord(folder).take("new") == 2
    assert RunRecord(folder).take("new") == 2
    with pytest.raises(SupersededError, match="job new has taken over with attempt 2"):
        RunRecord(folder).take("old")


def test_without_a_job_id_or_a_run_folder_nothing_is_claimed(folder: LocalFolder) -> None:
    lock(folder, 3)
    assert RunRecord(folder).take(None) == RunRecord(folder).take("") == 3
    assert folder.list() == [runfolder.attempt_lock(3)]
    assert RunRecord(MemoryFolder()).take("job") == 1


def test_a_claim_that_says_nothing_is_another_jobs(folder: LocalFolder) -> None:
    folder.write(runfolder.claim(1), b"[]")
    with pytest.raises(DuplicateError):
        RunRecord(folder).take("job")


def test_a_job_without_a_lock_follows_those_that_have_ended(folder: LocalFolder) -> None:
    """Who launched it may not write in the folder: it has no lock, and the earlier job's claim is still there."""
    ended = ended_jobs({contract.ENDED: '["1"]'})
    assert RunRecord(folder).take("1", ended_jobs({contract.ENDED: "[]"})) == 1
    assert [RunRecord(folder).take("2", ended) for _ in range(2)] == [2, 2]
    before = folder.list()
    with pytest.raises(DuplicateError, match="job 2 already runs attempt 2") as told:
        RunRecord(folder).take("3", ended)
    assert told.value.exit == contract.Exit.SUPERSEDED, "whoever launched it would take a 0 for success"
    assert folder.list() == before
    assert RunRecord(folder).take("3", ended_jobs({contract.ENDED: '["1", "2"]'})) == 3


@pytest.mark.parametrize("text", ["", "{", "{}", "3"])
def test_a_request_that_says_nothing_of_ended_jobs(text: str) -> None:
    assert ended_jobs({contract.ENDED: text}) is None
    assert ended_jobs({}) is None
