"""Refusals that are about a place: no capacity there now, or never such a machine."""

from __future__ import annotations

import re
from collections.abc import Mapping

from msgspec import Struct

from launcher.diagnosis.model import Diagnosis, Kind, Refusal, Scope, Tried
from launcher.diagnosis.text import plain
from launcher.spec.kinds import ZONE

STOCKOUT = (
    r"resources are insufficient|enough resources available|\bstockout\b|insufficient.?capacity|resource pool exhausted"
    r"|zone_resource_pool_exhausted|is currently unavailable in the|minimum count of \d+ vms could not be created"
)
STOCKOUT_REASONS = frozenset(
    {
        *("ZONE_RESOURCE_POOL_EXHAUSTED", "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS", "VM_MIN_COUNT_NOT_REACHED"),
        *("insufficientCapacity", "STOCKOUT", "resource_availability"),
    }
)
"""Codes of Compute Engine's operations, and the reason in their ErrorInfo."""


def of_stockout(refusal: Refusal, tried: Tried) -> Diagnosis | None:
    """The diagnosis if there are no machines just now."""
    if refusal.reason not in STOCKOUT_REASONS and not re.search(STOCKOUT, refusal.message, re.IGNORECASE):
        return None
    return stockout(tried, zones_of(refusal.metadata, tried))


def stockout(tried: Tried, zones: tuple[str, ...] = ()) -> Diagnosis:
    """Nothing is free where it was tried; `zones` are where there is something, in Google's words."""
    machine = tried.machine_type or "machines"
    return Diagnosis(
        scope="zone" if tried.zone else "region+provisioning",
        kind="stockout",
        cause=f"no {machine} to be had in {tried.zone or tried.region} as {tried.provisioning} just now",
        fix=elsewhere(tried),
        zones=zones,
    )


def zones_of(metadata: Mapping[str, str], tried: Tried) -> tuple[str, ...]:
    """The zones that a stockout's own metadata (ErrorInfo) names: `us-central1-b,us-central1-c`."""
    named = re.findall(rf"\b{ZONE}\b", metadata.get("zonesAvailable", ""))
    return tuple(zone for zone in dict.fromkeys(named) if zone != tried.zone)


def elsewhere(tried: Tried) -> str:
    """What may get machines all the same."""
    if tried.provisioning == "flex-start":
        return "Name more regions (--region any takes all), or let it wait longer: --set limits.wait=24h"
    return "Name more regions (--region any takes all), or take --flex-start, which waits for machines"


class Pattern(Struct, frozen=True):
    """A wording with what it means; `cause` and `fix` take its groups, and the fields of Tried by name."""

    wording: str
    scope: Scope
    kind: Kind
    cause: str
    fix: str = ""


OTHER_REGION = "Name another region: --region REGION"
OTHER_ZONE = "Name another zone: --zone ZONE"
BY_GPU = "Name the GPU and their number, and leave the rest out: --type h100 --gpus 2"
PATTERNS = (
    Pattern(
        r'machine type "([\w-]+)" is not supported',
        "region",
        "machine",
        "Vertex AI doesn't have {0} in {region}",
        OTHER_REGION,
    ),
    Pattern(
        r'"(\d+)" of accelerator "(\w+)" is not supported for machine type "([\w-]+)"(.*)',
        "permanent",
        "machine",
        "{2} doesn't go with {0} x {1}{3}",
        BY_GPU,
    ),
    Pattern(
        r'accelerator "(\w+)" is not supported for machine type "([\w-]+)"',
        "permanent",
        "machine",
        "{1} doesn't go with {0}",
        BY_GPU,
    ),
    Pattern(
        r"\[([\w, -]+)\] features are not compatible",
        "permanent",
        "machine",
        "{0} don't go together on one VM",
        BY_GPU,
    ),
    Pattern(
        r"disk type ([\w-]+) is not supported for machine type ([\w-]*)",
        "permanent",
        "machine",
        "{1} can't boot from {0}",
        "Leave machine.boot_disk_type out",
    ),
    Pattern(
        r"machine type with name '([\w-]+)' does not exist in zone '([\w-]+)'",
        "zone",
        "machine",
        "Compute Engine doesn't have {0} in {1}",
        OTHER_ZONE,
    ),
    Pattern(
        r"(?:accelerator|machine)Types/([\w-]+)' was not found",
        "zone",
        "machine",
        "Compute Engine doesn't have {0} in {place}",
        OTHER_ZONE,
    ),
    Pattern(
        r"location ([\w-]+) is not found or access is unauthorized",
        "zone",
        "machine",
        "{0} isn't there for project {project}",
        OTHER_ZONE,
    ),
    Pattern(
        r"(constraints/gcp\.resourceLocations)",
        "region",
        "permission",
        "the organization's policy {0} forbids {region} to project {project}",
        "gcloud resource-manager org-policies describe gcp.resourceLocations --effective --project={project}",
    ),
)

REASONS: dict[str, tuple[Kind, str]] = {
    "UNSUPPORTED_OPERATION": ("preempted", "the VM was taken away while it was made"),
    "RESOURCE_NOT_READY": ("busy", "Compute Engine was still busy with something that the VM needs"),
    "RESOURCE_OPERATION_RATE_EXCEEDED": ("busy", "too many operations on one resource"),
    "RESOURCE_NOT_FOUND": ("machine", "something that the VM needs isn't there"),
}
"""Codes of Compute Engine's operations after which another zone may do better."""


def of_machine(refusal: Refusal, tried: Tried) -> Diagnosis | None:
    """The diagnosis if that place, or Google, doesn't have what was asked for."""
    place = tried.zone or tried.region
    names = {"region": tried.region, "project": tried.project, "place": place}
    for one in PATTERNS:
        if found := re.search(one.wording, refusal.message, re.IGNORECASE):
            groups = [plain(group or "") for group in found.groups()]
            cause, fix = one.cause.format(*groups, **names), one.fix.format(*groups, **names)
            return Diagnosis(scope=one.scope, kind=one.kind, cause=cause, fix=fix)
    if refusal.reason in REASONS:
        kind, cause = REASONS[refusal.reason]
        return Diagnosis(scope="zone", kind=kind, cause=f"{cause} ({place})", fix=OTHER_ZONE)
    return None
