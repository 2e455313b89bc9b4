"""What a project can get of an offer or a plan right now: Google's advice on Spot capacity, and quotas of VMs.

advice.capacity and advice.capacityHistory (https://cloud.google.com/compute/docs/reference/rest/beta/advice) answer for
Spot VMs only; the history has no N1 machines with GPUs. They exist in Compute Engine's v1 and beta API, but not for
every project in both, so v1 is tried first; Google's client only has v1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any, Final

from msgspec import Struct, field
from msgspec.structs import replace

from launcher.catalog import Catalog, Gpu, MachineType
from launcher.catalog.offers import Offer
from launcher.errors import LaunchError
from launcher.gcp.api import status_of, words
from launcher.gcp.parallel import together
from launcher.jobs.vm import last_url_part
from launcher.plan.model import Attempt, Plan
from launcher.services.compute.client import Compute, as_json
from launcher.services.request.vm import properties

SECONDS: Final = 8.0
NOT_SERVED: Final = (400, 404, 501)
"""Statuses of a version that does not serve the method, or not for Spot."""
SPOT: Final = {"provisioningModel": "SPOT"}
SHOWN: Final = 3
MAX_CALLS: Final = 12
"""Advice is requested for the zones that are tried first; of offers, only the first are read: each takes two requests,
all in parallel."""


class Capacity(Struct, frozen=True, kw_only=True):
    """The likelihood (0 to 1) that a region has Spot capacity for one VM, and the seconds that most such VMs are
    expected to run. None: no advice. `api`: v1 or beta."""

    obtainability: float | None
    uptime_seconds: float | None
    api: str


class History(Struct, frozen=True, kw_only=True):
    """Preemptions and prices of a machine's Spot VMs in a region. `api`: v1 or beta.

    `preemption_rate`: the mean of the daily shares of stopped VMs that were preempted, over `days` days; None: no data.
    `prices`: (first day, USD per hour) of each list price, oldest first.
    """

    preemption_rate: float | None
    days: int
    prices: tuple[tuple[str, float], ...]
    api: str


class QuotaUse(Struct, frozen=True):
    """A region's quota: GPUs that the project may use (-1: no limit), and those in use (None: unknown). `metric`: as
    regions.get shows it, or the id in Cloud Quotas."""

    metric: str
    limit: float
    used: float | None


class LiveOffer(Struct, frozen=True, kw_only=True):
    """`quotas` of VMs and `vertex_quotas`: provisioning model -> quota; None: unknown. The advice is for one Spot VM of
    `machine_type`; None: not available. `problems`: what could not be read, and why."""

    machine_type: str
    quotas: dict[str, QuotaUse | None]
    capacity: Capacity | None
    history: History | None
    problems: tuple[str, ...]
    vertex_quotas: dict[str, QuotaUse | None] = field(default_factory=dict)


# --- A plan's zones ---------------------------------------------------------------------------------------------------


def order_by_capacity(plan: Plan, compute: Compute) -> tuple[Plan, tuple[str, ...]]:
    """Order a plan's Spot zones of equal price by Google's capacity advice, best first.

    Return the plan, and lines for the user: the scores, or the reason why there are none. The advice is requested for
    each zone separately, because a request for several zones returns the best one only.
    """
    spot_zones = dict.fromkeys(
        attempt.zone for attempt in plan.attempts if attempt.zone and attempt.provisioning == "spot"
    )
    zones = list(spot_zones)[:MAX_CALLS]
    if len(zones) < 2:
        return plan, ()
    gpus = properties(plan.attempts[0].request).get("guestAccelerators", ())
    attached = [{**gpu, "acceleratorType": last_url_part(gpu["acceleratorType"])} for gpu in gpus]
    machine, nodes = plan.machine.machine_type, plan.machine.nodes

    def score(zone: str) -> float | None:
        region = zone.rpartition("-")[0]
        return score_of(ask_capacity(compute, machine, attached, region, size=nodes, zone=zone)[0], zone)

    answers = together({zone: partial(score, zone) for zone in zones})
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
    alike = groupby(attempts, key=lambda attempt: (attempt.provisioning, attempt.usd_per_hour, attempt.machine_type))
    for (model, price, _), group in alike:
        members = list(group)
        known = model == "spot" and price is not None
        ordered += sorted(members, key=lambda attempt: -scores.get(attempt.zone or "", -1.0)) if known else members
    return tuple(ordered)


def score_of(advice: Mapping[str, Any], zone: str) -> float | None:
    """Return a zone's score in a CapacityAdviceResponse, or None."""
    for recommendation in advice.get("recommendations", ()):
        zones = {last_url_part(shard.get("zone", "")) for shard in recommendation.get("shards", ())}
        obtainability = recommendation.get("scores", {}).get("obtainability")
        if obtainability is not None and zones <= {zone}:
            return float(obtainability)
    return None


# --- Offers -----------------------------------------------------------------------------------------------------------


def live_vm_offers(compute: Compute, catalog: Catalog, offers: Sequence[Offer]) -> dict[tuple[str, str], LiveOffer]:
    """Return (GPU, region) -> live data of the first offers, which name a region each.

    Raises NotAuthorised: no credentials. Whatever else can't be read is a problem of its offer.
    """
    compute.rest_api()  # raises NotAuthorised
    read = [offer for offer in offers if offer.region][:MAX_CALLS]
    calls: dict[str, Callable[[], Any]] = {}
    for offer in read:
        region, machine = str(offer.region), offer.machines[0]
        quotas, capacity_call, history_call = call_names(offer)
        calls[quotas] = partial(region_quotas, compute, region)
        if "spot" in machine.compute_provisioning:
            calls[capacity_call] = partial(capacity, compute, machine, offer.gpu, region)
            calls[history_call] = partial(history, compute, machine, region)
    answers = together(calls)
    return {(offer.gpu.name, str(offer.region)): live_offer(catalog, offer, answers) for offer in read}


