"""A VM as data: its properties when Compute Engine was last polled. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final, Literal

from msgspec import Struct

from launcher.jobs.job import IDENTITY_LABEL, RUN_LABEL

PARAMETERS: Final = "launch"
"""The metadata item (JSON) with the startup script's parameters."""
LEASE: Final = "launch-lease-until"
"""The metadata item with the deadline (Unix seconds, an integer) of a lease that was extended or shortened."""
READY: Final = "launch"
"""The namespace of the guest attributes in which the startup script reports its progress (state, reason)."""

UP: Final = frozenset({"PENDING", "PROVISIONING", "STAGING", "RUNNING", "REPAIRING"})
DOWN: Final = frozenset({"STOPPED", "TERMINATED", "SUSPENDED"})
"""States of an Instance (compute_v1.Instance.Status). All other states are transitions between UP and DOWN."""


class VmInstance(Struct, frozen=True, kw_only=True):
    """A VM. Times are Unix seconds by Google's clock. None: it has not happened."""

    id: str
    """The VM's number, which is never reused."""
    name: str
    project: str
    zone: str
    status: str
    machine_type: str
    provisioning: str
    """standard, spot, flex-start or reservation."""
    created: float
    started: float | None = None
    """The time of the last start."""
    stopped: float | None = None
    labels: Mapping[str, str] = {}
    internal_ip: str = ""
    external_ip: str = ""
    parameters: Mapping[str, Any] = {}
    """The startup script's parameters."""
    lease_moved_to: float | None = None
    limit_seconds: float | None = None
    """maxRunDuration: Google ends the VM this many seconds after its start."""
    request: Mapping[str, Any] = {}
    """The current Instance as canonical proto3 JSON."""

    @property
    def resource(self) -> str:
        """Return projects/PROJECT/zones/ZONE/instances/NUMBER."""
        return f"projects/{self.project}/zones/{self.zone}/instances/{self.id}"

    @property
    def region(self) -> str:
        """Return the region of the zone: us-central1 for us-central1-a."""
        return self.zone.rpartition("-")[0]

    @property
    def run(self) -> str:
        """Return the run id, or a workstation's own name. Empty if launch did not create the VM."""
        return self.labels.get(RUN_LABEL, "")

    @property
    def trains(self) -> bool:
        """Return whether the VM runs a training job. The alternative is a workstation."""
        return IDENTITY_LABEL in self.labels

    @property
    def ceiling(self) -> float | None:
        """Return the time at which Google ends the VM in any case. None while it is not running."""
        if self.started is None or self.limit_seconds is None or self.status in DOWN:
            return None
        return self.started + self.limit_seconds

    @property
    def lease_until(self) -> float | None:
        """Return the time at which the watchdog stops the VM. None if it is not running.

        A deadline that was set since the last start replaces the lease of the creation. Neither exceeds the ceiling.
        """
        if self.started is None or self.status in DOWN:
            return None
        moved = self.lease_moved_to if self.lease_moved_to and self.lease_moved_to > self.started else None
        seconds = self.parameters.get("lease_seconds")
        own = moved or (self.started + float(seconds) if seconds else None)
        known = [at for at in (own, self.ceiling) if at is not None]
        return min(known, default=None)


PROVISIONING: Final[Mapping[str, Literal["standard", "spot", "flex-start", "reservation"]]] = {
    "SPOT": "spot",
    "FLEX_START": "flex-start",
    "RESERVATION_BOUND": "reservation",
}


def of_instance(instance: Mapping[str, Any], project: str) -> VmInstance:
    """Convert an Instance in canonical proto3 JSON, as instances.get returns it."""
    items = {item.get("key", ""): item.get("value", "") for item in instance.get("metadata", {}).get("items", ())}
    scheduling = instance.get("scheduling", {})
    interfaces = instance.get("networkInterfaces") or [{}]
    access = interfaces[0].get("accessConfigs") or [{}]
    limit = scheduling.get("maxRunDuration", {}).get("seconds")
    return VmInstance(
        id=str(instance.get("id", "")),
        name=instance.get("name", ""),
        project=project,
        zone=last_url_part(instance.get("zone", "")),
        status=instance.get("status", ""),
        machine_type=last_url_part(instance.get("machineType", "")),
        provisioning=provisioning_of(instance),
        created=seconds(instance.get("creationTimestamp")) or 0.0,
        started=seconds(instance.get("lastStartTimestamp")),
        stopped=seconds(instance.get("lastStopTimestamp")),
        labels=dict(instance.get("labels", {})),
        internal_ip=interfaces[0].get("networkIP", ""),
        external_ip=access[0].get("natIP", ""),
        parameters=parameters(items.get(PARAMETERS, "")),
        lease_moved_to=float(moved) if (moved := items.get(LEASE, "")).isdecimal() else None,
        limit_seconds=float(limit) if limit else None,
        request=instance,
    )


def provisioning_of(instance: Mapping[str, Any]) -> str:
    """Return the provisioning model by the plan's name for it."""
    if instance.get("reservationAffinity", {}).get("consumeReservationType") == "SPECIFIC_RESERVATION":
        return "reservation"
    return PROVISIONING.get(instance.get("scheduling", {}).get("provisioningModel", ""), "standard")


def parameters(text: str) -> Mapping[str, Any]:
    """Return the startup script's parameters. Empty if the text is invalid."""
    try:
        data = json.loads(text or "{}")
    except ValueError:
        return {}
    return data if isinstance(data, dict) else {}


def last_url_part(link: str) -> str:
    """Return the last part of a resource's URL."""
    return link.rpartition("/")[2]


def seconds(timestamp: str | None) -> float | None:
    """Convert an RFC 3339 time to Unix seconds. None if it is missing or invalid."""
    try:
        return datetime.fromisoformat(timestamp).timestamp() if timestamp else None
    except ValueError:
        return None
