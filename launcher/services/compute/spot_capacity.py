"""Order a plan's Spot zones by Google's capacity advice.

The advice (compute_v1.AdviceClient.capacity) is requested for each zone separately, because a request for several zones
returns the best one only. It only reorders attempts of equal price: a more expensive zone, or another provisioning
model, keeps its position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any, Final

from msgspec.structs import replace

from launcher.errors import LaunchError
from launcher.gcp.api import words
from launcher.gcp.parallel import call_once, together
from launcher.jobs.vm import last_url_part
from launcher.plan.model import Attempt, Plan
from launcher.services.compute.client import Compute
from launcher.services.compute.messages import as_json, message_of
from launcher.services.request.vm import properties

SECONDS: Final = 8.0
SHOWN: Final = 3
MAX_ZONES: Final = 12
"""Advice is requested for the zones that are tried first."""


def order_by_capacity(plan: Plan, compute: Compute) -> tuple[Plan, tuple[str, ...]]:
    """Order a plan's Spot zones of equal price by capacity, best first.

    Return the plan, and lines for the user: the scores, or the reason why there are none.
    """
    spot_zones = dict.fromkeys(
        attempt.zone for attempt in plan.attempts if attempt.zone and attempt.provisioning == "spot"
    )
    zones = list(spot_zones)[:MAX_ZONES]
    if len(zones) < 2:
        return plan, ()
    answers = together({zone: partial(score, compute, plan, zone) for zone in zones})
    scores = {zone: each for zone, each in answers.items() if isinstance(each, float)}
    if not scores:
        error = next((each for each in answers.values() if isinstance(each, LaunchError)), None)
        reason = words(error.problem, 160) if error else "not available for this machine"
        return plan, (f"no advice on Spot capacity: {reason}",)
    best = sorted(scores.items(), key=lambda each: -each[1])[:SHOWN]
    text = ", ".join(f"{zone} {likelihood:.2g}" for zone, likelihood in best)
    line = f"Spot capacity now, according to Google (1 = best): {text}"
    lines = (line,) if len(set(scores.values())) > 1 else ()
    return replace(plan, attempts=order_by_score(plan.attempts, scores)), lines


def order_by_score(attempts: Sequence[Attempt], scores: Mapping[str, float]) -> tuple[Attempt, ...]:
    """Order consecutive attempts of equal price, model and machine by score, best first.

    Zones without a score come last, in the plan's order.
    """
    ordered: list[Attempt] = []
    for (model, price, _), group in groupby(attempts, key=attempt_group):
        members = list(group)
        known = model == "spot" and price is not None
        ordered += sorted(members, key=lambda attempt: -scores.get(attempt.zone or "", -1.0)) if known else members
    return tuple(ordered)


def attempt_group(attempt: Attempt) -> tuple[str, float | None, str]:
    """Return the properties that attempts must share to be reordered."""
    return attempt.provisioning, attempt.usd_per_hour, attempt.machine_type


def score(compute: Compute, plan: Plan, zone: str) -> float | None:
    """Return the likelihood (0 to 1) that a zone has capacity for the plan's VMs. None: no advice.

    Raises LaunchError.
    """
    from google.cloud import compute_v1

    resource = message_of(compute_v1.CapacityAdviceRequest, advice_request(plan, zone))
    arguments = {
        "project": compute.project,
        "region": zone.rpartition("-")[0],
        "capacity_advice_request_resource": resource,
    }
    return score_of(as_json(call_once(compute.api("AdviceClient"), "capacity", SECONDS, **arguments)), zone)


def advice_request(plan: Plan, zone: str) -> dict[str, Any]:
    """Return the CapacityAdviceRequest for one zone."""
    gpus = properties(plan.attempts[0].request).get("guestAccelerators", ())
    attached = [{**gpu, "acceleratorType": last_url_part(gpu["acceleratorType"])} for gpu in gpus]
    machine = {"machineTypes": [plan.machine.machine_type], **({"guestAccelerators": attached} if attached else {})}
    return {
        "distributionPolicy": {"targetShape": "ANY_SINGLE_ZONE", "zones": [{"zone": f"zones/{zone}"}]},
        "instanceFlexibilityPolicy": {"instanceSelections": {"launch": machine}},
        "instanceProperties": {"scheduling": {"provisioningModel": "SPOT"}},
        "size": plan.machine.nodes,
    }


def score_of(advice: Mapping[str, Any], zone: str) -> float | None:
    """Return a zone's score in a CapacityAdviceResponse, or None."""
    for recommendation in advice.get("recommendations", ()):
        zones = {last_url_part(shard.get("zone", "")) for shard in recommendation.get("shards", ())}
        obtainability = recommendation.get("scores", {}).get("obtainability")
        if obtainability is not None and zones <= {zone}:
            return float(obtainability)
    return None
