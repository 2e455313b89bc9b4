"""VMs of launch's in a loopback cloud, on a clock of its own, and the commands that look after them."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from launcher.clock import Clock
from launcher.jobs.job import IDENTITY_LABEL, RUN_LABEL
from launcher.jobs.vm import PARAMETERS, VmInstance
from launcher.services.compute.client import Compute
from launcher.testing.googlecloud import FakeClock, GoogleCloud
from tests.command import Ran, launch

HOUR = 3600.0
RUN = "train-0123abcd"
GUEST = {"key": "enable-guest-attributes", "value": "TRUE"}
UP_SECONDS = 60.0
"""After which a VM that was asked for surely runs."""


class Vms:
    """The project's VMs, and `launch vm …` for it."""

    def __init__(self, folder: Path, cloud: GoogleCloud, clock: FakeClock) -> None:
        self.folder, self.cloud, self.clock = folder, cloud, clock
        self.env = {**cloud.environ(), "TZ": "UTC"}
        self.compute = Compute("my-project", self.env, Clock(clock, clock.advance))

    def make(self, name: str = "dev", zone: str = "us-central1-a", **changes: Any) -> VmInstance:
        """A VM to work on that runs."""
        operation = self.compute.insert(zone, body(name, zone, **changes), str(uuid4()))
        self.clock.advance(UP_SECONDS)
        assert not self.compute.operation(zone, operation.name).refusal
        return self.compute.instance(zone, name)

    def train(self, name: str = RUN, nodes: Sequence[str] = (), **changes: Any) -> VmInstance:
        """A VM that trains, alone or with others."""
        folder = f"gs://my-bucket/runs/{RUN}"
        told = {"kind": "train", "run": RUN, "run_folder": folder, "nodes": nodes or [name]}
        labels = {RUN_LABEL: RUN, IDENTITY_LABEL: "0123456789abcdef"}
        return self.make(name, told=told, labels=labels, stop="DELETE", **changes)

    def end(self, machine: VmInstance, cleanup: str = "") -> None:
        """The VM has noted its end in its run's folder."""
        told = {"exit": 0, "name": machine.name, "zone": machine.zone, "ended": self.clock(), "cleanup": cleanup}
        self.cloud.objects.put("my-bucket", f"runs/{RUN}/machines/{machine.id}.json", json.dumps(told).encode())

    def status(self, name: str) -> str:
        """What Compute Engine says of it."""
        return self.cloud.compute.vm(name).status

    def launch(self, *argv: str, code: int = 0) -> Ran:
        """`launch vm …`."""
        ran = launch("vm", *argv, env=self.env, cwd=self.folder)
        assert ran.code == code, ran.shown
        return ran

    def data(self, *argv: str) -> dict[str, Any]:
        """What it prints for scripts."""
        found: dict[str, Any] = json.loads(self.launch(*argv, "-o", "json").out)
        return found

    def asked(self, method: str) -> list[str]:
        """The paths of the requests that arrived with a method."""
        return [one.path for one in self.cloud.requests if one.method == method]


def body(
    name: str,
    zone: str,
    *,
    machine: str = "g2-standard-24",
    model: str = "STANDARD",
    hours: float = 12,
    lease: float | None = None,
    stop: str = "STOP",
    ssds: int = 0,
    told: Mapping[str, Any] | None = None,
    labels: Mapping[str, str] | None = None,
    auto_delete: bool = True,
) -> dict[str, Any]:
    """An Instance as the plan writes it, as far as it matters here."""
    labels = {RUN_LABEL: name} if labels is None else labels
    told = told or {"kind": "work", "on_stop": stop.lower(), **({"lease_seconds": int(lease)} if lease else {})}
    ssd = {"type": "SCRATCH", "interface": "NVME", "autoDelete": True}
    ssd["initializeParams"] = {"diskType": f"zones/{zone}/diskTypes/local-ssd"}
    boot = {"diskSizeGb": "200", "diskType": f"zones/{zone}/diskTypes/pd-balanced", "labels": dict(labels)}
    boot["sourceImage"] = (
        "projects/deeplearning-platform-release/global/images/family/common-cu129-ubuntu-2404-nvidia-580"
    )
    spot = {"preemptible": True} if model == "SPOT" else {}
    affinity = {"reservationAffinity": {"consumeReservationType": "NO_RESERVATION"}} if model == "FLEX_START" else {}
    discard = ssds or machine.startswith(("a3", "a2-ultra"))
    return {
        "name": name,
        "machineType": f"zones/{zone}/machineTypes/{machine}",
        "labels": dict(labels),
        "disks": [
            {
                "boot": True,
                "autoDelete": auto_delete,
                "type": "PERSISTENT",
                "mode": "READ_WRITE",
                "initializeParams": boot,
            },
            *[ssd] * ssds,
        ],
        "networkInterfaces": [{"network": "global/networks/default", "nicType": "GVNIC"}],
        "scheduling": {
            "provisioningModel": model,
            "onHostMaintenance": "TERMINATE",
            "automaticRestart": False,
            "maxRunDuration": {"seconds": str(int(hours * HOUR))},
            "instanceTerminationAction": stop,
            **spot,
            **({"onInstanceStopAction": {"discardLocalSsd": True}} if discard and stop == "STOP" else {}),
        },
        **affinity,
        "serviceAccounts": [{"email": "launch@my-project.iam.gserviceaccount.com", "scopes": []}],
        "metadata": {"items": [GUEST, {"key": PARAMETERS, "value": json.dumps(told)}]},
    }


class Person(io.StringIO):
    """Somebody at a terminal who types this."""

    def isatty(self) -> bool:
        return True
