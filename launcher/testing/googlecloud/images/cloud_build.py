"""Cloud Build: create, get, list and cancel builds. Nothing is built; logs and outcomes are simulated.

A build's log is an object in its bucket. Each request to this service updates it to the current time.
"""

from __future__ import annotations

import hashlib
import io
import re
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, NamedTuple

from google.cloud.devtools import cloudbuild_v1
from google.longrunning import operations_pb2

from launcher.testing.googlecloud.filters import Test, compiled
from launcher.testing.googlecloud.protobufs import message_response, parse, to_json
from launcher.testing.googlecloud.storage.objects import Objects
from launcher.testing.googlecloud.wire import (
    ApiError,
    Request,
    Response,
    check_project,
    json_response,
    page,
    route,
    utc,
)

PARENT = "/v1/projects/{project}/locations/{location}"
BUILD = PARENT + "/builds/{build}"
NAMED = "cloudbuild.projects.locations.builds."
WORKING_AFTER = 2.0
ACTIVE = ("QUEUED", "WORKING")
Status = cloudbuild_v1.Build.Status
TAG = re.compile(r"\w[\w.-]{0,127}")
OUTPUT_ONLY = ("name", "id", "project_id", "status", "results", "create_time", "start_time", "finish_time", "log_url")


class Outcome(NamedTuple):
    """A build's life: its log texts with the seconds after creation, and the time and status of its end."""

    said: tuple[tuple[float, str], ...]
    ended: float
    status: str = "SUCCESS"
    detail: str = ""


@dataclass(frozen=True)
class SubmittedBuild:
    """A submitted build. Times are Unix seconds."""

    message: Any
    created: float
    outcome: Outcome


def played(message: Any, source: bytes | None) -> Outcome:
    """Return the default life: Docker builds the requested stage, if the source has it."""
    if source is None:
        return Outcome(((3.0, "FETCHSOURCE\n"),), 4.0, "FAILURE", "could not resolve source: googleapi: Error 404")
    args = dict(arg.split("=", 1) for arg in message.steps[0].args if arg.startswith("--") and "=" in arg)
    with tarfile.open(fileobj=io.BytesIO(source), mode="r:gz") as tar:
        dockerfile = tar.extractfile(args.get("--file", "Dockerfile"))
        recipe = dockerfile.read().decode() if dockerfile else ""
    target = args.get("--target", "")
    if not re.search(rf"(?im)^FROM .* AS {target}$", recipe):
        said = f"failed to reach build target {target} in Dockerfile\n"
        return Outcome(((3.0, said),), 5.0, "FAILURE", "Build failed; check build logs for details")
    return Outcome(((3.0, "Step 1/9 : ARG BASE\nStep 2/9 : FR"), (6.0, "OM python\n"), (9.0, "DONE")), 9.0)


