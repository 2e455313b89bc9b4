"""Artifact Registry's repositories: create, get, list, and the operations that create them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

from google.cloud import artifactregistry_v1
from google.longrunning import operations_pb2
from google.protobuf import empty_pb2

from launcher.testing.googlecloud.project.iam import Policies
from launcher.testing.googlecloud.protobufs import message_response, parse, to_json
from launcher.testing.googlecloud.wire import ApiError, Request, Response, Target, json_response, page, route, utc

PARENT = "/v1/projects/{project}/locations/{location}"
REPOSITORY = PARENT + "/repositories/{repository}"
NAMED = "artifactregistry.projects.locations."
LOCATIONS = ("asia", "asia-southeast1", "europe", "europe-west4", "us", "us-central1", "us-east5")
"""The supported locations, with three multi-regions."""


@dataclass(frozen=True)
class RepositoryRecord:
    """A repository that exists from `ready` (Unix seconds) on. `message` is Google's protobuf type."""

    message: Any
    ready: float


def _asked(request: Request, project: str, location: str) -> Target:
    return Target(request.query.get("repositoryId", ""))


class ArtifactRegistry:
    """The service. Creating a repository takes `seconds`."""

    def __init__(self, project: str, number: str, clock: Callable[[], float], policies: Policies) -> None:
        self.project = project
        self.number = number
        self.clock = clock
        self.seconds = 2.0
        self.repositories: dict[str, RepositoryRecord] = {}
        self.operations: dict[str, str] = {}
        """Operation -> repository, by full names."""
        self._ids = count(1)
        self.more_routes = policies.routes(REPOSITORY, NAMED + "repositories.", self._existing)

    @route("POST", PARENT + "/repositories", NAMED + "repositories.create", query="repositoryId", target=_asked)
    def create(self, request: Request, project: str, location: str) -> Response:
        parent = self._allow(project, location)
        message = parse(request.json(), artifactregistry_v1.Repository.pb()(), "repository")
        if not request.query.get("repositoryId") or not message.format_:  # proto-plus adds _ to the name of a builtin
            raise ApiError(400, "Request contains an invalid argument.")
        name = f"{parent}/repositories/{request.query['repositoryId']}"
        if name in self.repositories:
            raise ApiError(409, "the repository already exists")
        message.name = name
        message.create_time.FromDatetime(utc(self.clock()))
        self.repositories[name] = RepositoryRecord(message, self.clock() + self.seconds)
        operation = f"{parent}/operations/ar-{next(self._ids)}"
        self.operations[operation] = name
        return message_response(request, self._shown(operation))

    @route("GET", PARENT + "/operations/ar-{operation}", NAMED + "operations.get")
    def operation(self, request: Request, project: str, location: str, operation: str) -> Response:
        name = f"{self._allow(project, location)}/operations/ar-{operation}"
        if name not in self.operations:
            raise ApiError(404, "Requested entity was not found.")
        return message_response(request, self._shown(name))

    @route("GET", REPOSITORY, NAMED + "repositories.get")
    def get(self, request: Request, project: str, location: str, repository: str) -> Response:
        return message_response(request, self.repositories[self._existing(project, location, repository)].message)

    def _existing(self, project: str, location: str, repository: str) -> str:
        """Return the full name of a repository. Raises ApiError 404: it does not exist."""
        name = f"{self._allow(project, location)}/repositories/{repository}"
        if name not in self._there():
            raise ApiError(404, "Requested entity was not found.")
        return name

    @route("DELETE", REPOSITORY, NAMED + "repositories.delete")
    def delete(self, request: Request, project: str, location: str, repository: str) -> Response:
        parent = self._allow(project, location)
        if self.repositories.pop(f"{parent}/repositories/{repository}", None) is None:
            raise ApiError(404, "Requested entity was not found.")
        operation = operations_pb2.Operation(name=f"{parent}/operations/ar-{next(self._ids)}", done=True)
        operation.metadata.Pack(artifactregistry_v1.OperationMetadata.pb()())
        operation.response.Pack(empty_pb2.Empty())
        return message_response(request, operation)

    @route("GET", PARENT + "/repositories", NAMED + "repositories.list", query="pageSize pageToken")
    def list(self, request: Request, project: str, location: str) -> Response:
        parent = self._allow(project, location)
        names = [name for name in sorted(self._there()) if name.startswith(f"{parent}/")]
        items, following = page(names, int(request.query.get("pageSize", 0)) or 100, request.query.get("pageToken", ""))
        shown = [to_json(self.repositories[name].message) for name in items]
        return json_response({"repositories": shown, **({"nextPageToken": following} if following else {})})

    def _there(self) -> set[str]:
        return {name for name, record in self.repositories.items() if record.ready <= self.clock()}

    def _shown(self, name: str) -> Any:
        record = self.repositories[self.operations[name]]
        operation = operations_pb2.Operation(name=name, done=record.ready <= self.clock())
        operation.metadata.Pack(artifactregistry_v1.OperationMetadata.pb()())
        if operation.done:
            operation.response.Pack(record.message)
        return operation

    def _allow(self, project: str, location: str) -> str:
        """Return the parent's name.

        An unknown location is refused like any invalid argument, without details
        (https://github.com/terraform-google-modules/terraform-google-iam/pull/201).
        """
        if project not in (self.project, self.number):
            raise ApiError(403, f"Permission denied on resource project {project}.", info="CONSUMER_INVALID")
        if location not in LOCATIONS:
            raise ApiError(400, "Request contains an invalid argument.")
        return f"projects/{self.project}/locations/{location}"
