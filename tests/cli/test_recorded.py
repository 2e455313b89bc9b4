"""Runs and jobs of an earlier launch (tests/recorded): a job on Vertex AI, and a run folder of the commit before the
folder's files became one package."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from launch_train import runfolder
from launcher.services.vertex import Vertex
from launcher.testing.googlecloud import Stage
from tests.command import launch

if TYPE_CHECKING:
    from tests.cli.cloudjobs import Job

RECORDED = Path(__file__).parents[1] / "recorded"
JOB = json.loads((RECORDED / "job.json").read_bytes())
RUN = JOB["request"]["labels"]["launch-run"]
FAILED = (Stage("JOB_STATE_RUNNING", 0), Stage("JOB_STATE_FAILED", 5, (3, "The replica exited with status 1.")))


@pytest.fixture
def older(job: Job) -> Job:
    """The same spec, and the job that an older launch created from it."""
    shutil.copy(RECORDED / "job.yaml", job.folder)
    Vertex("my-project", job.cloud.environ()).create_in(JOB["region"], JOB["request"])
    return job


def container(body: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = body["jobSpec"]["workerPoolSpecs"][0]["containerSpec"]
    return found


def test_the_active_job_of_an_older_launch_is_found(older: Job) -> None:
    found = older.data("vertex", "job.yaml", "--detach")
    assert (found["run"], len(older.created)) == (RUN, 1)


def test_a_resumed_run_keeps_its_image_and_its_command(job: Job, clock: Any) -> None:
    job.cloud.jobs.script = FAILED
    Vertex("my-project", job.cloud.environ()).create_in(JOB["region"], JOB["request"])
    shutil.copy(RECORDED / "job.yaml", job.folder)
    clock.advance(120)
    job.launch("vertex", "job.yaml", "--resume", RUN, "--detach")
    _, (_, body) = job.created
    assert container(body) == container(JOB["request"]) | {"env": container(body)["env"]}


def test_a_run_folder_of_an_earlier_launch_is_read(tmp_path: Path) -> None:
    """It was preempted at step 2 of 300."""
    shutil.copytree(RECORDED / "local", tmp_path, dirs_exist_ok=True)
    [folder] = (tmp_path / "runs").iterdir()
    state = json.loads(launch("status", folder, "-o", "json", cwd=tmp_path).out)
    assert (state["state"], state["progress"]["step"], state["progress"]["steps"]) == ("INTERRUPTED", 2, 300)
    assert state["story"] == ["Ran 3 s, interrupted at step 2"]
    metrics = json.loads(launch("metrics", folder, "-o", "json", cwd=tmp_path).out)
    assert [(row["step"], row["loss"] > 5) for row in metrics["rows"]] == [(1, True), (2, True)]
    assert [event["event"] for event in metrics["events"]] == ["start", "preempted", "checkpoint"]
    report = launch("report", folder, "--output", "report.html", cwd=tmp_path)
    assert (report.code, "2 of 300" in (tmp_path / "report.html").read_text()) == (0, True), report.shown


@pytest.mark.slow
def test_a_run_folder_of_an_earlier_launch_is_resumed(tmp_path: Path) -> None:
    """By the same command; its checkpoint was saved at step 2 of 300."""
    shutil.copytree(RECORDED / "local", tmp_path, dirs_exist_ok=True)
    [recorded] = (tmp_path / "runs").iterdir()
    plan = json.loads(launch("local", "local.yaml", "--dry-run", "-o", "json", cwd=tmp_path).out)
    folder = recorded.rename(recorded.with_name(plan["run"]))  # the folder's path is part of a local run's id
    for file in (folder / runfolder.PLAN, folder / "spec.yaml"):
        file.write_text(file.read_text().replace(recorded.name, folder.name).replace("/home/me/project", str(tmp_path)))
    ran = launch("local", "local.yaml", cwd=tmp_path)
    assert ran.code == 0, ran.shown
    lines = [line for path in sorted((folder / "metrics").iterdir()) for line in path.read_text().splitlines()]
    rows = [json.loads(line) for line in lines]
    assert [row["step"] for row in rows if row.get("event") == "resumed"] == [2], ran.shown
    assert max(row.get("step", 0) for row in rows) == 300


# --- What a newer launch made --------------------------------------------------------------------------------------


def test_the_run_folder_of_a_newer_launch_is_refused(job: Job) -> None:
    job.cloud.jobs.script = FAILED
    run = job.data("vertex", "job.yaml", code=3)["run"]
    name = f"runs/{run}/{runfolder.PLAN}"
    plan = json.loads(job.cloud.objects.buckets["my-bucket"][name].data)
    job.cloud.objects.put("my-bucket", name, json.dumps(plan | {"version": 2}).encode())
    for argv in (("follow", run), ("vertex", "--resume", run), ("vertex", "job.yaml", "--resume", run)):
        assert "format version 2" in job.launch(*argv, code=2).err
    assert len(job.created) == 1


def test_the_local_run_folder_of_a_newer_launch_is_refused(tmp_path: Path) -> None:
    (tmp_path / "fail.py").write_text("raise SystemExit(2)")
    (tmp_path / "job.yaml").write_text("name: a\nmachine: {type: l4}\nrun: {script: fail.py, launcher: python}\n")
    launch("local", "job.yaml", "--output", "runs", cwd=tmp_path)
    [plan] = (tmp_path / "runs").glob(f"*/{runfolder.PLAN}")
    plan.write_text(json.dumps(json.loads(plan.read_text()) | {"version": 2}))
    ran = launch("local", "job.yaml", "--output", "runs", cwd=tmp_path)
    assert (ran.code, "format version 2" in ran.err) == (2, True), ran.shown
