"""Runs on VMs, for the tests of what makes, watches and removes them."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from launch_train import runfolder
from launch_train.common.storage import GcsFolder
from launch_train.common.storage.retry import RetryClock
from launcher.clock import Clock
from launcher.jobs.job import Job
from launcher.plan.model import Attempt, Plan
from launcher.services.compute.backend import Vms
from launcher.services.compute.client import Compute
from launcher.testing.googlecloud import FakeClock, GoogleCloud
from tests.plan.planning import planned

ZONE = "us-central1-a"
UUID = "5c8a6a0e-7f3a-4f39-8c7e-0d8f1f5c9c1"
INSERT, GET, DELETE = (f"compute.instances.{verb}" for verb in ("insert", "get", "delete"))
AGGREGATED, OPERATION = "compute.instances.aggregatedList", "compute.zoneOperations.get"


@cache
def plan_of(nodes: int = 1, provisioning: str = "spot", gpus: int = 1) -> Plan:
    """A run on L4s in us-central1's zones."""
    return planned(
        "vm",
        regions=["us-central1"],
        provisioning=[provisioning],
        machine={"type": "l4", "gpus": gpus, "nodes": nodes},
        output="gs://my-bucket/runs",
        identity={"service_account": "trainer@my-project.iam.gserviceaccount.com"},
    )


def attempt_of(nodes: int = 1, provisioning: str = "spot", zone: str = ZONE) -> Attempt:
    """The plan's attempt in one zone."""
    return next(one for one in plan_of(nodes, provisioning).attempts if one.zone == zone)


def work_body(name: str = "dev", zone: str = ZONE) -> dict[str, Any]:
    """A VM to work on."""
    body = dict(attempt_of(1, "standard", zone).request)
    item = {"key": "launch", "value": json.dumps({"kind": "work", "on_stop": "stop"})}
    scheduling = {**body["scheduling"], "instanceTerminationAction": "STOP"}
    return {
        **body,
        "name": name,
        "labels": {"launch-run": name},
        "metadata": {"items": [item]},
        "scheduling": scheduling,
    }


class Site:
    """A cloud and its clock, and who launches there, whose own clocks are `off` by so many seconds."""

    def __init__(self, cloud: GoogleCloud, clock: FakeClock, off: float = 0.0) -> None:
        self.cloud, self.clock, self.off = cloud, clock, off
        self.said: list[str] = []
        self.vms = self.launcher()

    @property
    def time(self) -> Clock:
        return Clock(lambda: self.clock() + self.off, self.clock.advance)

    def launcher(self, *, told: bool = True) -> Vms:
        """A command of its own, which knows nothing of what others saw; `told`: but which run it is about."""
        folder = self.folder() if told else None
        return Vms("my-project", self.cloud.environ(), self.time, self.said.append, folder)

    def launch(self, number: int = 1, zone: str = ZONE) -> Job:
        """A job of one VM, asked for just now; `number` makes it another request."""
        attempt = attempt_of(zone=zone)
        return self.vms.create(attempt, attempt.request, f"{UUID}{number}")

    def running(self) -> Job:
        """A job whose VM runs."""
        job = self.launch()
        self.clock.advance(10)
        return self.vms.get(job.name)

    @property
    def compute(self) -> Compute:
        return self.vms.compute

    def folder(self, nodes: int = 1) -> GcsFolder:
        return GcsFolder(str(plan_of(nodes).run_folder), world=RetryClock(self.clock, self.clock.advance))

    def write(self, number: str, nodes: int = 1, **record: Any) -> None:
        """What a VM's own script writes when its container has ended."""
        body = {"name": plan_of(nodes).run, "zone": ZONE, "started": self.clock() - 60, "ended": self.clock(), **record}
        self.folder(nodes).write(runfolder.machine_end(number), json.dumps(body).encode(), create=True)

    def sent(self, method: str, ending: str = "") -> int:
        """How many requests arrived."""
        return sum(one.method == method and one.path.endswith(ending) for one in self.cloud.requests)
