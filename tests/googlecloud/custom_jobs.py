"""Vertex AI CustomJobs: create, get, list, cancel, delete.

A job's life is a script of stages, each a state and the seconds since creation at which it is entered. What a job
shows is worked out from the script and the clock when it is asked for: nothing moves in between.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import count
from typing import Any, NamedTuple

from google.cloud import aiplatform_v1
from google.longrunning import operations_pb2
from google.protobuf import empty_pb2

from tests.googlecloud.errors import ApiError
from tests.googlecloud.filters import matches
from tests.googlecloud.job_checks import check
from tests.googlecloud.protobufs import parse, to_json
from tests.googlecloud.wire import Request, Response, Route, json_response, page, route

PARENT = "/v1/projects/{project}/locations/{region}"
JOB = PARENT + "/customJobs/{job}"
NAMED = "aiplatform.projects.locations.customJobs."
State = aiplatform_v1.JobState
ENDED = frozenset(
    State["JOB_STATE_" + name] for name in ("SUCCEEDED", "FAILED", "CANCELLED", "EXPIRED", "PARTIALLY_SUCCEEDED")
)
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
    cancelled: float | None = None


def shown(job: Job, now: float) -> Any:
    """The protobuf CustomJob that a client sees at `now`: with its state, times and error."""
    entered = [(Stage(s.state, s.after + job.created, s.error)) for s in stages_of(job) if job.created + s.after <= now]
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


def stages_of(job: Job) -> tuple[Stage, ...]:
    """The script, cut short by a cancellation (which gives error code 1, google.rpc CANCELLED)."""
    if job.cancelled is None:
        return job.stages
    at = job.cancelled - job.created
    before = tuple(stage for stage in job.stages if stage.after <= at)
    end = Stage("JOB_STATE_CANCELLED", at + CANCELLING_SECONDS, (1, "CANCELED"))
    return (*before, Stage("JOB_STATE_CANCELLING", at), end)


class CustomJobs:
    """The service. `script` is given to each job that is created from now on."""

    def __init__(self, project: str, number: str, clock: Callable[[], float], script: tuple[Stage, ...]) -> None:
        self.project = project
        self.number = number
        self.clock = clock
        self.script = script
        self.jobs: dict[tuple[str, str], Job] = {}
        self._ids = count(1_000_000_000_000_000_001)
        self.routes: list[Route] = [
            route("POST", PARENT + "/customJobs", self.create, NAMED + "create"),
            route("GET", PARENT + "/customJobs", self.list, NAMED + "list"),
            route("GET", JOB, self.get, NAMED + "get"),
            route("DELETE", JOB, self.delete, NAMED + "delete"),
            route("POST", JOB + ":cancel", self.cancel, NAMED + "cancel"),
        ]

    def create(self, request: Request, project: str, region: str) -> Response:
        """Take a job, and answer it in the first state of its script."""
        self._allow(project)
        request.only_query()
        message = aiplatform_v1.CustomJob.pb(parse_custom_job(request.json()))
        job_id = str(next(self._ids))
        message.name = f"projects/{self.number}/locations/{region}/customJobs/{job_id}"
        job = self.jobs[region, job_id] = Job(region, job_id, message, self.clock(), self.script)
        return self._answer(request, shown(job, self.clock()))

    def get(self, request: Request, project: str, region: str, job: str) -> Response:
        """One job as it is now."""
        request.only_query()
        return self._answer(request, shown(self._find(project, region, job), self.clock()))

    def list(self, request: Request, project: str, region: str) -> Response:
        """A page of the region's jobs, the newest first."""
        self._allow(project)
        request.only_query("pageSize", "pageToken", "filter", "readMask", "orderBy")
        now, wanted = self.clock(), request.query.get("filter", "")
        jobs = [shown(job, now) for job in reversed(self.jobs.values()) if job.region == region]
        kept = [to_json(job) for job in jobs if matches(to_json(job), wanted)]
        size = int(request.query.get("pageSize", 0)) or 100
        items, following = page(kept, size, request.query.get("pageToken", ""))
        return json_response({"customJobs": items, **({"nextPageToken": following} if following else {})})

    def cancel(self, request: Request, project: str, region: str, job: str) -> Response:
        """Begin to cancel. A job that has ended stays as it is: cancelling is a best effort."""
        request.only_query()
        found, now = self._find(project, region, job), self.clock()
        if shown(found, now).state not in ENDED and found.cancelled is None:
            self.jobs[region, job] = replace(found, cancelled=now)
        return json_response({})

    def delete(self, request: Request, project: str, region: str, job: str) -> Response:
        """Forget a job; the operation that comes back is done."""
        request.only_query()
        self._find(project, region, job)
        del self.jobs[region, job]
        name = f"projects/{self.number}/locations/{region}/operations/{job}"
        operation = operations_pb2.Operation(name=name, done=True)
        operation.response.Pack(empty_pb2.Empty())
        return json_response(to_json(operation))

    def _find(self, project: str, region: str, job: str) -> Job:
        self._allow(project)
        if (region, job) not in self.jobs:
            raise ApiError(404, "The CustomJob does not exist.")
        return self.jobs[region, job]

    def _allow(self, project: str) -> None:
        if project not in (self.project, self.number):
            raise ApiError(403, f"Permission denied on resource project {project}.")

    def _answer(self, request: Request, message: Any) -> Response:
        numbers = "enum-encoding=int" in request.query.get("$alt", "")
        return json_response(to_json(message, enums_as_ints=numbers))


def _utc(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
