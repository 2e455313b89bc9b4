"""Replicas that are preempted: SIGTERM to the first process, 30 seconds, SIGKILL."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from launcher.clock import Clock
from launcher.services.local import processes, supervisor
from launcher.services.local.replicas import Replica
from launcher.services.local.supervisor import Ended, Preemption


class Time:
    """A clock that goes `pace` seconds with each look at the replicas (0: it stands still)."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.pace = 0.0
        self.interrupts = False

    def sleep(self, _: float) -> None:
        time.sleep(0.005)
        self.seconds += self.pace
        if self.interrupts:
            self.interrupts = False
            raise KeyboardInterrupt


class Stage:
    """Runs replicas and preempts them; the clock runs once all have said that they are ready.

    `grace` is its pace after SIGTERM: slow, so that a slow machine has the time to obey.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.grace = 0.01
        self.time = Time()
        self.lines: list[str] = []
        self.begun: list[float] = []

    def run(self, *codes: str, after: float | None = 60) -> Ended:
        replicas = [
            Replica(name=f"r{number}", image="", argv=(sys.executable, "-c", PREFIX + code), env={}, gpus=0)
            for number, code in enumerate(codes)
        ]

        def on_line(_: str, line: str) -> None:
            self.lines.append(line)
            if line == "ready" and self.lines.count("ready") == len(codes):
                self.time.pace = 1.0

        return processes.run(
            replicas,
            env={"PATH": os.environ["PATH"]},
            workdir=lambda _: self.folder,
            on_line=on_line,
            say=print,
            preemption=None if after is None else Preemption(after, self.begins),
            clock=Clock(lambda: self.time.seconds, self.time.sleep),
        )

    def begins(self) -> None:
        self.begun.append(self.time.seconds)
        self.time.pace = self.grace


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


PREFIX = """
import os, signal, subprocess, sys, time
def on_sigterm(code):
    signal.signal(signal.SIGTERM, lambda *_: (print("told", flush=True), sys.exit(code)))
def ready():
    print("ready", flush=True)
"""
SAVES = "on_sigterm(75); ready(); time.sleep(60)"
IS_DONE = "on_sigterm(0); ready(); time.sleep(60)"
DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN); ready(); time.sleep(60)"
FAILS = "ready(); sys.exit(3)"


def test_after_its_time_each_gets_sigterm(stage: Stage) -> None:
    ended = stage.run(SAVES, IS_DONE)
    assert ended.codes == {"r0": 75, "r1": 0}
    assert ended.preempted is not None
    assert ended.preempted < 30
    assert stage.lines.count("told") == 2
    assert stage.begun == [pytest.approx(60, abs=1)]


def test_processes_that_stay_are_killed_after_30_seconds(stage: Stage) -> None:
    stage.grace = 0.3  # 30 s in 0.5 s
    ended = stage.run(SAVES, DEAF)
    assert ended.codes == {"r0": 75, "r1": -9}
    assert ended.preempted == pytest.approx(30, abs=2)


def test_only_the_first_process_gets_the_signal(stage: Stage, tmp_path: Path) -> None:
    """A container's PID 1 gets the signal; what it started is its own business."""
    child = (
        f"import signal, time; signal.signal(signal.SIGTERM, lambda *_: open({str(tmp_path / 'child')!r}, 'w')); "
        "print('child', flush=True); time.sleep(60)"
    )
    code = (
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}], stdout=subprocess.PIPE)\n"
        "assert child.stdout.readline() == b'child\\n'\n"
        "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.3), sys.exit(75)))\n"
        "ready()\ntime.sleep(60)"
    )
    assert stage.run(code).codes == {"r0": 75}
    assert not (tmp_path / "child").exists()


def test_a_job_that_ends_before_is_not_preempted(stage: Stage) -> None:
    assert stage.run("ready()", after=100_000) == Ended({"r0": 0}, None)
    assert stage.begun == []


def test_a_job_that_fails_before_is_not_preempted_while_its_peers_notice(stage: Stage) -> None:
    ended = stage.run(FAILS, "time.sleep(0.4); ready(); time.sleep(60)", after=supervisor.PEERS_SECONDS - 10)
    assert ended == Ended({"r0": 3, "r1": -15}, None)


def test_ctrl_c_during_a_preemption_ends_it_all(stage: Stage, tmp_path: Path) -> None:
    pid = tmp_path / "pid"

    def begins() -> None:
        stage.time.interrupts = True
        stage.time.pace = 3.0

    stage.begins = begins  # type: ignore[method-assign]  # this one stage does something else
    assert stage.run(f"open({str(pid)!r}, 'w').write(str(os.getpid())); {DEAF}").stopped
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_without_a_preemption_time_does_not_matter(stage: Stage) -> None:
    assert stage.run("ready(); time.sleep(0.3)", after=None) == Ended({"r0": 0}, None)
    assert stage.time.seconds > 2
    assert stage.begun == []
