"""A job of the cloud on loopback, watched through the real clients, on the cloud's clock."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launch_train import runfolder
from launch_train.common.storage import LocalFolder
from launcher.clock import Clock
from launcher.errors import NotAuthorised
from launcher.jobs.job import GONE, Job
from launcher.runs.logs.line import Line
from launcher.runs.logs.reader import LogReader
from launcher.runs.metrics.progress import Progress, ProgressReader
from launcher.runs.watch import (
    Event,
    LinesPrinted,
    OutageEnded,
    OutageStarted,
    ProgressUpdated,
    StateChanged,
    WatchResult,
    watch,
)
from launcher.services.vertex import Vertex
from launcher.testing.googlecloud import FakeClock, Fault, GoogleCloud, Reset, Stage, Status
from tests.plan.planning import planned

LIFE = (
    Stage("JOB_STATE_QUEUED", 0),
    Stage("JOB_STATE_PENDING", 20),
    Stage("JOB_STATE_RUNNING", 60),
    Stage("JOB_STATE_SUCCEEDED", 1000),
)
GET = "aiplatform.projects.locations.customJobs.get"


class Site:
    """A job that prints a line and makes a step every 10 s, and who watches it."""

    def __init__(self, cloud: GoogleCloud, clock: FakeClock, folder: Path) -> None:
        self.cloud, self.clock, self.folder = cloud, clock, LocalFolder(folder)
        self.time = Clock(clock, self.sleep)
        self.vertex = Vertex("my-project", cloud.environ(), self.time)
        request = planned(provisioning=["spot"], regions=["us-central1"]).attempts[0].request
        self.made = self.vertex.create_in("us-central1", request)
        self.reader = LogReader(self.made, "my-project", cloud.environ(), say=self.say, clock=self.time)
        self.meter = ProgressReader(self.folder, self.made, clock=self.time)
        self.told: list[Event] = []
        self.said: list[str] = []
        self.wrote: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def sleep(self, seconds: float) -> None:
        self.clock.advance(seconds)
        while len(self.wrote) < 94 and self.clock() >= self.made.created + 60 + 10 * len(self.wrote):
            step = len(self.wrote) + 1
            self.cloud.logs.write(self.made.id, "workerpool0-0", f"step {step}")
            row = {"step": step, "loss": 1 / step, "time": self.clock()}
            self.folder.write(runfolder.metrics_part(1, 0, 0, step - 1), json.dumps(row).encode() + b"\n")
            self.wrote.append(f"step {step}")

    def job(self) -> Job:
        return self.vertex.get(self.made.name)

    def lines(self) -> list[Line]:
        return self.reader.read_new()

    def progress(self) -> Progress | None:
        return self.meter.read_new()

    def watch(self, **more: Any) -> WatchResult:
        return watch(self, self.told.append, self.time, **{"wait_seconds": 100.0, **more})

    def of(self, kind: Any) -> list[Any]:
        return [event for event in self.told if isinstance(event, kind)]

    @property
    def printed(self) -> list[str]:
        return [line.text for event in self.of(LinesPrinted) for line in event.lines]


@pytest.fixture
def cloud(clock: FakeClock) -> Iterator[GoogleCloud]:
    with GoogleCloud(clock=clock, script=LIFE, tokens=set()) as running:
        running.let_in("first")
        yield running


@pytest.fixture
def site(cloud: GoogleCloud, clock: FakeClock, tmp_path: Path) -> Site:
    return Site(cloud, clock, tmp_path)


def test_a_whole_life(site: Site) -> None:
    watched = site.watch()
    assert (watched.reason, watched.job.state, watched.job.name) == ("ended", "SUCCEEDED", site.made.name)
    assert [event.job.state for event in site.of(StateChanged)] == ["QUEUED", "PENDING", "RUNNING", "SUCCEEDED"]
    assert site.printed == site.wrote
    assert site.of(ProgressUpdated)[-1].progress.step == len(site.wrote) == 94
    assert site.of((OutageStarted, OutageEnded)) == site.said == []


@pytest.mark.parametrize(
    "effect", [Reset(), *(pytest.param(Status(code), marks=pytest.mark.slow) for code in (503, 429))]
)
def test_an_outage_of_five_minutes(site: Site, effect: Reset | Status) -> None:
    began, original = site.clock(), site.sleep

    def sleep(seconds: float) -> None:
        original(seconds)
        if not site.cloud.faults.planned and site.clock() - began > 300:
            site.cloud.faults.down(until=began + 600, effect=effect)

    site.time = site.time._replace(sleep=sleep)
    assert site.watch().job.state == "SUCCEEDED"
    assert site.printed == site.wrote
    assert len([event for event in site.of(OutageStarted) if event.target == "job"]) == 1
    [back] = [event for event in site.of(OutageEnded) if event.target == "job"]
    assert back.seconds == pytest.approx(300, abs=90)


@pytest.mark.slow
def test_a_token_that_runs_out_and_is_renewed(site: Site) -> None:
    began, original = site.clock(), site.sleep

    def sleep(seconds: float) -> None:
        original(seconds)
        if site.cloud.tokens == {"first"} and site.clock() - began > 300:
            site.cloud.tokens = {"second"}
        if site.cloud.tokens == {"second"} and site.clock() - began > 500:
            site.cloud.let_in("second")

    site.time = site.time._replace(sleep=sleep)
    assert site.watch().job.state == "SUCCEEDED"
    assert site.printed == site.wrote
    [outage] = [event for event in site.of(OutageStarted) if event.target == "job"]
    assert "gcloud auth application-default login" in outage.problem


def test_a_token_that_is_not_renewed(site: Site) -> None:
    site.cloud.faults.add(Fault(GET, Status(401), after=5, times=None))
    with pytest.raises(NotAuthorised, match="launch follow"):
        site.watch()
    assert 300 <= site.clock() - site.made.created <= 400


def test_a_job_that_is_deleted(site: Site) -> None:
    site.cloud.faults.add(Fault(GET, Status(404), after=20, times=None))
    assert site.watch().job.state == GONE


def test_what_waits_too_long(site: Site) -> None:
    watched = site.watch(wait_seconds=30.0)
    assert (watched.reason, watched.job.state) == ("wait_limit", "PENDING")
