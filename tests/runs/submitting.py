"""A run, its clouds and those who launch it, for the tests of submitting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from launch_train.common.storage import GcsFolder
from launch_train.common.storage.retry import RetryClock
from launcher.clock import Clock
from launcher.jobs.job import ENDED
from launcher.plan.build import with_digest
from launcher.plan.model import Plan
from launcher.runs.driver import AttemptStarted, RunDriver
from launcher.runs.ledger import Ledger
from launcher.services.base import Service
from launcher.services.vertex import Vertex
from launcher.testing.googlecloud import FakeClock, GoogleCloud, Stage
from tests.plan.planning import planned

JOBS = "aiplatform.projects.locations.customJobs."
CREATE, LIST, GET, CANCEL = (f"{JOBS}{verb}" for verb in ("create", "list", "get", "cancel"))
DIGEST = "us-docker.pkg.dev/my-project/launch/train@sha256:" + "0" * 64
LONG = (Stage("JOB_STATE_QUEUED", 0), Stage("JOB_STATE_RUNNING", 5))
"""A job that doesn't end."""


def plan_of(**fields: Any) -> Plan:
    """A run that may be tried in two regions, Spot before on-demand prices."""
    known = {"output": "gs://my-bucket/runs", "regions": ["us-central1", "us-east5"], "provisioning": ["spot"]}
    return planned(**{**known, **fields})


def ready(plan: Plan) -> Plan:
    """Its image is in the registry."""
    return with_digest(plan, DIGEST)


def submit(
    plan: Plan,
    service: Service,
    ledger: Ledger,
    clock: Clock,
    say: Callable[[str], None],
    *,
    fresh: bool,
    resume: bool = False,
    **options: Any,
) -> AttemptStarted:
    """Return the run's job, for a launch that doesn't watch it."""
    watcher: Any = None
    driver = RunDriver(plan=plan, service=service, ledger=ledger, watcher=watcher, say=say, clock=clock, **options)
    return driver.submit(fresh=fresh, resume=resume)


@dataclass
class Site:
    """A cloud and its clock; each `launch` is a command of its own, on a machine whose clocks are `off` by so much."""

    cloud: GoogleCloud
    clock: FakeClock
    plan: Plan = field(default_factory=plan_of)
    said: list[str] = field(default_factory=list)
    off: float = 0.0

    @property
    def time(self) -> Clock:
        return Clock(lambda: self.clock() + self.off, self.clock.advance)

    @property
    def vertex(self) -> Vertex:
        return Vertex("my-project", self.cloud.environ(), self.time)

    @property
    def folder(self) -> GcsFolder:
        return GcsFolder(str(self.plan.run_folder), world=RetryClock(self.clock, self.clock.advance))

    def ledger(self) -> Ledger:
        return Ledger(self.folder, self.time, self.said.append, project="my-project", region="us-central1")

    def launch(
        self,
        ledger: Ledger | None = None,
        *,
        plan: Plan | None = None,
        fresh: bool = True,
        vertex: Vertex | None = None,
        ready: Callable[[Plan], Plan] = ready,
        **options: Any,
    ) -> AttemptStarted:
        """`launch vertex`, until there is a job."""
        known: dict[str, Any] = {
            "wall_clock": lambda: self.clock() + self.off,
            "jitter": lambda: 0.5,
            "extra_regions": (),
        }
        return submit(
            plan or self.plan,
            vertex or self.vertex,
            self.ledger() if ledger is None else ledger,
            self.time,
            self.said.append,
            fresh=fresh,
            ready=ready,
            **{**known, **options},
        )

    def without(self) -> Ledger:
        return Ledger(None, self.time)

    @property
    def jobs(self) -> list[tuple[str, str]]:
        """Region and state of each job, in the order in which they were made."""
        vertex = Vertex("my-project", self.cloud.environ(), self.time)
        regions = {region for region, _ in self.cloud.jobs.jobs}
        found = vertex.find("labels.launch-run:*", sorted(regions)).jobs
        return [(job.region, job.state) for job in sorted(found, key=lambda job: (job.created, job.id))]

    @property
    def living(self) -> int:
        """Jobs that wait, run or have succeeded: a run must not have two."""
        return sum(state not in ENDED - {"SUCCEEDED"} and state != "CANCELLING" for _, state in self.jobs)
