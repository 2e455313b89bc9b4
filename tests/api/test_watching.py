"""Watching runs with a fake clock, through outages and from one attempt to the next."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from launch_train import runfolder
from launch_train.common.storage import LocalFolder
from launcher.clock import Clock
from launcher.errors import LaunchError, NotAuthorised, UnreachableError
from launcher.jobs.job import Job
from launcher.runs.find import local_run
from launcher.runs.metrics.progress import Progress
from launcher.runs.run_story import RunStory
from launcher.runs.watch import CLOUD, Event
from launcher.runs.watched_runs import NEXT_SECONDS, RunWatch, WatchedRun
from launcher.services.local.attempts import End, lock, write_end
from launcher.services.local.folder_lock import lock_run_folder
from launcher.testing.googlecloud import FakeClock

JOB = Job(name="projects/p/locations/us-central1/customJobs/7", region="us-central1", state="RUNNING", created=1.0)


class Steps:
    """A clock that calls one function of a list at each sleep."""

    def __init__(self, *does: Callable[[], object]) -> None:
        self._clock, self._does = FakeClock(), [*does]

    def sleep(self, seconds: float) -> None:
        self._clock.advance(seconds)
        if self._does:
            self._does.pop(0)()

    @property
    def clock(self) -> Clock:
        return Clock(self._clock, self.sleep)


def watched(watch: RunWatch) -> RunWatch:
    watch.start()
    assert watch.join(20)
    return watch


def watched_here(folder: Path, clock: Clock) -> WatchedRun:
    run = local_run(folder)
    assert run
    source = WatchedRun(run)
    source.clock = clock
    return source


def test_a_run_here_is_watched_to_its_end(tmp_path: Path) -> None:
    storage = LocalFolder(tmp_path)
    lock(storage, {"region": "local", "machine": "m", "provisioning": "standard"})
    events: list[Event] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(lock_run_folder(tmp_path))

        def step() -> None:
            rows = b'{"event": "start", "steps": 4}\n' + b"".join(b'{"step": %d, "loss": 2.5}\n' % n for n in (1, 2))
            storage.write(runfolder.metrics_part(1, 0, 0, 0), rows)
            storage.write(runfolder.text_part(1, 0, 0), b"hello\n")

        def end() -> None:
            storage.write(runfolder.metrics_part(1, 0, 0, 1), b'{"step": 4, "loss": 1.5}\n')
            write_end(storage, 1, End(exit_codes={"workerpool0-0": 0}, seconds=3.0, time=9.0))
            stack.close()

        source = watched_here(tmp_path, Steps(step, lambda: None, end).clock)
        view = watched(RunWatch(source, events.append)).view
    assert (view.is_over, view.error, view.job and view.job.state) == (True, None, "SUCCEEDED")
    assert view.progress == Progress(step=4, steps=4, loss=1.5)
    assert [row["step"] for row in view.newest_rows] == [1, 2, 4]
    assert [line.text for line in view.lines] == ["hello"]
    assert view.story.chapters[-1].kind == "succeeded"
    assert {type(event).__name__ for event in events} >= {"StateChanged", "LinesPrinted", "ProgressUpdated"}


def test_a_run_here_that_has_ended_is_read_once(tmp_path: Path) -> None:
    lock(LocalFolder(tmp_path), {"region": "local"})
    view = watched(RunWatch(watched_here(tmp_path, Clock(lambda: 0.0, lambda _: pytest.fail("waits"))))).view
    assert (view.job and view.job.state, view.story.chapters[-1].state) == ("INTERRUPTED", "interrupted")


class Scripted(WatchedRun):
    """A source and view whose answers are scripted: a job, or an error to raise."""

    def __init__(self, *answers: Job | LaunchError, then: Job | None = None, clock: Clock | None = None) -> None:
        self.id, self.intervals, self.details_seconds, self.storage = "run-1", CLOUD, 60.0, None
        self.answers, self.then = [*answers], then
        self.clock = clock or Steps().clock
        self.opened = 0
        self.newest_rows: tuple[Any, ...] = ()

    def cancel(self, job: Job | None, say: object) -> bool:
        raise NotImplementedError

    def newest_job(self) -> Job:
        return JOB

    def view(self, job: Job) -> Any:
        self.opened += 1
        if self.opened == 1:
            raise UnreachableError("no answer")
        return self

    def job(self) -> Job:
        answer = self.answers.pop(0)
        if isinstance(answer, LaunchError):
            raise answer
        return answer

    def lines(self) -> list[Any]:
        raise UnreachableError("no answer")

    def progress(self) -> Progress | None:
        return None

    def may_continue(self, ended: Job) -> bool:
        return ended.state == "FAILED"

    def next_job(self, ended: Job) -> Job | None:
        if self.then is None:
            raise UnreachableError("no answer")
        return self.then

    def details(self, job: Job) -> Any:
        raise UnreachableError("no answer")

    def current_story(self, job: Job) -> RunStory | None:
        return None


DONE, FAILED = replace(JOB, state="SUCCEEDED", ended=9.0), replace(JOB, state="FAILED", ended=9.0)


def test_an_outage_does_not_end_the_watch() -> None:
    outage = [UnreachableError("no answer")] * 50
    watch = watched(RunWatch(Scripted(JOB, *outage, JOB, *outage, DONE)))
    assert (watch.view.job, watch.view.error) == (DONE, None)


def test_the_next_attempt_is_watched_too() -> None:
    second = replace(JOB, name=JOB.name + "8")
    source = Scripted(JOB, FAILED, second, DONE, then=second)
    assert watched(RunWatch(source)).view.job == DONE
    assert source.opened == 3


def test_without_a_next_attempt_the_watch_ends() -> None:
    source = Scripted(JOB, FAILED)
    began = source.clock.now()
    view = watched(RunWatch(source)).view
    assert (view.job, view.is_over) == (FAILED, True)
    assert NEXT_SECONDS <= source.clock.now() - began < 2 * NEXT_SECONDS


def test_access_that_was_withdrawn_is_an_error() -> None:
    refused = [NotAuthorised("no permission")] * 200
    view = watched(RunWatch(Scripted(JOB, *refused))).view
    assert isinstance(view.error, NotAuthorised)


def test_a_bug_of_launch_is_an_error_too() -> None:
    class Broken(Scripted):
        def newest_job(self) -> Job:
            raise ValueError("odd")

    view = watched(RunWatch(Broken())).view
    assert (view.is_over, "ValueError: odd" in str(view.error)) == (True, True)
