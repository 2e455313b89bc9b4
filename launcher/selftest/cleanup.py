"""Remove a selftest's resources, which are identified by their label and the prefix of their name."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from launcher import catalog
from launcher.errors import LaunchError
from launcher.gcp.api import Service, explain
from launcher.selftest.kit import LABEL, OWN, PREFIX, Kit

if TYPE_CHECKING:
    from launcher.jobs.job import Job
    from launcher.jobs.vm import VmInstance


class Cleaned(NamedTuple):
    """Names that were removed, and problems as reported by Google."""

    removed: tuple[str, ...]
    problems: tuple[str, ...]


Finish = Callable[[], bool]
"""Waits until a resource is deleted. Returns False if something else deleted it."""


class Removal(NamedTuple):
    """A selftest's resource, and the call that begins to remove it."""

    name: str
    begin: Callable[[], Finish]


def clean(kit: Kit, scope: str = f"{PREFIX}-", *, everywhere: bool = False) -> Cleaned:
    """Remove all resources with names that begin with `scope`; jobs are looked for in the kit's region, or in all.

    A failure doesn't stop the rest. Machines come first: they cost the most, and write to the bucket.
    """
    return worked(kit, scope, (machines, jobs, builds, repositories, buckets), everywhere=everywhere)


def stop(kit: Kit, scope: str) -> Cleaned:
    """Remove only the jobs and VMs, after a failed step."""
    return worked(kit, scope, (machines, jobs), everywhere=False)


Find = Callable[[Kit, str, bool], Iterator[Removal]]


def worked(kit: Kit, scope: str, kinds: tuple[Find, ...], *, everywhere: bool) -> Cleaned:
    """Begin to remove the resources of all kinds as they are found, then wait for all of them."""
    removed: list[str] = []
    problems: list[str] = []
    begun: list[tuple[str, Finish]] = []
    for find in kinds:
        with collected(problems, find.__name__):
            for name, begin in find(kit, scope, everywhere):
                with collected(problems, name):
                    begun.append((name, begin()))
    for name, finish in begun:
        with collected(problems, name):
            if finish():
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


def machines(kit: Kit, scope: str, _everywhere: bool) -> Iterator[Removal]:
    """Find the VMs."""
    fleet = kit.compute.instances(f"labels.{LABEL}:*")
    for machine in fleet.machines:
        if is_ours(machine.name, machine.labels, scope):
            yield Removal(f"VM {machine.name}", partial(begin_delete, kit, machine))
    refuse_unread(fleet.unread)


def begin_delete(kit: Kit, machine: VmInstance) -> Finish:
    """Begin to delete a VM. It may have deleted itself meanwhile."""
    from launcher.services.base import GoneError
    from launcher.services.compute.workstation import begin_change, wait_for_operation

    def finish() -> bool:
        try:
            wait_for_operation(kit.compute, operation, lambda _line: None)
        except GoneError:
            return False
        return True

    try:
        operation = begin_change(partial(kit.compute.delete, machine))
    except GoneError:
        return lambda: False
    return finish


def jobs(kit: Kit, scope: str, everywhere: bool) -> Iterator[Removal]:
    """Find the jobs of Vertex AI, and the records of ended ones."""
    regions = catalog.load().training_regions if everywhere else (kit.region,)
    snapshot = kit.vertex.find(f"labels.{LABEL}:*", regions, partly=everywhere)
    for job in snapshot.jobs:
        if is_ours(job.run, job.labels, scope):
            yield Removal(f"job {job.run}", partial(begin_cancel, kit, job))
    refuse_unread(snapshot.unread)


def begin_cancel(kit: Kit, job: Job) -> Finish:
    """Begin to cancel a job."""
    from launcher.runs.endings import cancel_and_confirm

    def finish() -> bool:
        if not job.is_over:
            cancel_and_confirm(kit.vertex, job, kit.clock, lambda _line: None)
        kit.vertex.delete(job.name)
        return True

    if not job.is_over:
        with suppress(LaunchError):  # `finish` repeats the request and reports errors
            kit.vertex.cancel(job.name)
    return finish


def refuse_unread(places: Iterable[str]) -> None:
    """Raise LaunchError if regions or zones could not be read: they may have further resources."""
    if names := ", ".join(places):
        raise LaunchError(f"{names} can't be read")


def builds(kit: Kit, scope: str, _everywhere: bool) -> Iterator[Removal]:
    """Find the running builds, by their source's bucket."""
    from launcher.images import cloud_build

    active = [build for build in kit.builds(scope) if build.status.name in cloud_build.ACTIVE]
    ours = set(selftest_buckets(kit.project, scope)) if active else set()

    def cancel(number: str) -> Finish:
        kit.cloud_build().ask("cancel_build", name=f"{kit.builds_of}/builds/{number}")
        return lambda: True

    for build in active:
        if build.source.storage_source.bucket in ours:
            yield Removal(f"build {build.id}", partial(cancel, build.id))


def repositories(kit: Kit, scope: str, _everywhere: bool) -> Iterator[Removal]:
    """Find the repositories, with their images."""
    from launcher.gcp.api import Api
    from launcher.images import artifact_registry

    api = Api(artifact_registry.SERVICE, kit.project, artifact_registry.client(kit.environ), kit.clock)
    for repository in artifact_registry.listed(api, "us"):
        name = repository.name.rpartition("/")[2]
        if is_ours(name, repository.labels, scope):
            yield Removal(f"repository {name}", partial(last_of_all, artifact_registry.delete, api, repository.name))


def buckets(kit: Kit, scope: str, _everywhere: bool) -> Iterator[Removal]:
    """Find the buckets, with their objects."""
    for name in selftest_buckets(kit.project, scope):
        yield Removal(f"bucket {name}", partial(last_of_all, delete_bucket, kit.project, name))


def last_of_all(delete: Callable[..., object], *what: object) -> Finish:
    """Delete a bucket after everything that writes to it has ended."""

    def finish() -> bool:
        delete(*what)
        return True

    return finish


# --- Cloud Storage ----------------------------------------------------------------------------------------------------

STORAGE: Final = Service("storage", "Cloud Storage", "roles/storage.admin")
ONCE: Final = {"timeout": 30.0, "retry": None}
"""Options of each call, in seconds."""


def selftest_buckets(project: str, prefix: str) -> list[str]:
    """Return the names of the selftests' buckets that begin with `prefix` and have the label. Raises LaunchError."""
    with storage_client(project) as client:
        buckets = client.list_buckets(project=project, prefix=prefix, **ONCE)
        return [str(bucket.name) for bucket in buckets if is_ours(str(bucket.name), bucket.labels, prefix)]


def delete_bucket(project: str, name: str) -> None:
    """Delete a bucket with all objects in it. Raises LaunchError."""
    with storage_client(project) as client:
        for blob in client.list_blobs(name, **ONCE):
            blob.delete(**ONCE)
        client.bucket(name).delete(**ONCE)


@contextmanager
def storage_client(project: str) -> Iterator[Any]:
    """Yield Google's client; its errors are raised as LaunchError."""
    from launch_train.common.storage import OutputError
    from launch_train.common.storage.client import open_storage_client

    try:
        yield open_storage_client()
    except OutputError as error:
        raise LaunchError(str(error)) from error
    except Exception as error:
        if (explained := explain(error, STORAGE, project)) is None:
            raise
        raise explained from error
