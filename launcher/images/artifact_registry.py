"""Create and find Artifact Registry repositories."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launcher.clock import REAL, Clock
from launcher.errors import LaunchError, UnreachableError, UsageError
from launcher.gcp.api import Api, Service, open_client, status_of
from launcher.images.reference import ArtifactRepository, artifact_repository, parse

SERVICE = Service("artifactregistry", "Artifact Registry", "roles/artifactregistry.admin")
"""The role includes artifactregistry.repositories.create
(https://cloud.google.com/artifact-registry/docs/access-control#permissions).
"""
WAIT_SECONDS = 120.0
POLL_SECONDS = 1.0
PAGE = 1000


def create(
    reference: object, environ: Mapping[str, str], clock: Clock = REAL, labels: Mapping[str, str] | None = None
) -> bool:
    """Create the repository that an image or repository reference names. Return False if it existed.

    Raises:
        UsageError: it is not in Artifact Registry, the location is unknown, or it holds other packages.
        NotAuthorised: no credentials, or a permission is missing.
        LaunchError: the API is disabled, or does not respond.
    """
    where = parse_repository(str(reference))
    api = Api(SERVICE, where.project, client(environ), clock)
    try:
        return not repository_exists(api, where) and create_once(api, where, labels or {})
    except LaunchError as error:
        if status_of(error) != 400:
            raise
        # Artifact Registry answers an unknown location with 400, as any invalid argument. The name has been checked, so
        # other causes are unlikely.
        raise UsageError(
            f"Artifact Registry refuses {where.resource}; is {where.location} one of its locations? ({error.problem})",
            f"gcloud artifacts locations list --project={where.project}",
        ) from error


def parse_repository(reference: str) -> ArtifactRepository:
    """Parse a reference to a repository, or to an image in it. Raises UsageError."""
    parsed = parse(reference)
    repository = artifact_repository(parsed.host, parsed.repository)
    if repository is None:
        raise UsageError(
            f"{reference} is not an Artifact Registry repository",
            "launch can create only those, for example us-docker.pkg.dev/my-project/launch",
        )
    return repository


def client(environ: Mapping[str, str]) -> Any:
    """Return Google's client. Raises LaunchError."""
    try:
        from google.cloud import artifactregistry_v1
    except ImportError as error:
        raise LaunchError(
            "creating a repository needs google-cloud-artifact-registry", 'pip install "gcp-launch[gcp]"'
        ) from error
    return open_client(artifactregistry_v1.ArtifactRegistryClient, SERVICE, environ)


def repository_exists(api: Api, where: ArtifactRepository) -> bool:
    """Return whether the repository exists, for containers. Raises LaunchError."""
    try:
        repository = api.ask("get_repository", name=where.resource)
    except LaunchError as error:
        if status_of(error) == 404:
            return False
        raise
    if repository.format_.name != "DOCKER":
        raise UsageError(
            f"{where.resource} holds {repository.format_.name} packages, not containers",
            "Choose another name: image.repository",
        )
    return True


def create_once(api: Api, where: ArtifactRepository, labels: Mapping[str, str]) -> bool:
    """Create the repository; return False if another launch created it first. Raises LaunchError."""
    repository = {"format_": "DOCKER", "description": "Training images made by launch", "labels": {**labels}}
    parent = where.resource.partition("/repositories/")[0]
    request: dict[str, Any] = {"parent": parent, "repository_id": where.repository, "repository": repository}
    unsure = False
    while True:
        try:
            operation = api.once("create_repository", **request).operation
        except UnreachableError:
            if unsure:
                raise
            unsure = True  # the request may have succeeded; then the second one is refused with 409
            api.clock.sleep(POLL_SECONDS)
        except LaunchError as error:
            if status_of(error) != 409:
                raise
            until = api.clock.now() + WAIT_SECONDS
            while not repository_exists(api, where):  # another launch's operation creates it
                if api.clock.now() > until:
                    problem = f"{where.resource} is still being created after {WAIT_SECONDS:.0f} s"
                    raise LaunchError(problem, "Try again later.") from error
                api.clock.sleep(POLL_SECONDS)
            return unsure
        else:
            wait_for_operation(api, where, operation)
            return True


def listed(api: Api, location: str) -> list[Any]:
    """Return a location's repositories (artifactregistry_v1.Repository; first page only). Raises LaunchError."""
    pager = api.ask("list_repositories", parent=f"projects/{api.project}/locations/{location}", page_size=PAGE)
    return [*next(iter(pager.pages)).repositories]


def delete(api: Api, name: str) -> None:
    """Delete a repository with its images, by resource name, if it exists. Raises LaunchError."""
    try:
        operation = api.ask("delete_repository", name=name).operation
    except LaunchError as error:
        if status_of(error) != 404:
            raise
        return
    _, project, _, location, _, repository = name.split("/")
    wait_for_operation(api, ArtifactRepository(location, project, repository), operation, "deleted")


def wait_for_operation(api: Api, where: ArtifactRepository, operation: Any, done: str = "made") -> None:
    """Wait for the operation (google.longrunning.Operation). Raises LaunchError."""
    until = api.clock.now() + WAIT_SECONDS
    while not operation.done:
        if api.clock.now() > until:
            raise LaunchError(
                f"{where.resource} is still being {done} after {WAIT_SECONDS:.0f} s", f"Look at {operation.name}"
            )
        api.clock.sleep(POLL_SECONDS)
        operation = api.ask("get_operation", name=operation.name)
    if operation.error.code:
        raise LaunchError(f"{where.resource} could not be {done}: {operation.error.message}")
