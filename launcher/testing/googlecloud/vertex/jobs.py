"""Vertex AI CustomJobs: create, get, list, cancel, delete.

A job's life is a script of stages, each a state and the seconds since creation at which it is entered. The visible
state is computed from the script and the clock on each request. With a runner (see `processes`), the job's process
determines the end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any, NamedTuple

from google.cloud import aiplatform_v1
from google.longrunning import operations_pb2
from google.protobuf import empty_pb2

from launcher.testing.googlecloud.filters import Test, compiled
from launcher.testing.googlecloud.protobufs import message_response, parse, to_json
from launcher.testing.googlecloud.vertex.checks import check
from launcher.testing.googlecloud.vertex.processes import Ended, Runs
from launcher.testing.googlecloud.wire import (
    ApiError,
    Request,
    Response,
    json_response,
    page,
    route,
    utc,
)

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
    """A state, the time at which it is entered (seconds after creation), and its error (google.rpc code, message)."""

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
    """Parse the body of customJobs.create to Google's type. Raises ApiError as Vertex does."""
    message = parse(body, aiplatform_v1.CustomJob.pb()(), "custom_job")
    check(message)
    return aiplatform_v1.CustomJob.wrap(message)


@dataclass(frozen=True)
class Job:
    """A submitted job. Times are Unix seconds."""

    region: str
    id: str
    message: Any
    created: float
    stages: tuple[Stage, ...]
    runs: bool = False
    """True if a process on this machine determines the end."""

    def at(self, now: float) -> list[Stage]:
        """Return the stages entered so far, in order."""
        return [stage for stage in self.stages if self.created + stage.after <= now]

    def has_ended(self, now: float) -> bool:
        return State[self.at(now)[-1].state] in ENDED


def shown(job: Job, now: float) -> Any:
    """Return the protobuf CustomJob that a client sees at `now`, with state, times and error."""
    entered = [Stage(stage.state, stage.after + job.created, stage.error) for stage in job.at(now)]
    message = aiplatform_v1.CustomJob.pb()()
    message.CopyFrom(job.message)
    message.create_time.FromDatetime(utc(job.created))
    message.update_time.FromDatetime(utc(entered[-1].after))
    message.state = State[entered[-1].state]
    for stage in entered:
        if stage.state == "JOB_STATE_RUNNING" and not message.HasField("start_time"):
            message.start_time.FromDatetime(utc(stage.after))
        if State[stage.state] in ENDED:
            message.end_time.FromDatetime(utc(stage.after))
    if entered[-1].error:
        message.error.code, message.error.message = entered[-1].error
    return message


def cancelled(job: Job, now: float) -> Job:
    """Return the job with its script ended by a cancellation. A job with a process ends by itself."""
    before, after = job.at(now), now - job.created
    if job.has_ended(now) or before[-1].state == CANCELLING:
        return job
    end = () if job.runs else (Stage(CANCELLED, after + CANCELLING_SECONDS, CANCELLED_ERROR),)
    return replace(job, stages=(*before, Stage(CANCELLING, after), *end))


def ended(job: Job, how: Ended, now: float) -> Job:
    """Return the job with its process's end.

    https://cloud.google.com/vertex-ai/docs/training/monitor-debug-training
    """
    state, error = "JOB_STATE_SUCCEEDED", None
    if how.stopped:
        state, error = CANCELLED, CANCELLED_ERROR
    elif how.status:
        said = f"The replica {how.replica} exited with a non-zero status of {how.status}."
        state, error = "JOB_STATE_FAILED", (3, said)
    return replace(job, stages=(*job.at(now), Stage(state, now - job.created, error)))


