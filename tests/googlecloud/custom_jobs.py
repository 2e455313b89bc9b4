"""Vertex AI CustomJobs: create, get, list, cancel, delete.

A job's life is a script of stages, each a state and the seconds since creation at which it is entered. What a job
shows is worked out from the script and the clock when it is asked for: nothing moves in between. With a runner (see
`runs`) the job's process writes the end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from itertools import count
from typing import Any, NamedTuple

from google.cloud import aiplatform_v1
from google.longrunning import operations_pb2
from google.protobuf import empty_pb2

from tests.googlecloud.errors import ApiError
from tests.googlecloud.filters import matches
from tests.googlecloud.job_checks import check
from tests.googlecloud.protobufs import parse, to_json
from tests.googlecloud.runs import Ended, Runs
from tests.googlecloud.wire import Request, Response, Route, Target, json_response, page, page_step, route

PARENT = "/v1/projects/{project}/locations/{region}"
JOB = PARENT + "/customJobs/{job}"
NAMED = "aiplatform.projects.locations.customJobs."
State = aiplatform_v1.JobState
ENDED = frozenset(
    State["JOB_STATE_" + name] for name in ("SUCCEEDED", "FAILED", "CANCELLED", "EXPIRED", "PARTIALLY_SUCCEEDED")
)
CANCELLING, CANCELLED = "JOB_STATE_CANCELLING", "JOB_STATE_CANCELLED"
CANCELLED_ERROR = (1, "CANCELED")
"""google.rpc.Code's CANCELLED."""
CANCELLING_SECONDS = 1.0


class Stage(NamedTuple):
    """A state, when it is entered (seconds after creation), and the error it carries (google.rpc code, message)."""

    state: str
    after: float
    error: tuple[int, str] | None = None


LIFE = (
    Stage("JOB_STATE_QUEUED", 0),
    Stage("JOB_STATE_PENDING", 1),
    Stage("JOB_STATE_RUNNING", 2),
    Stage("JOB_STATE_SUCCEEDED", 3),
)


def parse_custom_job(body: dict[str, Any]) -> aiplatform_v1.CustomJob:
    """The body of customJobs.create as Google's type. Raises ApiError as Vertex would refuse it."""
    message = parse(body, aiplatform_v1.CustomJob.pb()(), "custom_job")
    check(message)
    return aiplatform_v1.CustomJob.wrap(message)


@dataclass(frozen=True)
class Job:
    """A job as it was submitted. Times are Unix seconds."""

    region: str
    id: str
    message: Any
    created: float
    stages: tuple[Stage, ...]
    runs: bool = False
    """A process on this machine says how it ends."""

    def at(self, now: float) -> list[Stage]:
        """The stages that it has entered, in their order."""
        return [stage for stage in self.stages if self.created + stage.after <= now]

    def has_ended(self, now: float) -> bool:
        """Whether it stays as it is."""
        return State[self.at(now)[-1].state] in ENDED


def shown(job: Job, now: float) -> Any:
    """The protobuf CustomJob that a client sees at `now`: with its state, times and error."""
    entered = [Stage(stage.state, stage.after + job.created, stage.error) for stage in job.at(now)]
    message = aiplatform_v1.CustomJob.pb()()
    message.CopyFrom(job.message)
    message.create_time.FromDatetime(_utc(job.created))
    message.update_time.FromDatetime(_utc(entered[-1].after))
    message.state = State[entered[-1].state]
    for stage in entered:
        if stage.state == "JOB_STATE_RUNNING" and not message.HasField("start_time"):
            message.start_time.FromDatetime(_utc(stage.after))
        if State[stage.state] in ENDED:
            message.end_time.FromDatetime(_utc(stage.after))
    if entered[-1].error:
        message.error.code, message.error.message = entered[-1].error
    return message


def cancelled(job: Job, now: float) -> Job:
    """The script, cut short by a cancellation. A process ends its job by itself."""
    before, after = job.at(now), now - job.created
    if job.has_ended(now) or before[-1].state == CANCELLING:
        return job
    end = () if job.runs else (Stage(CANCELLED, after + CANCELLING_SECONDS, CANCELLED_ERROR),)
    return replace(job, stages=(*before, Stage(CANCELLING, after), *end))


def ended(job: Job, how: Ended, now: float) -> Job:
    """With the end that its process had (https://cloud.google.com/vertex-ai/docs/training/monitor-debug-training)."""
    state, error = "JOB_STATE_SUCCEEDED", None
    if how.stopped:
        state, error = CANCELLED, CANCELLED_ERROR
    elif how.status:
        said = f"The replica {how.replica} exited with a non-zero status of {how.status}."
        state, error = "JOB_STATE_FAILED", (3, said)
    return replace(job, stages=(*job.at(now), Stage(state, now - job.created, error)))


