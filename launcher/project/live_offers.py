"""Live data of offers for a project: its quotas of VMs and of Vertex AI, and Google's advice on Spot capacity."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

from msgspec.structs import replace

from launcher.catalog import Catalog
from launcher.catalog.model import Quota
from launcher.catalog.offers import Offer
from launcher.errors import LaunchError
from launcher.gcp.api import Rest, words
from launcher.gcp.parallel import together
from launcher.project.checks import limit_of
from launcher.project.model import UNEXPECTED
from launcher.project.reads import read_quota, read_quotas, tolerant
from launcher.services.compute.capacity import LiveOffer, QuotaUse, live_vm_offers
from launcher.services.compute.client import SERVICE, Compute

COMPUTE: Final = f"{SERVICE.name}.googleapis.com"
VERTEX: Final = "quotas of Vertex AI"


def live_offers(compute: Compute, catalog: Catalog, offers: Sequence[Offer]) -> dict[tuple[str, str], LiveOffer]:
    """Return (GPU, region) -> live data of the first offers. Raises as `live_vm_offers` does."""
    vms_call: Callable[[], Any] = partial(live_vm_offers, compute, catalog, offers)
    answers = together({"vms": vms_call, **quota_requests(compute, catalog, offers)})
    vms = answers.pop("vms")
    if isinstance(vms, LaunchError):
        raise vms
    read = [offer for offer in offers if (offer.gpu.name, str(offer.region)) in vms]
    return {
        (offer.gpu.name, str(offer.region)): with_quotas(
            vms[offer.gpu.name, str(offer.region)], catalog, offer, answers
        )
        for offer in read
    }


def quota_requests(compute: Compute, catalog: Catalog, offers: Sequence[Offer]) -> dict[str, Callable[[], Any]]:
    """Return the requests to Cloud Quotas by name: Vertex AI's quotas, and VM quotas that Compute Engine lacks."""
    rest, project = Rest(compute.project, compute.environ), f"projects/{compute.project}"
    ids = {str(quota.id) for each in offers for _, quota in models_only_in_cloud_quotas(catalog, each)}
    return tolerant(
        {
            VERTEX: partial(read_quotas, rest, project),
            **{each: partial(read_quota, rest, project, COMPUTE, each) for each in ids},
        }
    )


def models_only_in_cloud_quotas(catalog: Catalog, offer: Offer) -> Iterator[tuple[str, Quota]]:
    """Yield each provisioning model whose VM quota only Cloud Quotas shows, with that quota."""
    for model in offer.prices:
        quota = catalog.quota(offer.machines[0], "compute", model)
        if quota and quota.id and (quota.dims or not quota.metric):
            yield model, quota


def with_quotas(live: LiveOffer, catalog: Catalog, offer: Offer, answers: Mapping[str, Any]) -> LiveOffer:
    """Return an offer's live data with the quotas in these answers."""
    region, problems = str(offer.region), list(live.problems)
    quotas = dict(live.quotas)
    for model, quota in models_only_in_cloud_quotas(catalog, offer):
        info = answers[str(quota.id)]
        if isinstance(info, LaunchError):
            problems.append(f"{quota.id}: {words(info.problem, 160)}")
        else:
            quotas[model] = quota_use(info, region, quota.dims, used=None)
    known = answers[VERTEX]
    if isinstance(known, LaunchError):
        problems.append(f"{VERTEX}: {words(known.problem, 160)}")
        known = {"quotas": {}, "usage": None}
    vertex = {
        model: vertex_quota_use(known, catalog.quota(offer.machines[0], "vertex", model), region)
        for model in offer.prices
    }
    return replace(live, quotas=quotas, vertex_quotas=vertex, problems=tuple(dict.fromkeys(problems)))


def vertex_quota_use(known: Mapping[str, Any], quota: Quota | None, region: str) -> QuotaUse | None:
    """Return the limit and the use of a Vertex AI quota; None: unknown."""
    if quota is None:
        return None
    for metric, info in known["quotas"].items():
        if metric == str(quota.metric).rpartition("/")[2] or info.get("quotaId") == quota.id:
            usage = known["usage"]
            return quota_use(info, region, {}, used=None if usage is None else usage.get(metric, {}).get(region, 0))
    return None


def quota_use(info: Any, region: str, dimensions: Mapping[str, str], used: float | None) -> QuotaUse | None:
    """Return a QuotaInfo's limit; None: unknown. A limit of -1 is unlimited."""
    try:
        limit = limit_of(info, region, dimensions)
        return None if limit is None else QuotaUse(str(info["quotaId"]), float(limit), used)
    except UNEXPECTED:
        return None
