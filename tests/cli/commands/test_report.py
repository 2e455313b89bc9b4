"""`launch report`: of runs on this machine, and of one in a bucket."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch_train.common.storage import open_storage
from tests.cli.cloudjobs import Job
from tests.command import launch
from tests.train.report.folders import preempted


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder with a run in runs/."""
    preempted(tmp_path / "runs" / "run-0123abcd")
    return tmp_path


@pytest.mark.parametrize("run", ["run", "run-0123abcd", "runs/run-0123abcd"])
def test_a_run_here_gets_it_in_its_folder(here: Path, run: str) -> None:
    ran = launch("report", run, cwd=here)
    assert ran.code == 0, ran.shown
    path = here / "runs" / "run-0123abcd" / "report.html"
    assert (here / ran.out.strip()).resolve() == path
    assert path.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert path.stat().st_mode & 0o777 == 0o644


def test_several_runs_in_one_file(here: Path) -> None:
    preempted(here / "runs" / "run-00000001")
    ran = launch("report", "runs/run-0123abcd", "runs/run-00000001", "-o", "sub/both.html", cwd=here)
    assert ran.code == 0, ran.shown
    assert "What differs" in (here / "sub" / "both.html").read_text(encoding="utf-8")
    assert not [*here.glob("sub/.report-*")]


def test_what_is_wrong_is_told(here: Path) -> None:
    (here / "empty" / "attempts").mkdir(parents=True)
    for argv, code in (
        (["empty"], 2),
        (["run", "-o", "json"], 2),
        (["run", "-o", "runs/run-0123abcd/plan.json/x"], 1),
        ([], 2),
    ):
        ran = launch("report", *argv, cwd=here)
        assert ran.code == code, ran.shown
        assert "Traceback" not in ran.err


def test_of_a_job_on_vertex(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    run = job.data("vertex", "job.yaml")["run"]
    for name, value in job.env.items():
        monkeypatch.setenv(name, value)
    row = b'{"step": 1, "loss": 2.5, "time": 1750000000.0}\n'
    open_storage(f"gs://my-bucket/runs/{run}").write("metrics/0001-0000-0000-000000.jsonl", row)
    ran = job.launch("report", run)
    path = job.folder / ran.out.strip()
    assert path.name == f"{run}-report.html"
    assert "2.5000" in path.read_text(encoding="utf-8")
