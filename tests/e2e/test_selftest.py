"""`launch selftest` as a separate process: jobs that really train, and signals in the middle."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.selftest import steps
from launcher.selftest.recording import write_bundle
from launcher.selftest.steps import SMALL, cancelled_and_resumed
from launcher.testing.googlecloud import FakeClock, GoogleCloud, Runner
from tests.cli.cloudjobs import RUNS
from tests.command import ROOT
from tests.e2e.recipe import cache
from tests.e2e.running import run, started
from tests.registry import OciRegistry
from tests.selftest.comparison import read_bundle
from tests.selftest.world import World

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture
def world(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[World]:
    """On this machine's clock; with the parameter "trains" its jobs do that."""
    runner = Runner(environ={"XDG_CACHE_HOME": cache()}) if getattr(request, "param", "") == "trains" else None
    with GoogleCloud(runner=runner) as cloud, OciRegistry() as registry:
        yield World(cloud, FakeClock(time.time()), registry, tmp_path)


def words(world: World, *more: str) -> tuple[str, ...]:
    return ("selftest", "--region", "us-central1", "--repository", world.repository, "--yes", *more)


@pytest.mark.parametrize("world", ["trains"], indirect=True)
def test_a_job_really_trains(world: World) -> None:
    ran = run(*words(world, "--only", "cpu"), cwd=world.folder, env=world.env)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert world.left() == []
    (path,) = world.folder.glob("launch-selftest-*.zip")
    results, _ = read_bundle(path)
    (cpu,) = [step for step in results["steps"] if step["name"] == "cpu"]
    assert (cpu["ok"], cpu["found"]) == (True, "SUCCEEDED; metrics of steps 1 to 20")


@pytest.mark.parametrize("world", ["trains"], indirect=True)
def test_a_run_is_preempted_and_really_goes_on(world: World) -> None:
    with world.kit() as kit:
        outcomes: list[steps.Outcome] = []
        step = cancelled_and_resumed(steps=1000, model=SMALL, batch_size=8)._replace(needs=())
        steps.run_steps(replace(kit, poll_seconds=1.0), [step], outcomes, lambda _step: None)
        (preempt,) = outcomes
        assert preempt.ok, preempt
        assert "resumed with a continuous loss" in preempt.found


def until_a_job_runs(world: World, process: subprocess.Popen[str]) -> None:
    """The selftest is in the middle of its step cpu."""
    until = time.monotonic() + 600
    while not world.cloud.jobs.jobs:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.1)


def test_ctrl_c_removes_everything(world: World) -> None:
    world.lives["cpu"] = RUNS
    with started(*words(world, "--only", "cpu"), cwd=world.folder, env=world.env) as process:
        until_a_job_runs(world, process)
        assert len(world.left()) > 1
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=600)
    assert process.returncode == 130, err
    assert world.left() == [], err
    assert "– cpu" in out
    assert list(world.folder.glob("launch-selftest-*.zip"))


def test_what_a_killed_one_leaves_is_cleaned(world: World) -> None:
    world.lives["cpu"] = RUNS
    with started(*words(world, "--only", "cpu"), cwd=world.folder, env=world.env) as process:
        until_a_job_runs(world, process)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate(timeout=60)
    assert len(world.left()) > 1
    ran = run("selftest", "--clean", cwd=world.folder, env=world.env)
    assert (ran.returncode, world.left()) == (0, []), ran.stderr


def test_a_bundle_is_compared_with_the_loopback_cloud(world: World, tmp_path: Path) -> None:
    """A field that the loopback cloud hasn't, and one that it writes otherwise, are named; nothing else is."""
    ran = run(*words(world), "--only", "push", cwd=tmp_path, env=world.env)
    assert ran.returncode == 0, ran.stderr
    (path,) = tmp_path.glob("launch-selftest-*.zip")
    results, calls = read_bundle(path)
    changed = json.loads(json.dumps(calls))
    for call in changed:
        if call["operation"] == "GET /compute/v1/projects/*":
            call["answer"] |= {"xpnProjectStatus": "UNSPECIFIED", "id": 5}
    google = write_bundle(tmp_path, "google.zip", results, changed, {})
    command = [sys.executable, "-m", "tests.selftest.loopback", str(google)]
    compared = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert compared.returncode == 0, compared.stderr
    told = compared.stdout.splitlines()
    assert "GET /compute/v1/projects/* 200: missing field xpnProjectStatus" in told
    assert "GET /compute/v1/projects/* 200: id is number, not string" in told
    assert len(told) == 2, told