@dataclass(eq=False)
class CustomJobs:
    """The service.

    `script` is the life of jobs created from now on. With `runs` they run as processes. `play` may return another life
    for a job, by its region and request (protobuf), such as a stockout. None: the default.
    """

    project: str
    number: str
    clock: Callable[[], float]
    script: tuple[Stage, ...]
    runs: Runs | None = None
    play: Callable[[str, Any], tuple[Stage, ...] | None] = lambda region, message: None
    jobs: dict[tuple[str, str], Job] = field(default_factory=dict)
    _ids: count[int] = field(default_factory=partial(count, 1_000_000_000_000_000_001))
    _changing: threading.RLock = field(default_factory=threading.RLock)

    @route("POST", PARENT + "/customJobs", NAMED + "create")
    def create(self, request: Request, project: str, region: str) -> Response:
        self._allow(project)
        return message_response(request, shown(self.submit(region, request.json()), self.clock()))

    def submit(self, region: str, body: dict[str, Any]) -> Job:
        """Create a job without an HTTP request. Raises ApiError as Vertex does."""
        message = aiplatform_v1.CustomJob.pb(parse_custom_job(body))
        body_json, job_id = to_json(message), str(next(self._ids))
        message.name = f"projects/{self.number}/locations/{region}/customJobs/{job_id}"
        with self._changing:
            played = self.play(region, message)
            runs = self.runs if played is None else None
            pending = runs.runner.pending if runs else 0
            times = {"JOB_STATE_QUEUED": 0, "JOB_STATE_PENDING": pending / 2, "JOB_STATE_RUNNING": pending}
            script = played or (tuple(Stage(*stage) for stage in times.items()) if runs else self.script)
            job = self.jobs[region, job_id] = Job(region, job_id, message, self.clock(), script, runs is not None)
            if runs:
                runs.start(job_id, body_json, partial(self._end, region, job_id))
        return job

    @route("GET", JOB, NAMED + "get")
    def get(self, request: Request, project: str, region: str, job: str) -> Response:
        return message_response(request, shown(self._find(project, region, job), self.clock()))

    @route("GET", PARENT + "/customJobs", NAMED + "list", query="pageSize pageToken filter readMask orderBy")
    def list(self, request: Request, project: str, region: str) -> Response:
        """Return a page of the region's jobs, newest first.

        A page begins after the last job of the previous page, so that creations and deletions in between hide nothing.
        """
        self._allow(project)
        now, passes = self.clock(), compiled(request.query.get("filter", ""), compare)
        token = request.query.get("pageToken", "")
        if token and not token.isdecimal():
            raise ApiError(400, "The page token is invalid.")
        before = int(token) if token else float("inf")
        there = [job for job in reversed([*self.jobs.values()]) if job.region == region and int(job.id) < before]
        kept = [answer for job in there if passes(answer := to_json(shown(job, now)))]
        items, more = page(kept, int(request.query.get("pageSize", 0)) or 100, "")
        following = {"nextPageToken": items[-1]["name"].rpartition("/")[2]} if more else {}
        return json_response({"customJobs": items, **following})

    @route("POST", JOB + ":cancel", NAMED + "cancel")
    def cancel(self, request: Request, project: str, region: str, job: str) -> Response:
        with self._changing:
            job_record = self.jobs[region, job] = cancelled(self._find(project, region, job), self.clock())
        if job_record.runs and self.runs:
            self.runs.stop(job)
        return json_response({})

    @route("DELETE", JOB, NAMED + "delete")
    def delete(self, request: Request, project: str, region: str, job: str) -> Response:
        with self._changing:
            job_record = self._find(project, region, job)
            del self.jobs[region, job]
        if job_record.runs and self.runs:
            self.runs.stop(job)
        name = f"projects/{self.number}/locations/{region}/operations/{job}"
        operation = operations_pb2.Operation(name=name, done=True)
        operation.response.Pack(empty_pb2.Empty())
        return json_response(to_json(operation))

    def _end(self, region: str, job: str, how: Ended) -> None:
        """Record the end of a job's process. A deleted job is ignored."""
        with self._changing:
            if record := self.jobs.get((region, job)):
                self.jobs[region, job] = ended(record, how, self.clock())

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


def stockout(region: str) -> tuple[Stage, ...]:
    """Return the life of a job without available machines (message seen in answers of Vertex AI)."""
    said = f"Resources are insufficient in region: {region}. Please try a different region."
    return (*LIFE[:2], Stage("JOB_STATE_FAILED", 2, (8, said)))


def compare(field: str, sign: str, value: str) -> Test:
    """Return a comparison of a job's label: labels.KEY=VALUE, labels.KEY:*. Raises ApiError 400: unsupported."""
    key = field.removeprefix("labels.")
    if key == field or sign not in (":", "="):
        raise ApiError(400, f"Invalid filter: {field}{sign}{value}")
    if sign == "=":
        return lambda job: job.get("labels", {}).get(key) == value
    return lambda job: key in job.get("labels", {})
