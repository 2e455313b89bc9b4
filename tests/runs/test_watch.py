"""The watch of a job, on a clock that moves only when the watch sleeps."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import cycle, pairwise
from typing import Any

import pytest

from launcher.clock import Clock
from launcher.errors import LaunchError, NotAuthorised, StillRunning, UnreachableError
from launcher.jobs.job import ENDED, GONE, Job
from launcher.runs.logs.line import Line
from launcher.runs.metrics.progress import Progress
from launcher.runs.watch import (
    Event,
    LinesPrinted,
    Note,
    OutageEnded,
    OutageStarted,
    ProgressUpdated,
    StateChanged,
    WatchResult,
    watch,
)

NAME = "projects/1/locations/us-central1/customJobs/7"
AWAY = UnreachableError("Vertex AI does not respond: reset", "Try again in a moment.")
REFUSED = NotAuthorised("Vertex AI: the credentials are not accepted", "gcloud auth application-default login")


class Answer(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def refusal(code: int) -> LaunchError:
    """As launcher.gcp.api raises it."""
    error = UnreachableError(f"HTTP {code}") if code == 429 else LaunchError(f"HTTP {code}")
    error.__cause__ = Answer(code)
    return error


@dataclass
class World:
    """A job on a script. Times are seconds from the beginning; `faults` are (from, until, what, error)."""

    states: list[tuple[float, str]]
    faults: list[tuple[float, float, str, LaunchError]] = field(default_factory=list)
    prints: list[tuple[float, str]] = field(default_factory=list)
    steps: list[tuple[float, int]] = field(default_factory=list)
    started: float | None = None
    over: float | None = None
    now: float = 0.0
    told: list[tuple[float, Event]] = field(default_factory=list)
    looks: list[tuple[float, str]] = field(default_factory=list)

    def _look(self, what: str) -> None:
        self.looks.append((self.now, what))
        for begin, end, name, error in self.faults:
            if name == what and begin <= self.now < end:
                raise error

    def job(self) -> Job:
        self._look("job")
        state = [state for time, state in self.states if time <= self.now][-1]
        labels = {"launch-run": "gpt-01234567"}
        return Job(
            name=NAME,
            region="us-central1",
            state=state,
            created=0.0,
            started=self.started,
            ended=self.over if self.over is not None and self.over <= self.now else None,
            labels=labels,
        )

    def lines(self) -> list[Line]:
        self._look("lines")
        due = [line for line in self.prints if line[0] <= self.now]
        del self.prints[: len(due)]
        return [Line(time, "workerpool0-0", text, "INFO") for time, text in due]

    def progress(self) -> Progress | None:
        self._look("progress")
        due = [step for time, step in self.steps if time <= self.now]
        self.steps = self.steps[len(due) :]
        return Progress(step=due[-1]) if due else None

    def tell(self, event: Event) -> None:
        self.told.append((self.now, event))

    def sleep(self, seconds: float) -> None:
        assert 0 <= seconds <= 60, seconds
        assert self.now < 100_000, "the watch never ends"
        self.now += max(seconds, 0.001)

    def watch(self, *, wait: float | None = None, waited: float = 0.0, limit: float | None = None) -> WatchResult:
        clock = Clock(lambda: self.now, self.sleep)
        return watch(self, self.tell, clock, wait_seconds=wait, waited=waited, watch_seconds=limit)

    def of(self, kind: Any) -> list[Any]:
        return [event for _, event in self.told if isinstance(event, kind)]

    def at(self, what: str) -> list[float]:
        return [time for time, name in self.looks if name == what]


def life(end: str = "SUCCEEDED", at: float = 300.0) -> list[tuple[float, str]]:
    return [(0, "QUEUED"), (20, "PENDING"), (60, "RUNNING"), (at, end)]


def test_a_whole_life() -> None:
    world = World(life(), prints=[(70, "a"), (71, "b"), (299, "c"), (304, "late")], steps=[(100, 10), (200, 20)])
    watched = world.watch()
    assert (watched.reason, watched.job.state) == ("ended", "SUCCEEDED")
    states = [(event.previous, event.job.state) for event in world.of(StateChanged)]
    assert states == [
        (None, "QUEUED"),
        ("QUEUED", "PENDING"),
        ("PENDING", "RUNNING"),
        ("RUNNING", "SUCCEEDED"),
    ]
    assert [line.text for event in world.of(LinesPrinted) for line in event.lines] == ["a", "b", "c", "late"]
    assert [event.progress.step for event in world.of(ProgressUpdated)] == [10, 20]
    assert world.of(OutageStarted) == world.of(OutageEnded) == world.of(Note) == []
    seen = {event.job.state: time for time, event in world.told if isinstance(event, StateChanged)}
    assert seen["RUNNING"] - 60 <= 10
    assert seen["SUCCEEDED"] - 300 <= 10


@pytest.mark.parametrize("end", sorted(ENDED))
def test_every_end_is_one(end: str) -> None:
    watched = World(life(end)).watch(wait=3600)
    assert (watched.reason, watched.job.state) == ("ended", end)


def test_poll_intervals() -> None:
    world = World(life(at=2000))
    world.watch()
    looks = world.at("job")
    assert looks[1] == 2
    pauses = [after - before for before, after in pairwise(looks)]
    assert max(pauses) == 10
    while_running = [time for time in world.at("lines") if 100 < time < 1900]
    assert 350 <= len(while_running) <= 365  # every 5 s: a fifth of what Cloud Logging allows a whole project
    assert len([time for time in world.at("lines") if time < 60]) <= 3, "nothing runs yet"
    assert 175 <= len([time for time in world.at("progress") if 100 < time < 1900]) <= 185


def test_what_comes_with_the_start_is_looked_for_at_once() -> None:
    world = World(life(), prints=[(61, "first")])
    world.watch()
    [printed] = [time for time, event in world.told if isinstance(event, LinesPrinted)]
    assert printed <= 75


@pytest.mark.parametrize("what", ["everything", "job"])
def test_an_outage_is_reported_twice_and_ends_nothing(what: str) -> None:
    hidden = ["job", "lines", "progress"] if what == "everything" else ["job"]
    world = World(life(at=1000), faults=[(100, 400, name, AWAY) for name in hidden])
    watched = world.watch(wait=200)
    assert watched.job.state == "SUCCEEDED"
    [outage] = [
        (time, event) for time, event in world.told if isinstance(event, OutageStarted) and event.target == "job"
    ]
    [back] = [(time, event) for time, event in world.told if isinstance(event, OutageEnded) and event.target == "job"]
    assert 100 <= outage[0] <= 110
    assert outage[1].problem == str(AWAY)
    assert 400 <= back[0] <= 410
    assert back[1].seconds == pytest.approx(300, abs=15)
    assert (
        {event.target for event in world.of(OutageStarted)}
        == {event.target for event in world.of(OutageEnded)}
        == set(hidden)
    )


def test_each_outage_is_reported() -> None:
    world = World(life(at=1000), faults=[(100, 200, "job", AWAY), (500, 600, "job", AWAY)])
    world.watch()
    assert [type(event) for event in world.of((OutageStarted, OutageEnded))] == [
        OutageStarted,
        OutageEnded,
        OutageStarted,
        OutageEnded,
    ]


def test_a_job_that_ends_in_an_outage_has_ended_when_somebody_says_so() -> None:
    world = World(life("FAILED", at=150), faults=[(100, 1000, "job", AWAY)])
    assert world.watch().job.state == "FAILED"
    assert world.now >= 1000
    assert len(world.of(OutageStarted)) == len(world.of(OutageEnded)) == 1


def test_an_outage_from_the_first_look_on() -> None:
    world = World(life(), faults=[(0, 200, "job", AWAY)])
    assert world.watch().job.state == "SUCCEEDED"
    assert world.of(StateChanged)[0].previous is None


def test_a_flickering_network_never_confirms_what_it_does_not_say() -> None:
    answers = cycle([AWAY, refusal(404), REFUSED, None, refusal(404), refusal(404), AWAY, refusal(404), None])

    class Flickering(World):
        def job(self) -> Job:
            if self.now > 60 and (error := next(answers)):
                raise error
            return super().job()

    assert Flickering(life(at=2000)).watch().job.state == "SUCCEEDED"


def test_time_in_an_outage_counts_as_waiting_only_when_it_waits_still() -> None:
    world = World([(0, "QUEUED"), (50, "RUNNING"), (400, "SUCCEEDED")], faults=[(20, 300, "job", AWAY)])
    assert world.watch(wait=100).reason == "ended"
    world = World([(0, "QUEUED")], faults=[(20, 300, "job", AWAY)])
    assert world.watch(wait=100).reason == "wait_limit"
    assert world.now >= 300, "nobody knows before that"


def test_credentials_that_are_renewed() -> None:
    world = World(life(at=1000), faults=[(100, 350, "job", REFUSED)])
    assert world.watch().job.state == "SUCCEEDED"
    [outage] = world.of(OutageStarted)
    assert "gcloud auth application-default login" in outage.problem
    assert len(world.of(OutageEnded)) == 1


def test_credentials_that_stay_refused() -> None:
    world = World(life(at=1000), faults=[(100, 1e9, "job", REFUSED)])
    with pytest.raises(NotAuthorised, match=r"(?s)credentials are not accepted.*RUNNING.*launch follow gpt-01234567"):
        world.watch()
    assert 400 <= world.now <= 420
    assert len(world.of(OutageStarted)) == 1


def test_a_refusal_after_an_outage_is_told_too_and_has_its_own_time() -> None:
    world = World(life(at=3000), faults=[(100, 900, "job", AWAY), (900, 1e9, "job", REFUSED)])
    with pytest.raises(NotAuthorised):
        world.watch()
    assert world.now >= 1200
    assert [event.problem for event in world.of(OutageStarted)] == [str(AWAY), str(REFUSED)]


@pytest.mark.parametrize("error", [REFUSED, LaunchError("the Vertex AI API is disabled in project p")])
def test_denied_access_is_reported_at_once(error: LaunchError) -> None:
    world = World(life(), faults=[(0, 1e9, "job", error)])
    with pytest.raises(type(error)):
        world.watch()
    assert world.now == 0


def test_a_deleted_job() -> None:
    world = World(life(at=1000), faults=[(100, 1e9, "job", refusal(404))], prints=[(99, "last")])
    watched = world.watch()
    assert (watched.reason, watched.job.state, watched.job.name) == ("ended", GONE, NAME)
    assert 105 <= world.now <= 160
    assert world.of(StateChanged)[-1].previous == "RUNNING"
    assert [line.text for event in world.of(LinesPrinted) for line in event.lines] == ["last"]


def test_a_job_that_is_not_known_everywhere_yet() -> None:
    assert World(life(), faults=[(0, 3, "job", refusal(404))]).watch().job.state == "SUCCEEDED"
    with pytest.raises(LaunchError, match="HTTP 404"):
        World(life(), faults=[(0, 1e9, "job", refusal(404))]).watch()


def test_waiting_too_long() -> None:
    world = World([(0, "QUEUED"), (80, "PENDING")])
    watched = world.watch(wait=200)
    assert (watched.reason, watched.job.state) == ("wait_limit", "PENDING")
    assert 200 <= world.now <= 212
    world = World([(0, "PENDING")])
    assert world.watch(wait=200, waited=150).reason == "wait_limit"
    assert 50 <= world.now <= 62
    world = World([(0, "PENDING")])
    assert world.watch(wait=200, waited=500).reason == "wait_limit"
    assert world.now == 0


def test_running_is_not_waiting() -> None:
    assert World([(0, "PENDING"), (90, "RUNNING"), (5000, "SUCCEEDED")]).watch(wait=100).reason == "ended"


def test_waiting_is_counted_from_the_restart() -> None:
    states: list[tuple[float, str]] = [
        (0, "PENDING"),
        (90, "RUNNING"),
        (200, "PENDING"),
        (290, "RUNNING"),
        (500, "SUCCEEDED"),
    ]
    assert World(states).watch(wait=100).reason == "ended"
    world = World(states[:3])
    assert world.watch(wait=100).reason == "wait_limit"
    assert world.now >= 295


def test_since_when_a_restarted_job_waits_is_not_known() -> None:
    world = World([(0, "PENDING")], started=-36_000)
    assert world.watch(wait=3600, waited=36_000).reason == "wait_limit"
    assert world.now >= 3600


def test_watch_seconds() -> None:
    world = World([(0, "RUNNING")])
    with pytest.raises(StillRunning, match=r"(?s)customJobs/7 is still RUNNING.*launch follow gpt-01234567"):
        world.watch(limit=97)
    assert world.now == pytest.approx(97, abs=0.1)
    world = World([(0, "RUNNING")], faults=[(0, 1e9, "job", AWAY)])
    with pytest.raises(StillRunning, match="could not be read"):
        world.watch(limit=100)


def test_a_long_queue_is_explained_once() -> None:
    world = World([*life()[:1], (1000, "RUNNING"), (2000, "SUCCEEDED")])
    world.watch()
    [(when, note)] = [(time, event) for time, event in world.told if isinstance(event, Note)]
    assert 120 <= when <= 132
    assert "quota" in note.text


@pytest.mark.parametrize("state", ["PAUSED", "UPDATING", "MEDITATING", ""])
def test_states_in_between_are_told_once_and_watched(state: str) -> None:
    world = World([(0, "RUNNING"), (100, state), (200, "RUNNING"), (300, state), (600, "SUCCEEDED")])
    assert world.watch(wait=10).job.state == "SUCCEEDED"
    [note] = world.of(Note)
    assert note.text.startswith(f"{state}: " if state else "no state: ")


def test_an_unknown_state_with_an_end() -> None:
    watched = World([(0, "RUNNING"), (100, "EVAPORATED")], over=100.0).watch()
    assert (watched.reason, watched.job.state) == ("ended", "EVAPORATED")


@pytest.mark.parametrize("what", ["lines", "progress"])
@pytest.mark.parametrize("error", [AWAY, REFUSED, refusal(400)])
def test_extras_that_fail_are_told_late_and_end_nothing(what: str, error: LaunchError) -> None:
    world = World(life(at=2000), faults=[(100, 130, what, error), (500, 1000, what, error)])
    assert world.watch().job.state == "SUCCEEDED"
    [(when, outage)] = [(time, event) for time, event in world.told if isinstance(event, OutageStarted)]
    assert 560 <= when <= 700
    assert outage.target == what
    assert [event.target for event in world.of(OutageEnded)] == [what]


def test_too_many_reads_make_it_slower() -> None:
    world = World(life(at=3000), faults=[(500, 1500, "lines", refusal(429))])
    world.watch()
    assert len([time for time in world.at("lines") if 600 < time < 1500]) <= 16
    assert len([time for time in world.at("lines") if 1700 < time < 2900]) >= 230, "and it recovers"


def test_the_last_lines() -> None:
    world = World(life(at=300), prints=[(300 + 4 * n, str(n)) for n in range(100)])
    world.watch()
    printed = [line.text for event in world.of(LinesPrinted) for line in event.lines]
    assert 6 <= len(printed) <= 12
    assert world.now <= 345, "who prints for ever is not listened to for ever"
    assert ["launch logs" in note.text for note in world.of(Note)] == [True]


def test_a_look_that_failed_has_not_seen_that_nothing_comes() -> None:
    world = World(life(at=300), faults=[(290, 315, "lines", AWAY)], prints=[(299, "the error")])
    world.watch()
    assert [line.text for event in world.of(LinesPrinted) for line in event.lines] == ["the error"]


def test_last_lines_that_cannot_be_read() -> None:
    world = World(life(at=300), faults=[(290, 1e9, "lines", AWAY)])
    assert world.watch().job.state == "SUCCEEDED"
    assert world.now <= 345
    [note] = world.of(Note)
    assert "launch logs" in note.text


def test_what_is_no_trouble_of_the_way_is_a_bug_and_comes_out() -> None:
    class Broken(World):
        def lines(self) -> list[Line]:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Broken(life()).watch()
