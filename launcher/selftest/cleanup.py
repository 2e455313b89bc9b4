"""Remove a selftest's resources, which are identified by their label and the prefix of their name."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Final, NamedTuple

from launch_train.common.storage import OutputError
from launch_train.common.storage.client import open_storage_client
from launcher import catalog
from launcher.errors import LaunchError
from launcher.gcp.api import Api, Service, explain
from launcher.images import artifact_registry, cloud_build
from launcher.jobs.job import Job
from launcher.jobs.vm import VmInstance
from launcher.runs.endings import cancel_and_confirm
from launcher.selftest.kit import LABEL, OWN, PREFIX, Kit
from launcher.services.base import GoneError
from launcher.services.compute.workstation import begin_change, wait_for_operation


class Cleaned(NamedTuple):
    """Names that were removed, and problems as reported by Google."""

    removed: tuple[str, ...]
    problems: tuple[str, ...]


Removals = Iterator[tuple[str, Callable[[], object]]]
"""The selftest's resources of one kind by name, each with the call that removes it and returns when it is removed."""


def clean(kit: Kit, scope: str = f"{PREFIX}-", *, everywhere: bool = False, machines_only: bool = False) -> Cleaned:
    """Remove all resources with names that begin with `scope`; jobs are looked for in the kit's region, or in all.

    A failure doesn't stop the rest. Machines come first: they cost the most, and write to the bucket.
    """
    removed: list[str] = []
    problems: list[str] = []
    for find in (machines, jobs) if machines_only else (machines, jobs, builds, repositories, buckets):
        with collected(problems, find.__name__):
            for name, remove in find(kit, scope, everywhere):
                with collected(problems, name):
                    remove()
                    removed.append(name)
    return Cleaned(tuple(removed), tuple(problems))


@contextmanager
def collected(problems: list[str], what: str) -> Iterator[None]:
    """Record any error as a problem and continue, because the remaining resources are billed."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - see above
        said = error.problem if isinstance(error, LaunchError) else f"{type(error).__name__}: {error}"
        problems.append(f"{what}: {said}")


def is_ours(name: str, labels: Container[str], scope: str) -> bool:
    """Return whether a selftest created a resource. Both its label and its name must match."""
    return LABEL in labels and name.startswith(scope) and OWN.match(name) is not None


def machines(kit: Kit, scope: str, _everywhere: bool) -> Removals:
    """Find the VMs. One may have deleted itself meanwhile."""

    def delete(machine: VmInstance) -> None:
        with suppress(GoneError):
            wait_for_operation(kit.compute, begin_change(partial(kit.compute.delete, machine)), lambda _line: None)

    fleet = kit.compute.instances(f"labels.{LABEL}:*")
    for machine in fleet.machines:
        if is_ours(machine.name, machine.labels, scope):
            yield f"VM {machine.name}", partial(delete, machine)
    refuse_unread(fleet.unread)


def jobs(kit: Kit, scope: str, everywhere: bool) -> Removals:
    """Find the jobs of Vertex AI, and the records of ended ones."""

    def delete(job: Job) -> None:
        if not job.is_over:
            cancel_and_confirm(kit.vertex, job, kit.clock, lambda _line: None)
        kit.vertex.delete(job.name)

    regions = catalog.load().training_regions if everywhere else (kit.region,)
    snapshot = kit.vertex.find(f"labels.{LABEL}:*", regions, partly=everywhere)
    for job in snapshot.jobs:
        if is_ours(job.run, job.labels, scope):
            yield f"job {job.run}", partial(delete, job)
    refuse_unread(snapshot.unread)


def refuse_unread(places: Iterable[str]) -> None:
    """Raise LaunchError if regions or zones could not be read: they may have further resources."""
    if names := ", ".join(places):
        raise LaunchError(f"{names} can't be read")


def builds(kit: Kit, scope: str, _everywhere: bool) -> Removals:
    """Find the running builds, by their source's bucket."""
    api = Api(cloud_build.SERVICE, kit.project, cloud_build.client(kit.environ), kit.clock)
    parent = f"projects/{kit.project}/locations/global"
    tagged = api.ask("list_builds", parent=parent, filter='tags="launch"').builds
    active = [build for build in tagged if build.status.name in cloud_build.ACTIVE]
    ours = set(selftest_buckets(kit.project, scope)) if active else set()
    for build in active:
        if build.source.storage_source.bucket in ours:
            yield f"build {build.id}", partial(api.ask, "cancel_build", name=f"{parent}/builds/{build.id}")


def repositories(kit: Kit, scope: str, _everywhere: bool) -> Removals:
    """Find the repositories, with their images."""
    api = Api(artifact_registry.SERVICE, kit.project, artifact_registry.client(kit.environ), kit.clock)
    for repository in artifact_registry.listed(api, "us"):
        name = repository.name.rpartition("/")[2]
        if is_ours(name, repository.labels, scope):
            yield f"repository {name}", partial(artifact_registry.delete, api, repository.name)


def buckets(kit: Kit, scope: str, _everywhere: bool) -> Removals:
    """Find the buckets, with their objects."""

    def delete(name: str) -> None:
        with storage_client(kit.project) as client:
            for blob in client.list_blobs(name, **ONCE):
                blob.delete(**ONCE)
            client.bucket(name).delete(**ONCE)

    for name in selftest_buckets(kit.project, scope):
        yield f"bucket {name}", partial(delete, name)


# --- Cloud Storage ----------------------------------------------------------------------------------------------------

STORAGE: Final = Service("storage", "Cloud Storage", "roles/storage.admin")
ONCE: Final = {"timeout": 30.0, "retry": None}
"""Options of each call, in seconds."""


def selftest_buckets(project: str, prefix: str) -> list[str]:
    """Return the names of the selftests' buckets that begin with `prefix` and have the label. Raises LaunchError."""
    with storage_client(project) as client:
        buckets = client.list_buckets(project=project, prefix=prefix, **ONCE)
        return [str(bucket.name) for bucket in buckets if is_ours(str(bucket.name), bucket.labels, prefix)]


@contextmanager
def storage_client(project: str) -> Iterator[Any]:
    """Yield Google's client; its errors are raised as LaunchError."""
    try:
        yield open_storage_client()
    except OutputError as error:
        raise LaunchError(str(error)) from error
    except Exception as error:
        if (explained := explain(error, STORAGE, project)) is None:
            raise
        raise explained from error
