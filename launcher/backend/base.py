"""What runs jobs, as the rest of apply sees it: Vertex AI's custom jobs, or VMs of Compute Engine that train."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol

from launcher.diagnosis import Refusal
from launcher.errors import LaunchError
from launcher.jobs.job import Job
from launcher.plan.model import Attempt


class CreateRefused(LaunchError):
    """The create was refused: no job was made."""

    def __init__(self, problem: str, refusal: Refusal) -> None:
        super().__init__(problem)
        self.refusal = refusal


class GoneError(LaunchError):
    """There is no such job, or no longer, and nothing tells how it ended."""


class Listing(NamedTuple):
    """Jobs, the newest first, and the regions that could not be read."""

    jobs: tuple[Job, ...]
    unread: dict[str, LaunchError]


class Service(Protocol):
    """Jobs of one project. Everything but a create may be asked twice."""

    @property
    def project(self) -> str:
        """Its id."""

    def create(self, attempt: Attempt, body: Mapping[str, Any], request_id: str) -> Job:
        """The job that one attempt has made, and one alone. `request_id` (a UUID) is the attempt's own, for a service
        that makes nothing twice for the same one.

        Raises:
            CreateRefused: for sure nothing was made.
            UnreachableError: whether there is a job now is not known.
            LaunchError: the request can't be written down; nothing was sent.
        """

    def get(self, name: str) -> Job:
        """A job as it is now, or as it ended. Raises GoneError; UnreachableError: no answer for a minute."""

    def find(self, filter_: str, regions: Iterable[str], *, partly: bool = False) -> Listing:
        """The jobs of all these regions that pass a filter (labels.launch-run="ID", labels.launch-run:*).

        Unless `partly`, raises the first region's error: what can't be seen might be there.
        """

    def request_ids(self, name: str) -> frozenset[str]:
        """Return the ids of the requests by which the user's own account created a job, as the service recorded them.
        Empty on Vertex AI, which has no such ids, and for a VM that was created more than two weeks ago."""

    def cancel(self, name: str) -> None:
        """Begin to cancel a job; one that has ended, or is being cancelled, is fine. Raises GoneError."""

    def release(self, job: Job) -> None:
        """Remove what an ended job has left that costs money, and wait until it is gone: the VMs of Compute Engine.
        Nothing is left on Vertex AI. Raises LaunchError: it could not be removed."""
