"""What a project can get of an offer right now: quota, and Google's advice on Spot capacity with its history."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from msgspec import Struct, field

from launcher.catalog import Catalog
from launcher.catalog.offers import Offer
from launcher.errors import LaunchError
from launcher.gcp.api import words
from launcher.gcp.parallel import call_once, together
from launcher.services.compute import advice
from launcher.services.compute.advice import Capacity, History
from launcher.services.compute.client import Compute
from launcher.services.compute.messages import as_json

MAX_OFFERS: Final = 12
"""Only the first offers are read: each takes two requests, all in parallel."""


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


def live_offers(compute: Compute, catalog: Catalog, offers: Sequence[Offer]) -> dict[tuple[str, str], LiveOffer]:
    """Return (GPU, region) -> live data of the first offers, which name a region each.

    Raises NotAuthorised: no credentials. Whatever else can't be read is a problem of its offer.
    """
    read = [offer for offer in offers if offer.region][:MAX_OFFERS]
    answers = together(calls(compute, read))
    return {(offer.gpu.name, str(offer.region)): live_offer(catalog, offer, answers) for offer in read}


def calls(compute: Compute, offers: Sequence[Offer]) -> dict[str, Callable[[], Any]]:
    """Return the requests by name: a region's quotas, an offer's advice and its history."""
    api = advice.advice_api(compute)
    requests: dict[str, Callable[[], Any]] = {}
    for offer in offers:
        region, machine = str(offer.region), offer.machines[0]
        requests[f"quotas of {region}"] = partial(region_quotas, compute, region)
        if "spot" in machine.compute_provisioning:
            requests[f"capacity of {machine.name} {offer.gpu.name} in {region}"] = partial(
                advice.capacity, api, machine, offer.gpu, region
            )
            requests[f"history of {machine.name} {offer.gpu.name} in {region}"] = partial(
                advice.history, api, machine, region
            )
    return requests


def region_quotas(compute: Compute, region: str) -> dict[str, Mapping[str, Any]]:
    """Return a region's quotas by metric. Raises LaunchError."""
    arguments = {"project": compute.project, "region": region}
    answer = as_json(call_once(compute.api("RegionsClient"), "get", advice.SECONDS, **arguments))
    return {quota.get("metric", ""): quota for quota in answer.get("quotas", ())}


def live_offer(catalog: Catalog, offer: Offer, answers: Mapping[str, Any]) -> LiveOffer:
    """Return an offer's part of the answers."""
    machine, region = offer.machines[0], str(offer.region)
    names = [f"{what} of {machine.name} {offer.gpu.name} in {region}" for what in ("capacity", "history")]
    keys = [f"quotas of {region}", *names]
    received = {key: answer for key in keys if not isinstance(answer := answers.get(key), LaunchError)}
    problems = [
        f"{key}: {words(error.problem, 160)}" for key in keys if isinstance(error := answers.get(key), LaunchError)
    ]
    metrics = received.get(keys[0]) or {}
    quotas: dict[str, QuotaUse | None] = {}
    for model in offer.prices:
        needed = catalog.quota(machine, "compute", model)
        shown = metrics.get(needed.metric) if needed and needed.metric and not needed.dims else None
        quotas[model] = (
            QuotaUse(shown["metric"], float(shown.get("limit", 0)), float(shown.get("usage", 0))) if shown else None
        )
    return LiveOffer(
        machine_type=machine.name,
        quotas=quotas,
        capacity=received.get(keys[1]),
        history=received.get(keys[2]),
        problems=tuple(problems),
    )
