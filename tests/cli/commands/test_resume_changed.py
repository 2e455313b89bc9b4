"""`launch vertex SPEC --resume RUN` accepts more steps, settings that change no past step, and another machine; nothing
else."""

from __future__ import annotations

import json
from typing import Any

import pytest

from launch_train.common import contract
from tests.cli.cloudjobs import FULL, RUNS, WELL, Job, scripts


def configs(job: Job) -> list[dict[str, Any]]:
    """The run.config of each job that was created."""
    found = []
    for _, body in job.created:
        env = body["jobSpec"]["workerPoolSpecs"][0]["containerSpec"]["env"]
        found.append(json.loads(next(one["value"] for one in env if one["name"] == contract.CONFIG)))
    return found


@pytest.fixture
def run(job: Job) -> str:
    """A run of 10 steps that has succeeded."""
    name: str = job.data("vertex", "job.yaml")["run"]
    return name


def test_more_steps_and_other_intervals(job: Job, run: str) -> None:
    job.write(run={"config": {"steps": 20, "eval": {"every": 5}, "checkpoint": {"minutes": 3}}})
    ran = job.launch("vertex", "job.yaml", "--resume", run)
    assert f"{run} succeeded" in ran.out
    assert "steps: 10 → 20" in ran.err
    assert "eval.every: (none) → 5" in ran.err
    assert "learning-rate schedule" in ran.err
    assert [one["steps"] for one in configs(job)] == [10, 20]
    assert {body["labels"]["launch-run"] for _, body in job.created} == {run}
    images = [body["jobSpec"]["workerPoolSpecs"][0]["containerSpec"]["imageUri"] for _, body in job.created]
    assert len(set(images)) == 1


@pytest.mark.slow
def test_afterwards_it_is_the_runs_own_spec(job: Job, run: str) -> None:
    """Following, resuming without a spec, and extending it once more; the older spec is no longer this run's."""
    job.write(run={"config": {"steps": 20}})
    job.launch("vertex", "job.yaml", "--resume", run)
    assert f"{run} succeeded" in job.launch("follow", run).out
    job.launch("vertex", "--resume", run)
    job.launch("vertex", "job.yaml", "--resume", run)
    job.write(run={"config": {"steps": 30}})
    job.launch("vertex", "job.yaml", "--resume", run)
    assert [one["steps"] for one in configs(job)] == [10, 20, 20, 20, 30]
    job.write(run={"config": {"steps": 10}})
    assert "run.config.steps: 30 → 10" in job.launch("vertex", "job.yaml", code=2).err
    assert "run.config.steps: 30 → 10" in job.launch("vertex", "job.yaml", "--resume", run, code=2).err
    assert len(job.created) == 5


