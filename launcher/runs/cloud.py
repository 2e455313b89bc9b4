"""The cloud of one project: the services that run jobs, and the clock."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from msgspec import Struct

import launcher.clock
from launch_train.common.storage import Storage
from launcher import catalog
from launcher.clock import Clock
from launcher.errors import LaunchError
from launcher.inputs.gcloud_config import account
from launcher.jobs.job import IDENTITY_LABEL, Job
from launcher.runs.attempts import AttemptEntry
from launcher.runs.context import ENGINE
from launcher.runs.ledger import Ledger
from launcher.runs.logs.reader import LogReader
from launcher.services.base import Listing
from launcher.services.compute.backend import Vms
from launcher.services.compute.client import Compute
from launcher.services.router import Services
from launcher.services.vertex import Vertex


class CloudContext(Struct, frozen=True, kw_only=True):
    """The services that run jobs in one project, and the clock."""

    vertex: Vertex
    vms: Vms
    project: str
    clock: Clock
    notice: Callable[[str], None] = lambda _text: None
    """Receives messages for the user, such as a region that could not be read."""

    @property
    def service(self) -> Services:
        return Services(self.vertex, self.vms)

    @property
    def compute(self) -> Compute:
        return self.vms.compute

    def with_notice(self, say: Callable[[str], None]) -> CloudContext:
        """Return the same project with another receiver of messages."""
        return open_cloud(self.project, say)

    def of_run(self, folder: Storage | None) -> Services:
        """Return the services with a run's folder, which records how deleted VMs ended."""
        return Services(self.vertex, self.vms.for_run(folder))

    def find_jobs(self, filter_: str, regions: Sequence[str], *, all_vms: bool = False) -> Listing:
        """Return the jobs in these regions, on Vertex AI and on VMs (`all_vms`: in all zones); report what could not be
        read.

        Raises LaunchError: no region could be read.
        """
        listing = self.vertex.find(filter_, regions, partly=True)
        vms, unread = listing.jobs[:0], dict(listing.unread)
        whole = all_vms or set(regions) >= set(catalog.load().training_regions)  # VMs may be in others too
        try:
            trains = (job for job in self.vms.find(filter_, ()).jobs if IDENTITY_LABEL in job.labels)
            vms = tuple(job for job in trains if whole or job.region in regions)
        except LaunchError as error:
            if "is disabled" not in error.problem:  # without that API there are no VMs
                unread[ENGINE] = error
        self.report_unread(unread, [*regions, ENGINE] if ENGINE in unread else regions)
        return Listing(tuple(sorted((*listing.jobs, *vms), key=lambda job: (-job.created, job.name))), unread)

    def report_unread(self, unread: dict[str, LaunchError], regions: Sequence[str]) -> None:
        """Report the regions that could not be read, grouped by reason. Raises the first error if none could be
        read."""
        if unread and len(unread) == len(set(regions)):
            raise next(iter(unread.values()))
        groups: dict[str, list[str]] = {}
        for region, error in unread.items():
            groups.setdefault(error.problem, []).append(region)
        for problem, names in groups.items():
            self.notice(f"{', '.join(names)} could not be read: {problem}")

    def attempts(self, folder: Storage) -> tuple[AttemptEntry, ...]:
        """Return the attempts that the ledger in a run folder records. Raises LaunchError."""
        return Ledger(folder, self.clock).entries()

    def open_log(
        self, job: Job, folder: Storage | None, say: Callable[[str], None], *, attempt: int = 0, tail: int | None = None
    ) -> LogReader:
        """Return the reader of a job's log: Cloud Logging, or its run folder. Raises NotAuthorised: no credentials."""
        number = attempt or None
        return LogReader(
            job, self.project, os.environ, say=say, folder=folder, attempt=number, clock=self.clock, tail=tail
        )


def open_cloud(project: str, notice: Callable[[str], None] = lambda _text: None) -> CloudContext:
    """Return the context of a project; endpoints and credentials come from the environment. Sends no request."""
    clock = launcher.clock.REAL
    vertex = Vertex(project, os.environ, clock, notice=notice)
    vms = Vms(project, os.environ, clock, notice, account=account(os.environ))
    return CloudContext(vertex=vertex, vms=vms, project=project, clock=clock, notice=notice)
