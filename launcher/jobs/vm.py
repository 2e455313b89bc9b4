"""A VM of launch's as data: what Compute Engine said of it when it was last asked, and what follows from that. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final, Literal

from msgspec import Struct

from launcher.jobs.job import IDENTITY_LABEL, RUN_LABEL

PARAMETERS: Final = "launch"
"""The metadata item (JSON) with all that the startup script is told."""
LEASE: Final = "launch-lease-until"
"""The metadata item with a deadline (Unix seconds, an integer) that somebody has moved the lease to."""
READY: Final = "launch"
"""The namespace of the guest attributes in which the startup script says how far it is (state, reason)."""

UP: Final = frozenset({"PENDING", "PROVISIONING", "STAGING", "RUNNING", "REPAIRING"})
DOWN: Final = frozenset({"STOPPED", "TERMINATED", "SUSPENDED"})
"""States of an Instance (compute_v1.Instance.Status). In the others it is on its way from one to the other."""


class Machine(Struct, frozen=True, kw_only=True):
    """A VM. Times are Unix seconds by Google's clock; None: that hasn't happened."""

    id: str
    """Its number, which no other VM will ever have."""
    name: str
    project: str
    zone: str
    status: str
    machine_type: str
    provisioning: str
    """standard, spot, flex-start or reservation."""
    created: float
    started: float | None = None
    """When it was last started."""
    stopped: float | None = None
    labels: Mapping[str, str] = {}
    internal_ip: str = ""
    external_ip: str = ""
    parameters: Mapping[str, Any] = {}
    """What its startup script was told."""
    lease_moved_to: float | None = None
    limit_seconds: float | None = None
    """maxRunDuration: after that Google itself ends it, counted from its start."""
    request: Mapping[str, Any] = {}
    """The Instance as it is, as canonical proto3 JSON."""

    @property
    def resource(self) -> str:
        """projects/PROJECT/zones/ZONE/instances/NUMBER"""
        return f"projects/{self.project}/zones/{self.zone}/instances/{self.id}"

    @property
    def region(self) -> str:
        """`us-central1-a` is in us-central1."""
        return self.zone.rpartition("-")[0]

    @property
    def run(self) -> str:
        """The run it trains for, or its own name when it is one to work on; empty: it isn't launch's."""
        return self.labels.get(RUN_LABEL, "")

    @property
    def trains(self) -> bool:
        """Whether it runs a job, rather than being there to work on."""
        return IDENTITY_LABEL in self.labels

    @property
    def ceiling(self) -> float | None:
        """When Google ends it, whatever happens; None while it doesn't run."""
        if self.started is None or self.limit_seconds is None or self.status in DOWN:
            return None
        return self.started + self.limit_seconds

    @property
    def lease_until(self) -> float | None:
        """When its watchdog stops it: as somebody has moved it to since its start, else after the lease it was made
        with; never later than the ceiling. None: it doesn't run."""
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


def of_instance(instance: Mapping[str, Any], project: str) -> Machine:
    """An Instance as canonical proto3 JSON (as instances.get answers it), as data."""
    items = {item.get("key", ""): item.get("value", "") for item in instance.get("metadata", {}).get("items", ())}
    scheduling = instance.get("scheduling", {})
    interfaces = instance.get("networkInterfaces") or [{}]
    access = interfaces[0].get("accessConfigs") or [{}]
    limit = scheduling.get("maxRunDuration", {}).get("seconds")
    return Machine(
        id=str(instance.get("id", "")),
        name=instance.get("name", ""),
        project=project,
        zone=last(instance.get("zone", "")),
        status=instance.get("status", ""),
        machine_type=last(instance.get("machineType", "")),
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
    """The provisioning model, as the plan calls it."""
    if instance.get("reservationAffinity", {}).get("consumeReservationType") == "SPECIFIC_RESERVATION":
        return "reservation"
    return PROVISIONING.get(instance.get("scheduling", {}).get("provisioningModel", ""), "standard")


def parameters(text: str) -> Mapping[str, Any]:
    """What the startup script was told; empty where that can't be read."""
    try:
        found = json.loads(text or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def last(link: str) -> str:
    """The last part of a resource's URL."""
    return link.rpartition("/")[2]


def seconds(timestamp: str | None) -> float | None:
    """An RFC 3339 time as Unix seconds; None where there is none."""
    try:
        return datetime.fromisoformat(timestamp).timestamp() if timestamp else None
    except ValueError:
        return None
