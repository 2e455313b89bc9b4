"""What a request asks for, read back from it; and what makes two of them different runs."""

from __future__ import annotations

import pytest

from launcher.errors import JobFailed
from launcher.services.request import (
    differences,
    read,
    request_context,
    within_hours,
)
from tests.plan.planning import planned, request

RESERVED = "reservation:projects/p/zones/us-central1-a/reservations/mine"


def test_the_placement_is_read_from_a_request() -> None:
    plan = planned(provisioning=["spot"], machine={"type": "h100", "gpus": 8, "nodes": 2})
    found = request_context("my-project", "us-central1", plan.attempts[0].request)
    assert (found.project, found.region, found.provisioning, found.gpus) == ("my-project", "us-central1", "spot", 16)
    assert found.machine_type == read(plan.attempts[0].request).machine_type == plan.attempts[0].machine_type
    assert found.image == read(plan.attempts[0].request).image == (plan.image.uri if plan.image else "")
    assert found.output == plan.run_folder


def test_provisioning_models() -> None:
    for model in ("spot", "flex-start"):
        assert read(request(provisioning=[model])).provisioning == model
    reserved = {"type": "a3-highgpu-8g"}
    assert read(request(provisioning=[RESERVED], machine=reserved)).provisioning == RESERVED
    assert read(request(provisioning=["standard"], machine={"type": "l4", "gpus": 1})).provisioning == "standard"
    assert (read({}).provisioning, read({}).machine_type, read({}).image) == ("standard", "", "")


def test_another_placement_makes_no_difference() -> None:
    here = request(regions=["us-central1"], provisioning=["spot"], limits={"hours": 3}, labels={"a": "b"})
    there = request(regions=["us-east5"], provisioning=["standard"], limits={"hours": 4, "restarts": 1})
    assert differences(here, there) == ()


def test_differences_are_listed_by_field() -> None:
    one = request(env={"A": "1", "B": "x" * 200}, run={"module": "train", "config": {"steps": 10, "batch_size": 32}})
    other = request(
        env={"A": "2"},
        run={"module": "train", "config": {"steps": 20, "batch_size": 32, "optimizer": {"lr": 0.1}}},
        machine={"type": "h100", "gpus": 8, "nodes": 2},
        output="gs://elsewhere/runs",
    )
    assert [line for line in differences(one, other) if "NCCL" not in line] == [
        "gpus: 2 → 8",
        "nodes: 1 → 2",
        "output: gs://my-project-launch/runs → gs://elsewhere/runs",
        "run.config.steps: 10 → 20",
        "env.A: 1 → 2",
        f"env.B: {'x' * 100}… → (none)",
        "run.config.optimizer.lr: (none) → 0.1",
    ]


def test_differences_of_malformed_requests() -> None:
    assert differences(
        {"jobSpec": {"workerPoolSpecs": [{"containerSpec": {"env": [{"name": "LAUNCH_CONFIG", "value": "{"}]}}]}}, {}
    )
    assert differences({}, {}) == ()


def test_all_attempts_share_the_runs_hours() -> None:
    """What was billed before is taken off the timeout, to the second; nothing else changes."""
    whole = request(limits={"hours": 2})
    assert within_hours(whole, 0.0, "job-1") is whole
    later = within_hours(whole, 1800.2, "job-1")
    assert later["jobSpec"]["scheduling"]["timeout"] == "5399s"
    assert whole["jobSpec"]["scheduling"]["timeout"] == "7200s"
    scheduling = {**later["jobSpec"]["scheduling"], "timeout": "7200s"}
    assert {**later, "jobSpec": {**later["jobSpec"], "scheduling": scheduling}} == whole
    with pytest.raises(JobFailed, match=r"1\.99 of limits\.hours 2") as refused:
        within_hours(whole, 7150.0, "job-1")
    assert refused.value.hint.endswith("--resume job-1 --hours 4")