def call_names(offer: Offer) -> tuple[str, str, str]:
    """Return the names of an offer's requests, as problems show them: its region's quotas, its advice, its history."""
    of = f"of {offer.machines[0].name} {offer.gpu.name} in {offer.region}"
    return f"quotas of {offer.region}", f"capacity {of}", f"history {of}"


def region_quotas(compute: Compute, region: str) -> dict[str, Mapping[str, Any]]:
    """Return a region's quotas by metric. Raises LaunchError."""
    answer = as_json(compute.api("RegionsClient").once("get", SECONDS, project=compute.project, region=region))
    return {quota.get("metric", ""): quota for quota in answer.get("quotas", ())}


def live_offer(catalog: Catalog, offer: Offer, answers: Mapping[str, Any]) -> LiveOffer:
    """Return an offer's part of the answers."""
    names = call_names(offer)
    received = [None if isinstance(answers.get(name), LaunchError) else answers.get(name) for name in names]
    problems = [
        f"{name}: {words(error.problem, 160)}" for name in names if isinstance(error := answers.get(name), LaunchError)
    ]
    quotas: dict[str, QuotaUse | None] = {}
    for model in offer.prices:
        needed = catalog.quota(offer.machines[0], "compute", model)
        shown = (received[0] or {}).get(needed.metric) if needed and needed.metric and not needed.dims else None
        quotas[model] = (
            QuotaUse(shown["metric"], float(shown.get("limit", 0)), float(shown.get("usage", 0))) if shown else None
        )
    return LiveOffer(
        machine_type=offer.machines[0].name,
        quotas=quotas,
        capacity=received[1],
        history=received[2],
        problems=tuple(problems),
    )


def capacity(compute: Compute, machine: MachineType, gpu: Gpu, region: str) -> Capacity:
    """Return the advice on one Spot VM in any zone of a region. Raises LaunchError."""
    accelerators = [{"acceleratorType": gpu.accelerator, "acceleratorCount": machine.gpus}]
    attached = accelerators if machine.guest_accelerator else []
    answer, version = ask_capacity(compute, machine.name, attached, region, size=1)
    scores: Mapping[str, Any] = next(
        (recommendation.get("scores", {}) for recommendation in answer.get("recommendations", ())), {}
    )
    obtainability, uptime = scores.get("obtainability"), str(scores.get("estimatedUptime", ""))
    return Capacity(
        obtainability=None if obtainability is None else float(obtainability),
        uptime_seconds=float(uptime.removesuffix("s")) if uptime.endswith("s") else None,
        api=version,
    )


def history(compute: Compute, machine: MachineType, region: str) -> History | None:
    """Return the history of a machine's Spot VMs in a region; None: Google keeps none of N1 machines with GPUs. Raises
    LaunchError."""
    if machine.guest_accelerator:
        return None
    body = {
        "instanceProperties": {"machineType": machine.name, "scheduling": SPOT},
        "types": ["PREEMPTION", "PRICE"],
    }
    answer, version = first_served(compute, "capacityHistory", region, body)
    rates = [
        float(record["preemptionRate"]) for record in answer.get("preemptionHistory", ()) if "preemptionRate" in record
    ]
    return History(
        preemption_rate=sum(rates) / len(rates) if rates else None,
        days=len(rates),
        prices=price_steps(answer.get("priceHistory", ())),
        api=version,
    )


def price_steps(records: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, float], ...]:
    """Return the first day of each price, without records that repeat the price before; a price of 0 is unknown."""
    steps: list[tuple[str, float]] = []
    for record in sorted(records, key=lambda record: str(record.get("interval", {}).get("startTime", ""))):
        money = record.get("listPrice", {})
        usd = int(money.get("units") or 0) + int(money.get("nanos") or 0) / 1e9
        if usd and (not steps or steps[-1][1] != usd):
            steps.append((str(record.get("interval", {}).get("startTime", ""))[:10], usd))
    return tuple(steps)


# --- Google's advice --------------------------------------------------------------------------------------------------


def ask_capacity(
    compute: Compute, machine: str, attached: Sequence[Mapping[str, Any]], region: str, *, size: int, zone: str = ""
) -> tuple[dict[str, Any], str]:
    """Return the CapacityAdviceResponse for `size` Spot VMs in one zone of a region (empty: any), and the API version
    that gave it. `attached`: an N1 machine's guestAccelerators. Raises LaunchError."""
    selection = {"machineTypes": [machine], **({"guestAccelerators": [*attached]} if attached else {})}
    zones = {"zones": [{"zone": f"zones/{zone}"}]} if zone else {}
    body = {
        "distributionPolicy": {"targetShape": "ANY_SINGLE_ZONE", **zones},
        "instanceFlexibilityPolicy": {"instanceSelections": {"launch": selection}},
        "instanceProperties": {"scheduling": SPOT},
        "size": size,
    }
    return first_served(compute, "capacity", region, body)


def first_served(compute: Compute, method: str, region: str, body: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the answer of the first API version that serves a method, and that version. Raises LaunchError."""

    def ask(version: str) -> tuple[dict[str, Any], str]:
        path = f"/compute/{version}/projects/{compute.project}/regions/{region}/advice/{method}"
        return compute.rest_api().once("send", SECONDS, verb="POST", path=path, json=body), version

    try:
        return ask("v1")
    except LaunchError as error:
        if status_of(error) not in NOT_SERVED:
            raise
    return ask("beta")