class CloudBuild:
    """The service. `play` returns the outcome of new builds, by build and source."""

    def __init__(self, project: str, number: str, clock: Callable[[], float], objects: Objects) -> None:
        self.project = project
        self.number = number
        self.clock = clock
        self.objects = objects
        self.play: Callable[[Any, bytes | None], Outcome] = played
        self.builds: dict[str, SubmittedBuild] = {}
        self._ids = count(1)

    @route("POST", PARENT + "/builds", NAMED + "create")
    def create(self, request: Request, project: str, location: str) -> Response:
        check_project(project, self.project, self.number)
        message = parse(request.json(), cloudbuild_v1.Build.pb()(), "build")
        check(message)
        message.id = f"{next(self._ids):08d}-0000-4000-8000-000000000000"
        message.project_id = self.project
        message.name = f"projects/{self.number}/locations/{location}/builds/{message.id}"
        message.log_url = f"https://console.cloud.google.com/cloud-build/builds/{message.id}?project={self.number}"
        message.service_account = message.service_account or (
            f"projects/{self.project}/serviceAccounts/{self.number}-compute@developer.gserviceaccount.com"
        )
        self.builds[message.id] = SubmittedBuild(message, self.clock(), self.play(message, self._source(message)))
        operation = operations_pb2.Operation(name=f"operations/build/{self.project}/{message.id}")
        metadata = cloudbuild_v1.BuildOperationMetadata.pb()()
        metadata.build.CopyFrom(self._shown(message.id))
        operation.metadata.Pack(metadata)
        return message_response(request, operation)

    @route("GET", BUILD, NAMED + "get")
    def get(self, request: Request, project: str, location: str, build: str) -> Response:
        return message_response(request, self._find(project, location, build))

    @route("GET", PARENT + "/builds", NAMED + "list", query="pageSize pageToken filter")
    def list(self, request: Request, project: str, location: str) -> Response:
        check_project(project, self.project, self.number)
        builds = [self._shown(build) for build in reversed(self.builds)]
        passes = compiled(request.query.get("filter", ""), compare)
        kept = [build for build in builds if f"/locations/{location}/" in build.name and passes(build)]
        items, following = page(kept, int(request.query.get("pageSize", 0)) or 50, request.query.get("pageToken", ""))
        shown = [to_json(build, request) for build in items]
        return json_response({"builds": shown, **({"nextPageToken": following} if following else {})})

    @route("POST", BUILD + ":cancel", NAMED + "cancel")
    def cancel(self, request: Request, project: str, location: str, build: str) -> Response:
        """Cancel a running build. Raises ApiError 400 for one that has ended."""
        if self._find(project, location, build).status not in [Status[name] for name in ACTIVE]:
            raise ApiError(400, "cannot cancel build: it has ended", status="FAILED_PRECONDITION")
        submitted = self.builds[build]
        seconds = self.clock() - submitted.created
        lines = tuple(line for line in submitted.outcome.said if line[0] <= seconds)
        self.builds[build] = replace(submitted, outcome=Outcome(lines, seconds, "CANCELLED"))
        return message_response(request, self._shown(build))

    def _find(self, project: str, location: str, build: str) -> Any:
        check_project(project, self.project, self.number)
        if build not in self.builds or f"/locations/{location}/" not in self.builds[build].message.name:
            raise ApiError(404, "Requested entity was not found.")
        return self._shown(build)

    def _shown(self, build: str) -> Any:
        """Return the build in its current state, and update its log."""
        submitted, now = self.builds[build], self.clock()
        seconds, outcome = now - submitted.created, submitted.outcome
        message = cloudbuild_v1.Build.pb()()
        message.CopyFrom(submitted.message)
        message.create_time.FromDatetime(utc(submitted.created))
        message.status = Status["WORKING" if seconds >= WORKING_AFTER else "QUEUED"]
        if seconds >= outcome.ended:
            message.status = Status[outcome.status]
            message.finish_time.FromDatetime(utc(submitted.created + outcome.ended))
            message.status_detail = outcome.detail
            end(message, outcome)
        text = "".join(text for after, text in outcome.said if after <= seconds)
        bucket, _, folder = message.logs_bucket.removeprefix("gs://").partition("/")
        if text and bucket in self.objects.buckets:
            self.objects.put(bucket, f"{folder}/log-{message.id}.txt".lstrip("/"), text.encode())
        return message

    def _source(self, message: Any) -> bytes | None:
        where = message.source.storage_source
        blob = self.objects.buckets.get(where.bucket, {}).get(where.object_)
        wanted = where.generation or (blob.generation if blob else 0)
        return blob.data if blob and blob.generation == wanted else None


def check(message: Any) -> None:
    """Raise ApiError 400 for a build that Cloud Build rejects."""
    given_fields = {field.name for field, _ in message.ListFields()}
    if output_only := [name for name in OUTPUT_ONLY if name in given_fields]:
        raise ApiError(400, f"invalid build: {', '.join(output_only)} is set by Cloud Build alone")
    if not message.steps:
        raise ApiError(400, "invalid build: no build steps are specified")
    if bad := [tag for tag in message.tags if not TAG.fullmatch(tag)]:
        raise ApiError(400, f"invalid build: tag {bad[0]!r} must match {TAG.pattern}")
    if message.options.logging == cloudbuild_v1.BuildOptions.LoggingMode.GCS_ONLY and not message.logs_bucket:
        raise ApiError(400, "invalid build: GCS_ONLY needs a logs bucket here")
    if message.service_account and not message.logs_bucket:
        raise ApiError(400, "if 'build.service_account' is specified, the build must say where its logs go")
    for text in (arg for step in message.steps for arg in step.args):
        if match := re.search(r"\$\{?\w+", text.replace("$$", "")):
            raise ApiError(400, f'generic::invalid_argument: key "{match[0]}" is not a valid built-in substitution')


def end(message: Any, outcome: Outcome) -> None:
    """Set the final fields of a build: its steps' states, and the digests of the pushed images."""
    last = len(message.steps) - 1
    for n, step in enumerate(message.steps):
        step.status = Status[outcome.status if n == last else "SUCCESS"]
    if outcome.status == "SUCCESS":
        for image in message.images:
            digest = hashlib.sha256(f"{image} {message.id}".encode()).hexdigest()
            message.results.images.add(name=image, digest=f"sha256:{digest}")


def compare(field: str, sign: str, value: str) -> Test:
    """Return a comparison of a build's tags (tags="a"). Raises ApiError 400: unsupported."""
    if (field, sign) != ("tags", "="):
        raise ApiError(400, f"Invalid filter: {field}{sign}{value}")
    return lambda build: value in build.tags
