"""One job works on an attempt, whatever else was started for it: real processes on one run folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch_train import runfolder
from launch_train.common import contract
from launch_train.common.contract import Exit
from tests.train.nodes import Machines, machines


@pytest.fixture
def one(tmp_path: Path) -> Iterator[Machines]:
    with machines(tmp_path) as found:
        yield found


WORK = ("--command", "--", "sh", "-c", "touch worked-$CLOUD_ML_JOB_ID; echo worked")


def job(name: str) -> dict[str, str]:
    return {contract.JOB_ID: name}


def written(one: Machines) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in one.run_folder.rglob("*") if path.is_file()}


def test_of_ten_jobs_at_once_exactly_one_works(one: Machines) -> None:
    nodes = [one.start(*WORK, env=job(str(number))) for number in range(10)]
    assert [node.wait() for node in nodes] == [Exit.OK] * 10
    workers = [number for number in range(10) if (one.folder / f"worked-{number}").exists()]
    assert len(workers) == 1
    assert json.loads((one.run_folder / runfolder.claim(1)).read_text()) == {"job": str(workers[0])}
    line = f"launch: job {workers[0]} already runs attempt 1 of this run; exiting\n"
    assert [node.text for number, node in enumerate(nodes) if number not in workers] == [line] * 9


def test_a_duplicate_writes_nothing_and_a_restarted_container_goes_on(one: Machines) -> None:
    assert one.start(*WORK, env=job("mine")).wait() == Exit.OK
    before = written(one)
    late = one.start(*WORK, env=job("late"))
    assert late.wait() == Exit.OK
    assert written(one) == before
    assert not (one.folder / "worked-late").exists()
    again = one.start(*WORK, env=job("mine"))
    assert again.wait() == Exit.OK
    assert "worked\n" in again.text


def test_a_job_whose_run_was_taken_over_does_not_work_again(one: Machines) -> None:
    assert one.start(*WORK, env=job("old")).wait() == Exit.OK
    (one.run_folder / runfolder.attempt_lock(2)).write_text("{}")
    assert one.start(*WORK, env=job("new")).wait() == Exit.OK
    (one.folder / "worked-old").unlink()
    before = written(one)
    again = one.start(*WORK, env=job("old"))
    assert again.wait() == Exit.SUPERSEDED
    assert again.text == "launch: node 0: job new has taken over with attempt 2 (exit code 77)\n"
    assert written(one) == before
    assert not (one.folder / "worked-old").exists()


def test_without_locks_the_next_job_works_and_a_duplicate_is_no_success(one: Machines) -> None:
    assert one.start(*WORK, env={**job("first"), contract.ENDED: "[]"}).wait() == Exit.OK
    after = {contract.ENDED: json.dumps(["first"])}
    assert one.start(*WORK, env={**job("next"), **after}).wait() == Exit.OK
    assert (one.folder / "worked-next").exists()
    assert one.start(*WORK, env={**job("late"), **after}).wait() == Exit.SUPERSEDED
    assert not (one.folder / "worked-late").exists()
