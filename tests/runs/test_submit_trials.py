"""Never two jobs for one run id: whatever goes wrong with whichever request, however often the command is typed."""

from __future__ import annotations

import random
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count, islice, product
from typing import Any, ClassVar

import pytest
from requests.adapters import HTTPAdapter

from launch_train.common.storage import GcsFolder, client
from launch_train.common.storage.retry import RetryClock
from launcher.clock import Clock
from launcher.jobs.job import ENDED, RUN_LABEL, Job
from launcher.plan.model import Plan
from launcher.runs.endings import RunSucceeded
from launcher.runs.ledger import Ledger
from launcher.services.vertex import Vertex
from launcher.testing.googlecloud import FakeClock, Fault, GoogleCloud, Reset, Stage, Status, Truncated
from launcher.testing.googlecloud.faults import Serve, Step
from launcher.testing.googlecloud.wire import Call, Response
from tests.runs.submitting import CREATE, DIGEST, LIST, LONG, plan_of, submit

SHORT = (Stage("JOB_STATE_RUNNING", 0), Stage("JOB_STATE_SUCCEEDED", 1))


@dataclass(frozen=True)
class AfterEffect:
    """The job is made, and then a gateway answers for the service."""

    code: int = 503
    step: ClassVar[Step | None] = None

    def __call__(self, call: Call, serve: Serve) -> Response:
        serve(call.request)
        return Status(self.code)(call, serve)


@dataclass(frozen=True)
class LateEffect:
    """The job is made some real time after the request came: others look around meanwhile."""

    seconds: float = 0.3
    step: ClassVar[Step | None] = None

    def __call__(self, call: Call, serve: Serve) -> Response:
        threading.Event().wait(self.seconds)
        return serve(call.request)


class KilledError(BaseException):
    """The command is killed at once: nothing of it catches this."""


class Killed(Vertex):
    """Dies between sending a create and its answer."""

    def create_in(self, region: str, body: Mapping[str, Any]) -> Job:
        super().create_in(region, body)
        raise KilledError


LOST = (Reset("after"), Reset(), AfterEffect(), AfterEffect(502), Truncated())
EFFECTS = (None, Status(503), Status(500), Status(429), *LOST)
LOOKS = (None, Status(503), Reset())
PARTS, KILLS = 5, 3
"""All trials take half a minute: `make test` has every fifth (of the kills every third), which are of all kinds;
`make fuzz` has the others."""


@dataclass
class Trials:
    """One cloud for all trials, a run each."""

    cloud: GoogleCloud
    clock: FakeClock
    chance: random.Random
    storage: Any

    def __post_init__(self) -> None:
        self.time = Clock(self.clock, self.clock.advance)
        self.vertex = Vertex("my-project", self.cloud.environ(), self.time)
        self.names = count(1)

    def plan(self, regions: int = 2) -> Plan:
        name, where = f"trial-{next(self.names)}", ["us-central1", "us-east5"][:regions]
        return plan_of(name=name, image={"uri": DIGEST}, provisioning=["spot", "standard"], regions=where)

    def ledger(self, plan: Plan, time: Clock, *, bucket: bool) -> Ledger:
        if not bucket:
            return Ledger(None, time)
        world = RetryClock(time.now, time.sleep, self.chance.random)
        return Ledger(GcsFolder(str(plan.run_folder), self.storage, world=world), time)

    def launch(self, plan: Plan, *, bucket: bool, vertex: Vertex | None = None, time: Clock | None = None) -> str:
        """The name of the job that a command ends with; or how it ends without one."""
        time = time or self.time
        try:
            got = submit(
                plan,
                vertex or self.vertex,
                self.ledger(plan, time, bucket=bucket),
                time,
                lambda _line: None,
                fresh=True,
                ready=lambda plan: plan,
                extra_regions=(),
                wall_clock=time.now,
                jitter=self.chance.random,
            )
        except KilledError:
            return "killed"
        except RunSucceeded as error:
            return error.job.name if error.job else "gone"
        return got.job.name

    def clear(self) -> None:
        """Plan no faults, and forget the jobs of the trials before: a list of hundreds takes its time."""
        self.cloud.faults.clear()
        self.cloud.jobs.jobs.clear()

    def living(self, plan: Plan) -> list[Job]:
        """The run's jobs that wait, run or have succeeded."""
        regions = dict.fromkeys(attempt.region for attempt in plan.attempts)
        found = self.vertex.find(f"labels.{RUN_LABEL}={plan.run}", regions).jobs
        return [job for job in found if job.state not in ENDED - {"SUCCEEDED"} and job.state != "CANCELLING"]


