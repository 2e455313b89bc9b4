"""Where Spot VMs are to be had just now, as Google's capacity advice says, and a plan's zones in that order.

The advice (compute_v1.AdviceClient.capacity) is asked for each zone by itself: its recommendation for several is for
the best of them alone. It is one of many reasons for a zone, and not the first: a dearer zone, or another provisioning
model, stays where the plan has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any, Final

from msgspec.structs import replace

from launcher.backend.request.vm import properties
from launcher.compute.client import Compute
from launcher.compute.messages import as_json, message_of
from launcher.errors import LaunchError
from launcher.gcp.api import words
from launcher.gcp.parallel import glance, together
from launcher.jobs.vm import last
from launcher.plan.model import Attempt, Plan

SECONDS: Final = 8.0
SHOWN: Final = 3
MOST: Final = 12
"""Zones that are asked about: those that are tried first."""


def ordered(plan: Plan, compute: Compute) -> tuple[Plan, tuple[str, ...]]:
    """The plan with its Spot zones of equal price by how likely they have machines, the likeliest first; and what there
    is to tell: the scores, or why there are none."""
    zones = list(dict.fromkeys(one.zone for one in plan.attempts if one.zone and one.provisioning == "spot"))[:MOST]
    if len(zones) < 2:
        return plan, ()
    found = together({zone: partial(score, compute, plan, zone) for zone in zones})
    scores = {zone: each for zone, each in found.items() if isinstance(each, float)}
    if not scores:
        return plan, (why_not(found),)
    lines = (scores_text(scores),) if len(set(scores.values())) > 1 else ()  # nothing to choose, nothing to tell
    return replace(plan, attempts=by_score(plan.attempts, scores)), lines


def by_score(attempts: Sequence[Attempt], scores: Mapping[str, float]) -> tuple[Attempt, ...]:
    """Attempts of equal price, model and machine that follow each other, the likeliest zone first; where nothing is
    known of a zone, it stays behind those with a score, in the plan's order."""
    found: list[Attempt] = []
    for (model, price, _), group in groupby(attempts, key=alike):
        members = list(group)
        known = model == "spot" and price is not None
        found += sorted(members, key=lambda one: -scores.get(one.zone or "", -1.0)) if known else members
    return tuple(found)


def alike(attempt: Attempt) -> tuple[str, float | None, str]:
    """What must be the same of attempts that may change places."""
    return attempt.provisioning, attempt.usd_per_hour, attempt.machine_type


def scores_text(scores: Mapping[str, float]) -> str:
    """The best of the scores in a line."""
    best = sorted(scores.items(), key=lambda one: -one[1])[:SHOWN]
    return "Spot VMs just now, by Google's advice (1 is the best): " + ", ".join(f"{zone} {n:.2g}" for zone, n in best)


def why_not(found: Mapping[str, float | LaunchError | None]) -> str:
    """Why there are no scores, in a line."""
    error = next((each for each in found.values() if isinstance(each, LaunchError)), None)
    return f"no advice on Spot capacity: {words(error.problem, 160) if error else 'Google gives none for this machine'}"


def score(compute: Compute, plan: Plan, zone: str) -> float | None:
    """How likely the plan's VMs are to be had in a zone, 0 to 1; None: the advice doesn't say. Raises LaunchError."""
    from google.cloud import compute_v1

    resource = message_of(compute_v1.CapacityAdviceRequest, question(plan, zone))
    asked = {
        "project": compute.project,
        "region": zone.rpartition("-")[0],
        "capacity_advice_request_resource": resource,
    }
    return score_of(as_json(glance(compute.api("AdviceClient"), "capacity", SECONDS, **asked)), zone)


def question(plan: Plan, zone: str) -> dict[str, Any]:
    """The CapacityAdviceRequest for one zone."""
    gpus = properties(plan.attempts[0].request).get("guestAccelerators", ())
    attached = [{**gpu, "acceleratorType": last(gpu["acceleratorType"])} for gpu in gpus]
    machine = {"machineTypes": [plan.machine.machine_type], **({"guestAccelerators": attached} if attached else {})}
    return {
        "distributionPolicy": {"targetShape": "ANY_SINGLE_ZONE", "zones": [{"zone": f"zones/{zone}"}]},
        "instanceFlexibilityPolicy": {"instanceSelections": {"launch": machine}},
        "instanceProperties": {"scheduling": {"provisioningModel": "SPOT"}},
        "size": plan.machine.nodes,
    }


def score_of(advice: Mapping[str, Any], zone: str) -> float | None:
    """The score that a CapacityAdviceResponse gives a zone."""
    for one in advice.get("recommendations", ()):
        zones = {last(shard.get("zone", "")) for shard in one.get("shards", ())}
        found = one.get("scores", {}).get("obtainability")
        if found is not None and zones <= {zone}:
            return float(found)
    return None