class CustomJobs:
    """The service. `script` is given to each job that is created from now on; with `runs` they really run. `play` may
    have another life for a job, by its region and its request (protobuf), such as a stockout; None: as the others."""

    def __init__(
        self,
        project: str,
        number: str,
        clock: Callable[[], float],
        script: tuple[Stage, ...],
        runs: Runs | None = None,
    ) -> None:
        self.runs = runs
        self.project = project
        self.number = number
        self.clock = clock
        self.script = script
        self.play: Callable[[str, Any], tuple[Stage, ...] | None] = lambda region, message: None
        self.jobs: dict[tuple[str, str], Job] = {}
        self._ids = count(1_000_000_000_000_000_001)
        self._changing = threading.RLock()
        self.routes: list[Route] = [
            route("POST", PARENT + "/customJobs", self.create, NAMED + "create"),
            route("GET", PARENT + "/customJobs", self.list, NAMED + "list", _region),
            route("GET", JOB, self.get, NAMED + "get"),
            route("DELETE", JOB, self.delete, NAMED + "delete"),
            route("POST", JOB + ":cancel", self.cancel, NAMED + "cancel"),
        ]

    def create(self, request: Request, project: str, region: str) -> Response:
        """Take a job, and answer it in the first state of its script."""
        self._allow(project)
        request.only_query()
        return self._answer(request, shown(self.submit(region, request.json()), self.clock()))

    def submit(self, region: str, body: dict[str, Any]) -> Job:
        """Create a job without a request of HTTP. Raises ApiError as Vertex would refuse it."""
        message = aiplatform_v1.CustomJob.pb(parse_custom_job(body))
        asked, job_id = to_json(message), str(next(self._ids))
        message.name = f"projects/{self.number}/locations/{region}/customJobs/{job_id}"
        with self._changing:
            played = self.play(region, message)
            runs = self.runs if played is None else None
            script = played or (starting(runs.runner.pending) if runs else self.script)
            job = self.jobs[region, job_id] = Job(region, job_id, message, self.clock(), script, runs is not None)
            if runs:
                runs.start(job_id, asked, partial(self._end, region, job_id))
        return job

    def get(self, request: Request, project: str, region: str, job: str) -> Response:
        """One job as it is now."""
        request.only_query()
        return self._answer(request, shown(self._find(project, region, job), self.clock()))

    def list(self, request: Request, project: str, region: str) -> Response:
        """A page of the region's jobs, the newest first: those behind the last one of the page before, so that what
        is created or deleted meanwhile hides none."""
        self._allow(project)
        request.only_query("pageSize", "pageToken", "filter", "readMask", "orderBy")
        now, wanted = self.clock(), request.query.get("filter", "")
        before = _last_seen(request.query.get("pageToken", ""))
        there = [job for job in reversed([*self.jobs.values()]) if job.region == region and int(job.id) < before]
        kept = [answer for job in there if matches(answer := to_json(shown(job, now)), wanted)]
        items, more = page(kept, int(request.query.get("pageSize", 0)) or 100, "")
        following = {"nextPageToken": items[-1]["name"].rpartition("/")[2]} if more else {}
        return json_response({"customJobs": items, **following})

    def cancel(self, request: Request, project: str, region: str, job: str) -> Response:
        """Begin to cancel. A job that has ended stays as it is: cancelling is a best effort."""
        request.only_query()
        with self._changing:
            found = self.jobs[region, job] = cancelled(self._find(project, region, job), self.clock())
        if found.runs and self.runs:
            self.runs.stop(job)
        return json_response({})

    def delete(self, request: Request, project: str, region: str, job: str) -> Response:
        """Forget a job; the operation that comes back is done."""
        request.only_query()
        with self._changing:
            found = self._find(project, region, job)
            del self.jobs[region, job]
        if found.runs and self.runs:
            self.runs.stop(job)
        name = f"projects/{self.number}/locations/{region}/operations/{job}"
        operation = operations_pb2.Operation(name=name, done=True)
        operation.response.Pack(empty_pb2.Empty())
        return json_response(to_json(operation))

    def _end(self, region: str, job: str, how: Ended) -> None:
        """Its process has ended; of a deleted job nobody wants to know."""
        with self._changing:
            if found := self.jobs.get((region, job)):
                self.jobs[region, job] = ended(found, how, self.clock())

    def _find(self, project: str, region: str, job: str) -> Job:
        self._allow(project)
        if (region, job) not in self.jobs:
            raise ApiError(404, "The CustomJob does not exist.")
        return self.jobs[region, job]

    def _allow(self, project: str) -> None:
        if project not in (self.project, self.number):
            metadata = {"service": "aiplatform.googleapis.com", "consumer": f"projects/{project}"}
            said = f"Permission denied on resource project {project}."
            raise ApiError(403, said, info="CONSUMER_INVALID", metadata=metadata)

    def _answer(self, request: Request, message: Any) -> Response:
        numbers = "enum-encoding=int" in request.query.get("$alt", "")
        return json_response(to_json(message, enums_as_ints=numbers))


def stockout(region: str) -> tuple[Stage, ...]:
    """The life of a job for which there are no machines (a failed job's words, seen in answers of Vertex AI)."""
    said = f"Resources are insufficient in region: {region}. Please try a different region."
    return (*LIFE[:2], Stage("JOB_STATE_FAILED", 2, (8, said)))


def starting(pending: float) -> tuple[Stage, ...]:
    """The life of a job that runs, before its end."""
    waits = (Stage("JOB_STATE_QUEUED", 0), Stage("JOB_STATE_PENDING", pending / 2))
    return (*waits, Stage("JOB_STATE_RUNNING", pending))


def _last_seen(token: str) -> float:
    """The job that ended the page before, by its number: later ones are higher. Raises ApiError 400."""
    if token and not token.isdecimal():
        raise ApiError(400, "The page token is invalid.")
    return int(token) if token else float("inf")


def _region(request: Request, project: str, region: str) -> Target:
    return Target(region, page_step(request))


def _utc(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