def test_every_attempt_of_the_resume_may_follow(job: Job, run: str) -> None:
    """A region without capacity: the next attempt is the same launch's, which then resumes nothing."""
    scripts(job.cloud, FULL, WELL)
    job.write(run={"config": {"steps": 20}})
    job.launch("vertex", "job.yaml", "--resume", run)
    assert [one["steps"] for one in configs(job)] == [10, 20, 20]


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        {"run": {"config": {"steps": 20, "seed": 2}}},
        {"run": {"config": {"steps": 20, "batch_size": 48}}},
        {"run": {"config": {"steps": 20, "optimizer": {"lr": 0.1}}}},
        {"run": {"config": {"steps": 9}}},
        {"run": {"config": {"steps": 20}}, "env": {"MODE": "other"}},
        {"run": {"config": {"steps": 20, "seed": 2}}, "machine": {"type": "l4", "gpus": 4}},
    ],
)
def test_anything_else_is_refused(job: Job, run: str, change: dict[str, Any]) -> None:
    job.write(**change)
    ran = job.launch("vertex", "job.yaml", "--resume", run, code=2)
    assert f"{run} has another spec or code" in ran.err
    assert " → " in ran.err
    assert "resuming with" not in ran.err
    assert len(job.created) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "lines"),
    [
        ({"machine": {"type": "l4", "gpus": 4}}, ["gpus: 2 → 4", "machine type: g2-standard-24 → g2-standard-48"]),
        ({"machine": {"type": "l4", "gpus": 2, "nodes": 2}}, ["nodes: 1 → 2"]),
        (
            {"machine": {"type": "a100-40gb", "gpus": 2}, "regions": ["us-central1"]},
            ["machine type: g2-standard-24 → a2-highgpu-2g"],
        ),
        ({"regions": ["us-east4", "europe-west4"]}, ["region: us-central1 → us-east4, europe-west4"]),
        ({"provisioning": ["spot"]}, ["provisioning: standard → spot"]),
        (
            {"machine": {"type": "l4", "gpus": 4}, "run": {"config": {"steps": 20}}},
            ["gpus: 2 → 4", "steps: 10 → 20", "machine type: g2-standard-24 → g2-standard-48"],
        ),
    ],
)
def test_another_machine(job: Job, run: str, change: dict[str, Any], lines: list[str]) -> None:
    job.write(**change)
    ran = job.launch("vertex", "job.yaml", "--resume", run, "--yes")
    assert [line.split("with ")[1] for line in ran.err.splitlines() if "resuming with" in line] == lines
    assert f"{run} succeeded" in ran.out
    first, second = (body["jobSpec"]["workerPoolSpecs"][0] for _, body in job.created)
    assert first["containerSpec"]["imageUri"] == second["containerSpec"]["imageUri"]
    job.launch("follow", run)  # from now on it is the run's own
    assert "resuming with" not in job.launch("vertex", "job.yaml", "--resume", run, "--yes").err


def test_another_number_of_processes_of_a_script(job: Job) -> None:
    (job.folder / "mine.py").write_text("print(1)\n")
    own = {"run": {"command": ["python", "mine.py"]}}
    job.write(**own)
    run = job.data("vertex", "job.yaml")["run"]
    job.write(**own, machine={"type": "l4", "gpus": 4})
    ran = job.launch("vertex", "job.yaml", "--resume", run, "--yes")
    assert "resuming with gpus: 2 → 4" in ran.err
    assert "your program" in ran.err
    job.write(run={"command": ["python", "other.py"]}, machine={"type": "l4", "gpus": 8})
    assert " → " in job.launch("vertex", "job.yaml", "--resume", run, code=2).err
    assert len(job.created) == 2


def test_the_place_of_an_active_job_does_not_change(job: Job) -> None:
    """It is the same run: its job is followed where it is."""
    job.cloud.jobs.script = RUNS
    run = job.data("vertex", "job.yaml", "--detach")["run"]
    job.write(provisioning=["spot"])
    ran = job.launch("vertex", "job.yaml", "--resume", run, "--detach")
    assert ("resuming with" in ran.err, len(job.created)) == (False, 1)


def test_without_resume_it_is_another_run(job: Job, run: str) -> None:
    job.write(run={"config": {"steps": 20}})
    assert job.data("vertex", "job.yaml")["run"] != run
    ran = job.launch("vertex", "job.yaml", "--run-id", run, code=2)
    assert "run.config.steps: 10 → 20" in ran.err
    assert len(job.created) == 2


def test_a_running_job_is_not_replaced(job: Job) -> None:
    """A run never has two jobs: the new settings must wait."""
    job.cloud.jobs.script = RUNS
    run = job.data("vertex", "job.yaml", "--detach")["run"]
    job.write(run={"config": {"steps": 20}})
    ran = job.launch("vertex", "job.yaml", "--resume", run, "--detach", code=2)
    assert "still running" in ran.err
    assert f"launch cancel {run}" in ran.err
    assert len(job.created) == 1


def test_a_run_whose_job_can_no_longer_be_listed(job: Job, run: str) -> None:
    """Vertex AI deletes old jobs: the folder knows the settings."""
    job.cloud.jobs.jobs.clear()
    job.write(run={"config": {"steps": 20}})
    job.launch("vertex", "job.yaml", "--resume", run)
    assert [one["steps"] for one in configs(job)] == [10, 20]
