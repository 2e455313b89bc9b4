"""A sweep from Python."""

from __future__ import annotations

from typing import Any

import pytest

from launcher import api
from launcher.errors import LaunchError, UsageError
from launcher.testing.googlecloud import Fault, Status
from tests.cli.cloudjobs import CREATE, Job


def test_a_sweep_is_planned_and_submitted(user: Job) -> None:
    plan = api.sweep("job.yaml", {"run.config.steps": [10, 20]}, changes={"run.config.batch_size": 8})
    assert not user.cloud.requests, "a plan sends nothing"
    assert [one.values for one in plan.points] == [{"run.config.steps": 10}, {"run.config.steps": 20}]
    runs = api.submit_sweep(plan, yes=True)
    assert [run.id for run in runs] == [one.run for one in plan.points]
    assert [run.wait().state for run in runs] == ["SUCCEEDED"] * 2
    api.submit_sweep(plan, yes=True)
    assert len(user.created) == 2


def test_ranges_and_what_is_refused(user: Job) -> None:
    spec = {"name": "job", "machine": {"type": "l4"}, "regions": ["us-central1"]}
    plan = api.sweep(spec, {"run.config.optimizer.lr": "log(1e-5,1e-2)"}, random=3)
    assert len(plan.points) == 3
    refused: list[dict[str, Any]] = [
        {},
        {"run.config.steps": []},
        {"run.config.steps": "10"},
        {"run.config.stepz": [1, 2]},
    ]
    for values in refused:
        with pytest.raises(UsageError):
            api.sweep("job.yaml", values)
    with pytest.raises(UsageError, match="local"):
        api.submit_sweep(
            api.sweep("job.yaml", {"run.config.steps": [1, 2]}, target="local", changes={"output": "runs"})
        )
    assert not user.cloud.requests


def test_points_that_cannot_be_submitted_are_told_and_if_none_can_that_is_an_error(user: Job) -> None:
    refused = Status(403, message="Permission 'aiplatform.customJobs.create' denied", info="IAM_PERMISSION_DENIED")
    user.cloud.faults.add(Fault(CREATE, refused, times=None))
    plan = api.sweep("job.yaml", {"run.config.steps": [10, 20]})
    with pytest.raises(LaunchError):
        api.submit_sweep(plan, yes=True, preflight=False)
    user.cloud.faults.clear()
    user.cloud.faults.add(Fault(CREATE, refused, times=1))
    said: list[str] = []
    more = api.sweep("job.yaml", {"run.config.steps": [30, 40]}, name="other")
    runs = api.submit_sweep(more, yes=True, preflight=False, on_event=lambda event: said.append(str(event)))
    assert len(runs) == 2
    assert any("customJobs.create" in text for text in said)
