"""Artifact Registry's repositories: create, get, list, and the operations that create them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

from google.cloud import artifactregistry_v1
from google.longrunning import operations_pb2
from google.protobuf import empty_pb2

from launcher.testing.googlecloud.clock import utc
from launcher.testing.googlecloud.project.iam import Policies
from launcher.testing.googlecloud.protobufs import message_response, parse, to_json
from launcher.testing.googlecloud.wire import ApiError, Request, Response, Route, Target, json_response, page, route

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
        self.routes: list[Route] = [
            route("POST", PARENT + "/repositories", self.create, NAMED + "repositories.create", _asked),
            route("GET", PARENT + "/repositories", self.list, NAMED + "repositories.list"),
            route("GET", REPOSITORY, self.get, NAMED + "repositories.get"),
            *policies.routes(REPOSITORY, NAMED + "repositories.", self._existing),
            route("DELETE", REPOSITORY, self.delete, NAMED + "repositories.delete"),
            route("GET", PARENT + "/operations/ar-{operation}", self.operation, NAMED + "operations.get"),
        ]

    def create(self, request: Request, project: str, location: str) -> Response:
        """Begin to create a repository. Returns the operation."""
        parent = self._allow(project, location)
        request.only_query("repositoryId")
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

    def operation(self, request: Request, project: str, location: str, operation: str) -> Response:
        """Return an operation's state."""
        name = f"{self._allow(project, location)}/operations/ar-{operation}"
        request.only_query()
        if name not in self.operations:
            raise ApiError(404, "Requested entity was not found.")
        return message_response(request, self._shown(name))

    def get(self, request: Request, project: str, location: str, repository: str) -> Response:
        """Return one repository."""
        request.only_query()
        return message_response(request, self.repositories[self._existing(project, location, repository)].message)

    def _existing(self, project: str, location: str, repository: str) -> str:
        """Return the full name of a repository. Raises ApiError 404: it does not exist."""
        name = f"{self._allow(project, location)}/repositories/{repository}"
        if name not in self._there():
            raise ApiError(404, "Requested entity was not found.")
        return name

    def delete(self, request: Request, project: str, location: str, repository: str) -> Response:
        """Delete a repository. The returned operation is done."""
        parent = self._allow(project, location)
        request.only_query()
        if self.repositories.pop(f"{parent}/repositories/{repository}", None) is None:
            raise ApiError(404, "Requested entity was not found.")
        operation = operations_pb2.Operation(name=f"{parent}/operations/ar-{next(self._ids)}", done=True)
        operation.metadata.Pack(artifactregistry_v1.OperationMetadata.pb()())
        operation.response.Pack(empty_pb2.Empty())
        return message_response(request, operation)

    def list(self, request: Request, project: str, location: str) -> Response:
        """Return a page of a location's repositories."""
        parent = self._allow(project, location)
        request.only_query("pageSize", "pageToken")
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


def _asked(request: Request, project: str, location: str) -> Target:
    return Target(request.query.get("repositoryId", ""))
