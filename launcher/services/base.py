"""The interface of a service that runs jobs: Vertex AI custom jobs, training VMs on Compute Engine, or this machine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol

from launcher.diagnosis.model import CreateRefused
from launcher.errors import LaunchError
from launcher.jobs.job import Job
from launcher.plan.model import Attempt

__all__ = ["CreateRefused", "GoneError", "Jobs", "Listing", "OfGoogle", "Service"]


class GoneError(LaunchError):
    """The job does not exist (any more), and its outcome is unknown."""


class Listing(NamedTuple):
    """Jobs, newest first, and the regions that could not be read."""

    jobs: tuple[Job, ...]
    unread: dict[str, LaunchError]


class Jobs(Protocol):
    """Existing jobs, and what their service can do. Every method is idempotent."""

    outlives_client: bool
    """A job continues when the launch that started it ends, so another launch may follow the run and add attempts."""
    poll_seconds: float | None
    """The interval in which a watch polls; None: that of Google's services."""
    stop_seconds: float
    """Within this time a cancelled job ends."""
    stuck_fix: str
    """What to do if it does not; empty: cancel it again."""

    @property
    def project(self) -> str:
        """Return the project id; `local` on this machine."""

    def get(self, name: str) -> Job:
        """Return a job's current or final state. Raises GoneError; UnreachableError: no answer for a minute."""

    def cancel(self, name: str) -> None:
        """Begin to cancel a job. Does nothing if it has ended or is being cancelled. Raises GoneError."""

    def release(self, job: Job) -> None:
        """Remove what an ended job left behind and is still billed, and wait until it is removed.

        These are the VMs on Compute Engine; the others leave nothing behind. Raises LaunchError: it could not be
        removed.
        """

    def forget(self, job: Job) -> None:
        """Delete the service's record of an ended job. Does nothing if there is none."""


class OfGoogle:
    """What Google's services can do."""

    outlives_client = True
    poll_seconds: float | None = None
    stop_seconds = 300.0
    stuck_fix = ""


class Service(Jobs, Protocol):
    """A service to which launch submits jobs. Every method except `create` is idempotent."""

    def create(self, attempt: Attempt, body: Mapping[str, Any], request_id: str) -> Job:
        """Create the job of one attempt, exactly once.

        `request_id` (a UUID) belongs to the attempt. A service that supports request ids ignores a repeated one.

        Raises:
            CreateRefused: nothing was created.
            UnreachableError: it is unknown whether a job was created.
            LaunchError: the request is invalid; nothing was sent.
        """

    def find(self, filter_: str, regions: Iterable[str], *, partly: bool = False) -> Listing:
        """Return the jobs in these regions that match a filter (labels.launch-run="ID", labels.launch-run:*).

        Unless `partly` is set, raises the first region's error, because an unread region may have matching jobs.
        """

    def request_ids(self, name: str) -> frozenset[str]:
        """Return the ids of the requests by which the user's own account created a job, as the service recorded them.

        Empty on Vertex AI, which has no request ids, and for a VM that was created more than two weeks ago.
        """
