"""Which host has a run, and runs on a host without a job there."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from launcher.jobs.job import RUN_LABEL, Job
from launcher.runs.on_host import remember
from tests.command import launch


@pytest.fixture
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "launch" / "hosts"


def test_launch_runs_names_the_hosts_of_recent_runs(records: Path, tmp_path: Path) -> None:
    for run, host in (("a-1", "box"), ("b-1", "lab"), ("c-1", "box"), ("d-1", "old")):
        remember(run, host)
    month_ago = time.time() - 30 * 86400
    os.utime(records / "d-1", (month_ago, month_ago))
    env = {"XDG_STATE_HOME": str(tmp_path)}
    message = launch("runs", env=env, cwd=tmp_path).err
    assert "(launch runs --on HOST)" in message
    assert "old" not in message
    remember("b-1", None)
    assert "not listed: runs on box (launch runs --on box)" in launch("runs", env=env, cwd=tmp_path).err
    assert "not listed" not in launch("runs", "--local", env=env, cwd=tmp_path).err


def test_a_run_on_a_host_without_a_job_names_the_command_that_starts_one() -> None:
    labels = {RUN_LABEL: "train-1a2b3c4d"}
    missing = Job(
        name="on/box/train-1a2b3c4d",
        region="box",
        state="INTERRUPTED",
        created=0.0,
        labels=labels,
        request={"script": "#!/bin/bash"},
    )
    assert (missing.is_missing, missing.command) == (True, "launch slurm SPEC --on box")
    assert not replace(missing, name="on/vm/0b475d30-3b18-528c-a196-7c06466a31bc").is_missing
