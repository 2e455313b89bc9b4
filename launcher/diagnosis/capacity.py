"""Diagnose refusals that depend on the placement: no capacity now, or an unsupported machine."""

from __future__ import annotations

import re

from msgspec import Struct

from launcher.diagnosis.model import Diagnosis, Kind, Refusal, RequestContext, Scope, plain
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


def diagnose_stockout(refusal: Refusal, context: RequestContext) -> Diagnosis | None:
    if refusal.reason not in STOCKOUT_REASONS and not re.search(STOCKOUT, refusal.message, re.IGNORECASE):
        return None
    named = re.findall(rf"\b{ZONE}\b", refusal.metadata.get("zonesAvailable", ""))  # of ErrorInfo
    return stockout(context, tuple(zone for zone in dict.fromkeys(named) if zone != context.zone))


def stockout(context: RequestContext, zones: tuple[str, ...] = ()) -> Diagnosis:
    """Return the diagnosis of missing capacity; `zones` are those with capacity, as Google named them."""
    machine = context.machine_type or "machines"
    return Diagnosis(
        scope="zone" if context.zone else "region+provisioning",
        kind="stockout",
        cause=f"no capacity for {machine} in {context.zone or context.region} as {context.provisioning} at the moment",
        fix=elsewhere(context),
        zones=zones,
    )


def elsewhere(context: RequestContext) -> str:
    """Suggest other placements."""
    if context.provisioning == "flex-start":
        return "Try more regions (--region any tries all), or wait longer: --set limits.wait=24h"
    return "Try more regions (--region any tries all), or --flex-start, which waits for capacity"


class Pattern(Struct, frozen=True):
    """A message pattern and its diagnosis; `cause` and `fix` may use its groups, region, project and place."""

    wording: str
    scope: Scope
    kind: Kind
    cause: str
    fix: str = ""


OTHER_REGION = "Use another region: --region REGION"
OTHER_ZONE = "Use another zone: --zone ZONE"
BY_GPU = "Let launch choose the machine type, by GPU and count: --type h100 --gpus 2"
PATTERNS = (
    Pattern(
        r'machine type "([\w-]+)" is not supported',
        "region",
        "machine",
        "{0} is not available on Vertex AI in {region}",
        OTHER_REGION,
    ),
    Pattern(
        r'"(\d+)" of accelerator "(\w+)" is not supported for machine type "([\w-]+)"(.*)',
        "permanent",
        "machine",
        "{2} does not support {0} x {1}{3}",
        BY_GPU,
    ),
    Pattern(
        r'accelerator "(\w+)" is not supported for machine type "([\w-]+)"',
        "permanent",
        "machine",
        "{1} does not support {0}",
        BY_GPU,
    ),
    Pattern(
        r"\[([\w, -]+)\] features are not compatible",
        "permanent",
        "machine",
        "{0} cannot be combined on one VM",
        BY_GPU,
    ),
    Pattern(
        r"disk type ([\w-]+) is not supported for machine type ([\w-]*)",
        "permanent",
        "machine",
        "{1} cannot boot from {0}",
        "Remove machine.boot_disk_type",
    ),
    Pattern(
        r"machine type with name '([\w-]+)' does not exist in zone '([\w-]+)'",
        "zone",
        "machine",
        "{0} is not available on Compute Engine in {1}",
        OTHER_ZONE,
    ),
    Pattern(
        r"(?:accelerator|machine)Types/([\w-]+)' was not found",
        "zone",
        "machine",
        "{0} is not available on Compute Engine in {place}",
        OTHER_ZONE,
    ),
    Pattern(
        r"location ([\w-]+) is not found or access is unauthorized",
        "zone",
        "machine",
        "{0} is not available to project {project}",
        OTHER_ZONE,
    ),
    Pattern(
        r"(constraints/gcp\.resourceLocations)",
        "region",
        "permission",
        "the organization policy {0} forbids {region} for project {project}",
        "gcloud resource-manager org-policies describe gcp.resourceLocations --effective --project={project}",
    ),
)

REASONS: dict[str, tuple[Kind, str]] = {
    "UNSUPPORTED_OPERATION": ("preempted", "the VM was preempted while it was being created"),
    "RESOURCE_NOT_READY": ("busy", "a resource that the VM needs was not ready"),
    "RESOURCE_OPERATION_RATE_EXCEEDED": ("busy", "too many operations on one resource"),
    "RESOURCE_NOT_FOUND": ("machine", "a resource that the VM needs does not exist"),
}
"""Codes of Compute Engine's operations after which another zone may work."""


def diagnose_machine(refusal: Refusal, context: RequestContext) -> Diagnosis | None:
    """Diagnose a machine that is not available in the place, or anywhere."""
    place = context.zone or context.region
    names = {"region": context.region, "project": context.project, "place": place}
    for pattern in PATTERNS:
        if match := re.search(pattern.wording, refusal.message, re.IGNORECASE):
            groups = [plain(group or "") for group in match.groups()]
            cause, fix = pattern.cause.format(*groups, **names), pattern.fix.format(*groups, **names)
            return Diagnosis(scope=pattern.scope, kind=pattern.kind, cause=cause, fix=fix)
    if refusal.reason in REASONS:
        kind, cause = REASONS[refusal.reason]
        return Diagnosis(scope="zone", kind=kind, cause=f"{cause} ({place})", fix=OTHER_ZONE)
    return None
