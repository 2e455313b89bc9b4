"""`limits.wait_total`: the wait for machines over all attempts of a run, on a clock of its own."""

from __future__ import annotations

import json
from typing import Any

from launch_train import runfolder
from launcher.testing.googlecloud import FakeClock
from tests.cli.cloudjobs import FULL, WAITS, WELL, Job, scripts

REGIONS = ["us-central1", "us-east4", "us-east1"]


def waited(job: Job) -> list[float]:
    """Seconds that each attempt waited, as the run folder has them."""
    run = job.data("status", "job")["run"]
    objects = job.cloud.objects.buckets["my-bucket"]
    names = sorted(
        name for name in objects if name.startswith(f"runs/{run}/{runfolder.ATTEMPTS}/") and "verdict" in name
    )
    return [json.loads(objects[name].data)["waited"] for name in names]


def max_waits(job: Job) -> list[str | None]:
    """What each request said of its own wait."""
    return [body["jobSpec"]["scheduling"].get("maxWaitDuration") for _, body in job.created]


def write(job: Job, *, flex: bool = False, **limits: Any) -> None:
    job.write(regions=REGIONS, provisioning=["flex-start" if flex else "standard"], limits=limits)


def test_the_plan_shows_the_maximum_wait(job: Job) -> None:
    write(job, flex=True)
    assert job.data("vertex", "job.yaml", "--dry-run")["limits"]["wait_at_most_seconds"] == 18 * 3600
    assert "18 h" in job.launch("vertex", "job.yaml", "--dry-run").out
    write(job, flex=True, wait_total="7h")
    assert job.data("vertex", "job.yaml", "--dry-run")["limits"]["wait_at_most_seconds"] == 7 * 3600
    assert "7 h" in job.launch("vertex", "job.yaml", "--dry-run").out


def test_the_second_attempt_gets_the_remaining_wait(job: Job, clock: FakeClock) -> None:
    write(job, wait="10m", wait_total="15m")
    job.cloud.jobs.script = WAITS
    began = clock()
    ran = job.launch("vertex", "job.yaml", code=5)
    assert [region for region, _ in job.created] == REGIONS[:2]
    assert 15 * 60 <= clock() - began < 17 * 60
    assert "limits.wait_total" in ran.err
    first, second = waited(job)
    assert (600 <= first < 660, 240 <= second <= 300) == (True, True)


def test_a_flex_start_request_has_the_remaining_wait(job: Job) -> None:
    write(job, flex=True, wait="10m", wait_total="15m")
    job.cloud.jobs.script = WAITS
    job.launch("vertex", "job.yaml", code=5)
    first, second = max_waits(job)
    assert first == "600s"
    assert 120 <= int((second or "").removesuffix("s")) <= 300


def test_an_unused_wait_is_left_to_later_attempts(job: Job) -> None:
    write(job, wait="10m", wait_total="15m")
    scripts(job.cloud, FULL, FULL, WELL)  # two that are refused after 20 s each
    assert "succeeded" in job.launch("vertex", "job.yaml").out
    assert waited(job) == [20, 20, 10]


def test_a_second_launch_continues_the_wait_budget(job: Job, clock: FakeClock) -> None:
    write(job, wait="10m", wait_total="15m")
    job.cloud.jobs.script = WAITS
    began = clock()
    job.launch("vertex", "job.yaml", "--watch-for", "12m", code=6)
    assert len(job.created) == 2
    ran = job.launch("follow", "job", code=5)
    assert len(job.created) == 2
    assert 15 * 60 <= clock() - began < 17 * 60
    assert "limits.wait_total" in ran.err


def test_the_same_command_starts_with_the_whole_wait_budget(job: Job) -> None:
    write(job, wait="10m", wait_total="10m")
    scripts(job.cloud, WAITS, WELL)
    job.launch("vertex", "job.yaml", code=5)
    assert len(job.created) == 1
    assert "succeeded" in job.launch("vertex", "job.yaml").out


def test_without_a_total_each_attempt_has_its_own_wait(job: Job) -> None:
    write(job, wait="10m")
    job.cloud.jobs.script = WAITS
    job.launch("vertex", "job.yaml", code=5)
    assert len(job.created) == len(REGIONS)
