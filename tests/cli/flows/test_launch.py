"""What ends a watch before its job: signals, time limits, failures, and trouble with the run folder."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from collections.abc import Callable

import pytest

import launcher.clock
from launch_train import runfolder
from launcher.cli import stop_code
from launcher.cli.flows import launch
from launcher.cli.options import Output
from launcher.cli.ui.event_printer import EventPrinter
from launcher.clock import Clock
from launcher.errors import LaunchError
from launcher.runs.cloud import CloudContext
from launcher.runs.submit import RunWatcher
from launcher.signals import Stopped
from launcher.testing.googlecloud import FakeClock, Fault, Stage, Status
from tests.cli.cloudjobs import CREATE, FAILED, FULL, RUNS, WAITS, WELL, Job, scripts

Interrupt = Callable[[int, float], None]


@pytest.fixture
def interrupt(monkeypatch: pytest.MonkeyPatch, clock: FakeClock) -> Interrupt:
    """Send this process a signal after so many seconds of the clock, while it waits."""

    def after(signum: int, seconds: float) -> None:
        at = clock() + seconds

        def sleep(pause: float) -> None:
            clock.advance(pause)
            if clock() >= at:
                os.kill(os.getpid(), signum)

        monkeypatch.setattr("launcher.clock.REAL", Clock(clock, sleep))

    return after


SIGNALS = [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]


@pytest.mark.slow
@pytest.mark.parametrize(("signum", "code"), SIGNALS)
@pytest.mark.parametrize("command", ["vertex", "follow"])
def test_a_signal_ends_the_watch_and_not_the_job(
    job: Job, interrupt: Interrupt, command: str, signum: int, code: int
) -> None:
    job.cloud.jobs.script = RUNS
    handler = signal.getsignal(signum)
    if command == "follow":
        job.launch("vertex", "job.yaml", "--detach")
    interrupt(signum, 60)
    ran = job.launch(command, "job.yaml" if command == "vertex" else "job", code=code)
    run = job.data("status", "job")["run"]
    assert "launch: stopped watching; the job continues\n" in ran.err
    assert f"launch follow {run} watches it; launch cancel {run} cancels it" in ran.err
    assert "Traceback" not in ran.err
    assert max(map(len, ran.err.splitlines())) <= 180  # the console's address is the longest
    assert job.data("status", run)["state"] == "RUNNING"
    assert signal.getsignal(signum) is handler


def test_ctrl_c_before_there_is_a_job(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def push(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("launcher.images.pipeline.push", push)
    ran = job.launch("vertex", "job.yaml", code=130)
    assert "interrupted before a job was found" in ran.err
    assert "launch status job-" in ran.err
    assert not job.created


def test_ctrl_c_after_the_jobs_end(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def results(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("launcher.cli.flows.launch.results_of", results)
    ran = job.launch("vertex", "job.yaml", code=130)
    assert "interrupted; its job has ended" in ran.err


class Gone(io.StringIO):
    """A terminal that was closed."""

    def write(self, _: str) -> int:
        raise OSError(5, "Input/output error")


def blind() -> RunWatcher:
    """One that has seen no job."""
    cloud = CloudContext(vertex=None, vms=None, project="p", clock=launcher.clock.REAL)  # type: ignore[arg-type]  # no backend is called
    return RunWatcher(cloud, EventPrinter(None), None)


def test_a_closed_terminal_ends_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Gone())
    with (
        pytest.raises(Stopped) as stop,
        launch.report_errors(blind(), EventPrinter(None), None, "job-1", Output.text),
    ):
        os.kill(os.getpid(), signal.SIGHUP)
    print("what Typer says", file=sys.stderr)
    sys.stderr.close()
    assert stop_code(stop.value) == 129


def test_a_closed_stdout_ends_the_watch() -> None:
    with (
        pytest.raises(Stopped) as stop,
        launch.report_errors(blind(), EventPrinter(None), None, "job-1", Output.text),
    ):
        raise BrokenPipeError
    assert stop_code(stop.value) == 141


# --- What scripts see --------------------------------------------------------------------------------------------


def test_a_failure_as_json(job: Job) -> None:
    job.cloud.jobs.script = FAILED
    first = job.data("vertex", "job.yaml", code=3)
    assert (first["state"], first["seconds"], first["results"]["steps"]) == ("FAILED", 20.0, 0)
    assert first["restarts"] == 0
    assert "status of 1" in first["error"]["message"]
    for words in (("vertex", "job.yaml"), ("follow", "job")):
        again = job.data(*words, code=3)
        assert again["error"].items() >= {"message": first["error"]["message"], "exit_code": 3}.items(), words
        assert {**again, "error": None} == {**first, "error": None}, words


def test_an_interrupted_watch_as_json(job: Job) -> None:
    scripts(job.cloud, RUNS, FULL)
    assert job.data("vertex", "job.yaml", "--watch-for", "1m", code=6)["state"] == "RUNNING"
    assert job.data("follow", "job", "--watch-for", "1m", code=6)["state"] == "RUNNING"
    none = job.data("vertex", "job.yaml", "--new", code=5)
    assert (none["state"], none["run"][-2:]) == ("FAILED", "-2")


def test_a_finished_job_that_vertex_ai_has_deleted(job: Job) -> None:
    run = job.data("vertex", "job.yaml")["run"]
    job.cloud.jobs.jobs.clear()
    again = job.data("vertex", "job.yaml")
    assert (again["run"], again["state"], again["job"]) == (run, "SUCCEEDED", None)
    ran = job.launch("vertex", "job.yaml")
    assert ran.err.count("nothing to do") == 1
    assert "--new starts a fresh run" in ran.err
    assert len(job.created) == 1


# --- A run folder that can't be used -----------------------------------------------------------------------------


def test_the_run_folder_fails_after_the_job_was_created(job: Job) -> None:
    job.write(limits={"wait": "10m"})
    job.cloud.faults.add(Fault("storage.objects.insert", Status(400), name=f"verdict|{runfolder.NOW}", times=None))
    ran = job.launch("vertex", "job.yaml")
    assert "succeeded" in ran.out
    assert "could not record the end of attempt 1" in ran.err
    assert "Nothing was created" not in ran.err


def test_waiting_continues_if_its_end_cannot_be_recorded(job: Job) -> None:
    job.write(limits={"wait": "10m"})
    job.cloud.jobs.script = WAITS
    job.cloud.faults.add(Fault("storage.objects.insert", Status(400), name="verdict", times=None))
    ran = job.launch("vertex", "job.yaml", code=6)
    assert "was not cancelled" in ran.err
    assert job.data("status", "job")["state"] == "PENDING"
    job.cloud.faults.clear()
    scripts(job.cloud, WELL)
    assert "succeeded" in job.launch("follow", "job").out


def test_an_unreadable_run_folder(job: Job) -> None:
    job.cloud.jobs.script = RUNS
    run = job.data("vertex", "job.yaml", "--detach")["run"]
    job.cloud.faults.add(Fault("storage.*", Status(403), times=None))
    ran = job.launch("follow", run, "--watch-for", "1m", code=6)
    assert "following this job only" in ran.err
    shown = job.launch("status", run).out
    assert "folder    the run folder can't be read" in shown
    assert "Traceback" not in ran.err
    assert job.data("status", run)["attempts"] == []
    new = job.data("vertex", "job.yaml", "--new", "--detach")
    assert new["run"] == f"{run}-2"


def test_a_failure_of_launch_shows_no_summary() -> None:
    with (
        pytest.raises(LaunchError, match="odd"),
        launch.report_errors(blind(), EventPrinter(None), None, "job-1", Output.json),
    ):
        raise LaunchError("odd")


@pytest.mark.parametrize(
    ("end", "words"),
    [("CANCELLED", "was cancelled after 50 s"), ("EXPIRED", "expired after 50 s"), ("FAILED", "failed in 50 s")],
)
def test_the_text_of_each_end(job: Job, end: str, words: str) -> None:
    job.cloud.jobs.script = (*RUNS, Stage(f"JOB_STATE_{end}", 60))
    ran = job.launch("vertex", "job.yaml", code=3)
    run = job.data("status", "job")["run"]
    assert f"run       {run} {words}" in ran.out
    assert ran.err.count("--resume") == 1
    assert ran.err.count(f"launch logs {run}") == 1


def test_cancel_between_two_attempts_prevents_the_next(job: Job, clock: FakeClock) -> None:
    scripts(job.cloud, FULL, WELL)
    run = job.data("vertex", "job.yaml", "--detach")["run"]
    clock.advance(3600)
    assert "no further attempt will be made" in job.launch("cancel", run).out
    assert "nothing to do" in job.launch("cancel", run).out
    for command in (("follow", run), ("vertex", "job.yaml")):
        ran = job.launch(*command, code=3)
        assert "cancelled before a job was created (launch cancel)" in ran.err
        assert f"--resume {run}" in ran.err
    assert len(job.created) == 1
    assert "2. Cancelled before a job was created (launch cancel)" in job.launch("status", run).out
    job.launch("vertex", "job.yaml", "--resume", run)
    assert len(job.created) == 2


def test_cancel_records_the_end_in_the_run_folder(job: Job) -> None:
    job.cloud.jobs.script = RUNS
    run = job.data("vertex", "job.yaml", "--detach")["run"]
    job.launch("cancel", run)
    end = json.loads(job.cloud.objects.buckets["my-bucket"][f"runs/{run}/{runfolder.attempt_verdict(1)}"].data)
    assert end["state"] == "CANCELLED"


@pytest.mark.parametrize("created", [True, False])
def test_cancel_waits_for_a_job_that_is_being_created(
    job: Job, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, created: bool
) -> None:
    """Another launch has locked the second attempt and creates its job, or dies before."""
    scripts(job.cloud, FULL, RUNS)
    run = job.data("vertex", "job.yaml", "--detach")["run"]
    clock.advance(3600)
    attempts = job.cloud.objects.buckets["my-bucket"]
    lock = attempts[f"runs/{run}/{runfolder.attempt_lock(1)}"].data
    job.cloud.objects.put("my-bucket", f"runs/{run}/{runfolder.attempt_lock(2)}", lock)
    end = b'{"scope": "capacity", "kind": "capacity", "cause": "full", "time": 1.0}'
    job.cloud.objects.put("my-bucket", f"runs/{run}/{runfolder.attempt_verdict(1)}", end)
    names: list[str] = []

    def sleep(pause: float) -> None:
        clock.advance(pause)
        if created and not names:
            job.cloud.jobs.script = RUNS
            names.append(job.cloud.jobs.submit(*job.created[0]).message.name)
            record = json.dumps({"name": names[0]}).encode()
            job.cloud.objects.put("my-bucket", f"runs/{run}/{runfolder.attempt_job(2)}", record)

    monkeypatch.setattr("launcher.clock.REAL", Clock(clock, sleep))
    ran = job.launch("cancel", run)
    assert "another launch is submitting attempt 2" in ran.err
    assert ("cancelled" in ran.out) is created, ran.out
    if created:
        assert [*job.cloud.jobs.jobs.values()][-1].at(clock())[-1].state == "JOB_STATE_CANCELLED"


def test_cancel_stops_a_launch_that_is_waiting_to_retry(
    job: Job, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a launch waits before it tries again, somebody cancels the run elsewhere: the launch makes nothing more."""
    scripts(job.cloud, FULL, WELL)
    busy = Status(429, message="Quota exceeded: requests per minute", info="RATE_LIMIT_EXCEEDED")
    job.cloud.faults.add(Fault(CREATE, busy, after=1))
    cancelled: list[str] = []

    def sleep(pause: float) -> None:
        clock.advance(pause)
        if len(job.created) == 2 and not cancelled:
            cancelled.append("")
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("launcher.clock.REAL", Clock(clock, clock.advance))
                cancelled[0] = job.launch("cancel", "job").out

    monkeypatch.setattr("launcher.clock.REAL", Clock(clock, sleep))
    ran = job.launch("vertex", "job.yaml", code=3)
    assert "no further attempt will be made" in cancelled[0]
    assert "cancelled before a job was created" in ran.err
    assert len(job.created) == 2


def test_cancelling_a_finished_run_does_nothing(job: Job) -> None:
    job.cloud.jobs.script = FAILED
    job.launch("vertex", "job.yaml", "--detach")
    job.cloud.jobs.clock.advance(3600)  # type: ignore[attr-defined]  # a fake clock
    assert job.launch("cancel", "job").out.startswith("nothing to do: ")


def test_a_cyclic_exception_chain_is_handled() -> None:
    error = LaunchError("it failed")
    error.__cause__ = error
    assert stop_code(error) == 0