@pytest.fixture
def trials(cloud: GoogleCloud, clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> Trials:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", cloud.url)
    return Trials(cloud, clock, random.Random(5), client.open_storage_client())


def rarely(*values: Any) -> list[Any]:
    """Parameters for `make fuzz` alone."""
    return [pytest.param(value, marks=pytest.mark.fuzz) for value in values]


@pytest.mark.slow
@pytest.mark.parametrize("part", [0, *rarely(*range(1, PARTS))])
def test_never_two(trials: Trials, part: int) -> None:
    """Each trial: a command that may be killed and meets a fault, then the same one again, and again."""
    done = 0
    whole = product(EFFECTS, LOOKS, (True, False), (True, False), (LONG, SHORT))
    for effect, look, bucket, killed, script in islice(whole, part, None, PARTS):
        plan = trials.plan(regions=1 if script is LONG else 2)
        trials.clear()
        trials.cloud.jobs.script = script
        if effect:
            trials.cloud.faults.add(Fault(CREATE, effect, times=trials.chance.choice((1, 1, 1, 2))))
        if look:
            times, after = trials.chance.randint(1, 4), trials.chance.randint(0, 6)
            trials.cloud.faults.add(Fault(LIST, look, times=times, after=after))
        if bucket and trials.chance.random() < 0.5:
            lost = trials.chance.choice((Reset("after"), AfterEffect(), Status(503)))
            trials.cloud.faults.add(
                Fault("storage.objects.insert", lost, name="attempts/", after=trials.chance.randint(0, 2))
            )
        vertex = Killed("my-project", trials.cloud.environ(), trials.time) if killed else trials.vertex
        vertex._clients._apis = trials.vertex._clients._apis
        got = [trials.launch(plan, bucket=bucket, vertex=vertex), *(trials.launch(plan, bucket=bucket) for _ in "12")]
        case = (effect, look, bucket, killed, script, got)
        living = trials.living(plan)
        assert len(living) == 1, case
        assert set(got) - {"killed"} == {living[0].name}, case
        done += 1
    assert done >= 200 // PARTS


class Meeting:
    """A clock for several threads that moves only when all of them wait: while one of them has a request under way,
    no time goes by for the others."""

    def __init__(self, clock: FakeClock, active: int) -> None:
        self.clock = clock
        self.active = active
        self.waiting: list[float] = []
        self.changed = threading.Condition()

    def sleep(self, seconds: float) -> None:
        with self.changed:
            until = self.clock.now + seconds
            self.waiting.append(until)
            self.move()
            while self.clock.now < until:
                self.changed.wait()

    def leave(self) -> None:
        with self.changed:
            self.active -= 1
            self.move()

    def move(self) -> None:
        if self.waiting and len(self.waiting) >= self.active:
            self.clock.now = min(self.waiting)
            self.waiting = [until for until in self.waiting if until > self.clock.now]
            self.changed.notify_all()


def at_once(trials: Trials, plan: Plan, *, bucket: bool, launches: int = 10) -> list[str]:
    """The same command so often at the same moment: what each ends with."""
    meeting = Meeting(trials.clock, launches)
    time = Clock(trials.clock, meeting.sleep)
    start = threading.Barrier(launches)

    def one(_: int) -> str:
        vertex = Vertex("my-project", trials.cloud.environ(), time)
        vertex._clients._apis = {
            name: type(api)(api.service, api.project, api.client, time) for name, api in apis.items()
        }
        start.wait()
        try:
            return trials.launch(plan, bucket=bucket, vertex=vertex, time=time)
        finally:
            meeting.leave()

    apis = trials.vertex._clients._apis
    with ThreadPoolExecutor(launches) as threads:
        return list(threads.map(one, range(launches)))


QUIET, ERROR, ERROR_500, ERROR_429, RESET, *OTHERS = EFFECTS


@pytest.mark.slow
@pytest.mark.parametrize("effect", [LateEffect(), ERROR, RESET, *rarely(QUIET, ERROR_500, ERROR_429, *OTHERS)])
def test_ten_at_once(trials: Trials, effect: Any) -> None:
    trials.vertex.find("labels.launch-run=none", ["us-central1"])  # the client is there, and its imports are done
    plan = trials.plan()
    trials.cloud.jobs.script = LONG
    if effect:
        trials.cloud.faults.add(Fault(CREATE, effect, times=2))
    got = at_once(trials, plan, bucket=True)
    [living] = trials.living(plan)
    assert set(got) == {living.name}
    made = len(trials.cloud.jobs.jobs)
    assert made == 1, "the lock lets one of them create"


def test_ten_at_once_without_a_bucket(trials: Trials) -> None:
    """Each may make a job; the oldest stays."""
    trials.vertex.find("labels.launch-run=none", ["us-central1"])
    plan = trials.plan()
    trials.cloud.jobs.script = LONG
    got = at_once(trials, plan, bucket=False)
    [living] = trials.living(plan)
    assert set(got) == {living.name}


class Cord:
    """Kills the command at its n-th request: before that is sent, or after it has had its effect."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left, self.after = -1, False
        send = HTTPAdapter.send

        def counted(adapter: HTTPAdapter, *args: Any, **options: Any) -> Any:
            self.left -= 1
            if self.left == 0 and not self.after:
                raise KilledError
            answer = send(adapter, *args, **options)
            if self.left == 0:
                raise KilledError
            return answer

        monkeypatch.setattr(HTTPAdapter, "send", counted)


@pytest.mark.slow
@pytest.mark.parametrize("part", [0, *rarely(*range(1, KILLS))])
def test_killed_at_any_request(trials: Trials, part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, and the next command too at each of its own; then it is left to itself."""
    cord = Cord(monkeypatch)
    trials.cloud.jobs.script = LONG
    kills = 0
    whole = product(range(1, 11), (True, False), (True, False))
    for first, after, bucket in islice(whole, part, None, KILLS):
        plan = trials.plan(regions=1)
        trials.clear()
        for at in (first, trials.chance.randint(1, 10)):
            cord.left, cord.after = at, after
            kills += trials.launch(plan, bucket=bucket) == "killed"
        cord.left = -1
        got = {trials.launch(plan, bucket=bucket) for _ in "12"}
        case = (first, after, bucket)
        [living] = trials.living(plan)
        assert got == {living.name}, case
        assert len(trials.cloud.jobs.jobs) == 1, case
    assert kills > 30 // KILLS
