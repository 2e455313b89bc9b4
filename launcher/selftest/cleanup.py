"""Remove what a selftest has created, by its label and the prefix of its name, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple

from launcher import catalog
from launcher.errors import LaunchError
from launcher.selftest import buckets
from launcher.selftest.kit import LABEL, PREFIX, Kit


class Cleaned(NamedTuple):
    """Names that were removed, and problems in Google's words."""

    removed: tuple[str, ...]
    problems: tuple[str, ...]


def clean(kit: Kit, scope: str = f"{PREFIX}-", *, everywhere: bool = False) -> Cleaned:
    """Remove all resources with names that begin with `scope`; jobs are looked for in the kit's region, or in all.

    A failure doesn't stop the rest. Machines come first: they cost the most, and write to the bucket.
    """
    return worked(kit, scope, (jobs, machines, builds, repositories, own_buckets), everywhere=everywhere)


def stop(kit: Kit, scope: str) -> Cleaned:
    """Remove only the jobs and VMs, after a failed step."""
    return worked(kit, scope, (jobs, machines), everywhere=False)


Work = Callable[[Kit, str, bool], Iterator[str]]


def worked(kit: Kit, scope: str, works: tuple[Work, ...], *, everywhere: bool) -> Cleaned:
    """Run each kind of cleanup; an error in one doesn't stop the others."""
    removed: list[str] = []
    problems: list[str] = []
    for work in works:
        try:
            for name in work(kit, scope, everywhere):
                removed.append(name)
        except Exception as error:  # noqa: BLE001 - whatever it is, the rest costs money
            said = error.problem if isinstance(error, LaunchError) else f"{type(error).__name__}: {error}"
            problems.append(f"{work.__name__.replace('own_', '')}: {said}")
    return Cleaned(tuple(removed), tuple(problems))


def jobs(kit: Kit, scope: str, everywhere: bool) -> Iterator[str]:
    """Cancel the jobs of Vertex AI, and remove their records."""
    from launcher.apply.submit import cancel_and_confirm

    regions = catalog.load().training_regions if everywhere else (kit.region,)
    found = kit.vertex.find(f"labels.{LABEL}:*", regions, partly=everywhere)
    for job in found.jobs:
        if LABEL in job.labels and job.run.startswith(scope):
            if not job.is_over:
                cancel_and_confirm(kit.vertex, job, kit.clock, lambda _line: None)
            kit.vertex.delete(job.name)
            yield f"job {job.run}"
    refuse_unread(found.unread)


def machines(kit: Kit, scope: str, _everywhere: bool) -> Iterator[str]:
    """Delete the VMs."""
    from launcher.apply.lifecycle import begun, finished
    from launcher.apply.service import GoneError

    fleet = kit.compute.instances(f"labels.{LABEL}:*")
    for machine in fleet.machines:
        if LABEL in machine.labels and machine.name.startswith(scope):
            try:
                finished(kit.compute, begun(partial(kit.compute.delete, machine)), lambda _line: None)
            except GoneError:  # it has deleted itself meanwhile
                continue
            yield f"VM {machine.name}"
    refuse_unread(fleet.unread)


def refuse_unread(places: Iterable[str]) -> None:
    """Raise LaunchError if regions or zones could not be read, as there may be more."""
    if names := ", ".join(places):
        raise LaunchError(f"{names} can't be read")


def builds(kit: Kit, scope: str, _everywhere: bool) -> Iterator[str]:
    """Cancel the builds that run, known by the bucket that their source is in."""
    from launcher.apply import cloudbuild

    for build in kit.builds(scope):
        if build.status.name in cloudbuild.ACTIVE:
            kit.cloud_build().ask("cancel_build", name=f"{kit.builds_of}/builds/{build.id}")
            yield f"build {build.id}"


def repositories(kit: Kit, scope: str, _everywhere: bool) -> Iterator[str]:
    """Delete the repositories, with their images."""
    from launcher.apply import repositories as artifacts
    from launcher.apply.googleapis import Api

    api = Api(artifacts.SERVICE, kit.project, artifacts.client(kit.environ), kit.clock)
    for name in artifacts.listed(api, "us"):
        if name.rpartition("/")[2].startswith(scope):
            artifacts.delete(api, name)
            yield f"repository {name.rpartition('/')[2]}"


def own_buckets(kit: Kit, scope: str, _everywhere: bool) -> Iterator[str]:
    """Delete the buckets, with their objects."""
    for name in buckets.labelled(kit.project, scope, LABEL):
        buckets.delete(kit.project, name)
        yield f"bucket {name}"
