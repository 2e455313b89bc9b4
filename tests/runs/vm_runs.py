"""Runs on VMs: a plan, the loopback cloud, what its VMs do once they run, and who launches."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from launch_train import runfolder
from launch_train.common import contract
from launch_train.common.storage import GcsFolder
from launch_train.common.storage.retry import RetryClock
from launcher.clock import Clock
from launcher.jobs.job import Job
from launcher.plan.build import with_digest
from launcher.plan.model import Plan
from launcher.runs.driver import AttemptFailed, AttemptStarted, RunDriver
from launcher.runs.ledger import Ledger
from launcher.runs.watch import Event, StateChanged
from launcher.services.compute.backend import Vms
from launcher.services.router import Services
from launcher.services.vertex import Vertex
from launcher.testing.googlecloud import FakeClock, GoogleCloud
from launcher.testing.googlecloud.compute.service import YOU
from launcher.testing.googlecloud.compute.vms import Vm
from tests.plan.planning import planned
from tests.runs.submitting import DIGEST

ZONES = ["us-central1-a", "us-central1-b", "us-central1-c", "us-east4-a", "us-east4-c", "us-east1-b", "us-east1-c"]
Does = Callable[["VmSite", Vm], None]
"""What becomes of a VM a minute after it runs."""


def plan_of(**fields: Any) -> Plan:
    """A run on Spot VMs with two L4s, zone after zone."""
    known = {"machine": {"type": "l4", "gpus": 2}, "zones": ZONES[:3], "regions": None, "provisioning": ["spot"]}
    return planned("vm", **{"output": "gs://my-bucket/runs", **known, **fields})


def exits(code: int, reason: str = "") -> Does:
    """Its container ends; it writes that down and deletes itself."""

    def does(site: VmSite, vm: Vm) -> None:
        site.record(vm, exit=code, reason=reason)
        site.cloud.compute._do(vm.number, site.delete)

    return does


def is_preempted(site: VmSite, vm: Vm) -> None:
    """It is taken away, and its container saves and leaves in time."""
    site.record(vm, exit=int(contract.Exit.PREEMPTED))
    site.cloud.compute.preempt(vm.number)


def is_lost(site: VmSite, vm: Vm) -> None:
    """It is taken away, and nothing is written down."""
    site.cloud.compute.preempt(vm.number)


def breaks(site: VmSite, vm: Vm) -> None:
    """Its host breaks."""
    site.cloud.compute.host_error(vm.number)


@dataclass
class VmSite:
    """A cloud, a plan and what its VMs do, one after the other; the last goes on."""

    cloud: GoogleCloud
    clock: FakeClock
    does: list[Does]
    plan: Plan = field(default_factory=plan_of)
    """Of `drive`."""
    off: float = 0.0
    said: list[str] = field(default_factory=list)
    events: list[Event | AttemptStarted | AttemptFailed] = field(default_factory=list)
    done: set[str] = field(default_factory=set)
    runs: dict[str, float] = field(default_factory=dict)
    meanwhile: Callable[[], None] = lambda: None

    @property
    def time(self) -> Clock:
        return Clock(lambda: self.clock() + self.off, self._sleep)

    @property
    def folder(self) -> GcsFolder:
        return GcsFolder(str(self.plan.run_folder), world=RetryClock(self.clock, self.clock.advance))

    @property
    def service(self) -> Services:
        environ = self.cloud.environ()
        vms = Vms("my-project", environ, self.time, self.said.append, self.folder, YOU)
        return Services(Vertex("my-project", environ, self.time), vms)

    def ledger(self) -> Ledger:
        return Ledger(self.folder, self.time, self.said.append, project="my-project", region="us-central1")

    def driver(self, ledger: Ledger | None = None, plan: Plan | None = None) -> RunDriver:
        return RunDriver(
            plan=plan or self.plan,
            service=self.service,
            ledger=ledger or self.ledger(),
            watcher=Watcher(self),
            say=self.said.append,
            ready=lambda made: with_digest(made, DIGEST),
            clock=self.time,
        )

    def drive(self, *, fresh: bool = True, ledger: Ledger | None = None, **options: Any) -> Job:
        """`launch vm SPEC --run`."""
        return self.driver(ledger).drive(fresh=fresh, **options)

    def without(self) -> Ledger:
        return Ledger(None, self.time)

    @property
    def zones(self) -> list[str]:
        """Where a VM was asked for, in the order in which that arrived."""
        asked = (one for one in self.cloud.requests if one.method == "POST")
        return [one.path.split("/")[6] for one in asked if one.path.endswith(("/instances", "/instances/bulkInsert"))]

    @property
    def diagnoses(self) -> list[tuple[str, str]]:
        """Zone and kind of each attempt that ended badly."""
        return [(str(one.job.zone), one.diagnosis.kind) for one in self.events if isinstance(one, AttemptFailed)]

    @property
    def states(self) -> list[str]:
        """The states that were told."""
        return [one.job.state for one in self.events if isinstance(one, StateChanged)]

    def record(self, vm: Vm, **fields: Any) -> None:
        """As the VM's own startup script writes it."""
        known = {"reason": "", "name": vm.name, "zone": vm.zone, "started": self.clock() - 60, "ended": self.clock()}
        content = json.dumps({**known, **fields}).encode()
        folder = GcsFolder(
            json.loads(vm.items["launch"])["run_folder"], world=RetryClock(self.clock, self.clock.advance)
        )
        try:
            folder.write(runfolder.machine_end(vm.number), content, create=True)
        except FileExistsError:
            return

    def delete(self, vm: Vm) -> None:
        """As the VM itself does it."""
        compute = self.cloud.compute
        begun = compute.operations.begin("delete", vm.zone, vm.email, targetId=vm.number)
        compute.life.delete(vm, begun)

    def _sleep(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.meanwhile()
        if any(outage.until > self.clock() for outage in self.cloud.faults._outages):
            return
        for name in self.cloud.compute.names():
            try:
                vm = self.cloud.compute.vm(name)
            except KeyError:
                continue
            if vm.status != "RUNNING" or vm.number in self.done or "train" not in vm.items.get("launch", ""):
                continue
            if self.clock() - self.runs.setdefault(vm.number, self.clock()) >= 60:
                self.done.add(vm.number)
                (self.does.pop(0) if len(self.does) > 1 else self.does[0])(self, vm)


class Watcher:
    """Keeps all that is told."""

    def __init__(self, site: VmSite) -> None:
        self._site = site

    def view(self, job: Job, number: int) -> StateView:
        return StateView(self._site, job)

    def report(self, event: Event | AttemptStarted | AttemptFailed) -> None:
        self._site.events.append(event)

    def error_in_output(self) -> str:
        return ""


class StateView:
    """The job's state alone."""

    def __init__(self, site: VmSite, job: Job) -> None:
        self._service, self._name = site.service, job.name

    def job(self) -> Job:
        return self._service.get(self._name)

    def lines(self) -> list[Any]:
        return []

    def progress(self) -> None:
        return None
