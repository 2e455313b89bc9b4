"""Print the offers of `launch gpus`: a table of 80 columns, or data."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from launcher.catalog import Catalog
from launcher.catalog.offers import Offer, PriceRange
from launcher.cli.ui.text import WIDTH, columns
from launcher.text import plural, rough_duration

if TYPE_CHECKING:
    from launcher.services.compute.capacity import LiveOffer, QuotaUse

    Live = Mapping[tuple[str, str], LiveOffer]

HEAD = ("GPU", "GB", "bf16", "where")
"""The columns before those of the provisioning models."""
UNKNOWN = "unknown"
NOT_OFFERED = "-"


def offer_lines(
    catalog: Catalog, offers: Sequence[Offer], total: int, live: Live, models: Sequence[str]
) -> Iterator[str]:
    """Yield the table: a row per offer with the prices of `models`, its machine types below unless each region has its
    row, and what is known of it in the project."""
    rows = [(*HEAD, *models), *(offer_row(offer, models) for offer in offers)]
    each_region = len({offer.region for offer in offers}) > 3
    table = columns(rows, "<>><" + ">" * len(models), gap=" ")
    for number, (cells, line) in enumerate(zip(rows, table, strict=True)):
        yield line
        if number and not each_region:
            shown = ", ".join(
                f"{machine.name}\u00a0×{machine.share or machine.gpus}" for machine in offers[number - 1].machines
            )
            for text in textwrap.wrap(shown, WIDTH - 2, break_on_hyphens=False):
                yield f"  {text}".replace("\u00a0", " ")
            models_by_region: dict[str, list[str]] = {}
            for model, region in offers[number - 1].cheapest.items():
                models_by_region.setdefault(region, []).append(model)
            cheapest = (f"{', '.join(names)} cheapest in {region}" for region, names in models_by_region.items())
            yield from indented("; ".join(cheapest))
        if number and (offer_now := live.get((cells[0], cells[3]))):
            yield from live_lines(offer_now)
    yield ""
    yield from notes(catalog)
    yield f"{len(offers)} of {plural(total, 'offer')}; prices of {catalog.price_table.date}"


def offer_row(offer: Offer, models: Sequence[str]) -> tuple[str, ...]:
    tflops = offer.gpu.peak_tflops["bf16"]
    where = offer.region or plural(len(offer.regions), "region")
    prices = (price_range_text(offer.prices.get(model)) for model in models)
    return offer.gpu.name, f"{offer.gpu.memory_gb}", f"{tflops:g}" if tflops else NOT_OFFERED, where, *prices


def price_range_text(price: PriceRange | None) -> str:
    """Return `2.00`, `0.71-2.78`, `≤14.38` for an upper bound, `unknown`, or `-` if the model is not offered."""
    if price is None:
        return NOT_OFFERED
    if price.low is None or price.high is None:
        return UNKNOWN
    low, high = f"{price.low:.2f}", f"{price.high:.2f}"
    if low != high and price.high >= 10:  # the column has 10 characters
        low, high = f"{price.low:.1f}", f"{price.high:.1f}"
    return ("≤" if price.bound else "") + (low if low == high else f"{low}-{high}")


def live_lines(live: LiveOffer) -> Iterator[str]:
    """Yield the quotas, the capacity and its history, and what could not be read."""
    yield from quota_lines("VMs", live.quotas)
    yield from quota_lines("Vertex AI", live.vertex_quotas)
    if capacity := live.capacity:
        score = UNKNOWN if capacity.obtainability is None else f"{capacity.obtainability:.2g} of 1"
        runs = "" if capacity.uptime_seconds is None else f", expected to run {rough_duration(capacity.uptime_seconds)}"
        yield from indented(f"Spot capacity: {score}{runs} ({live.machine_type}, {capacity.api} API)")
    if past := live.history:
        rate = UNKNOWN if past.preemption_rate is None else f"{past.preemption_rate:.0%} in {plural(past.days, 'day')}"
        prices = ", ".join(f"${usd:.2f}/h from {day}" for day, usd in past.prices[-2:])
        yield from indented(f"Spot preemptions: {rate}; price {prices or UNKNOWN} ({past.api} API)")
    for problem in live.problems:
        yield from indented(f"unknown: {problem}")


def quota_lines(service: str, quotas: Mapping[str, QuotaUse | None]) -> Iterator[str]:
    """Yield `VM quota (used/limit): standard 0/8, spot ?/4`."""
    cells = []
    for model, quota in quotas.items():
        limit = UNKNOWN if quota is None else "no limit" if quota.limit < 0 else f"{quota.limit:g}"
        used = "" if quota is None or quota.limit < 0 else "?/" if quota.used is None else f"{quota.used:g}/"
        cells.append(f"{model} {used}{limit}")
    yield from indented(f"quota of {service} (used/limit): {', '.join(cells)}" if cells else "")


def indented(text: str) -> Iterator[str]:
    """Yield the lines of a text below a row."""
    for line in textwrap.wrap(text, WIDTH - 4, break_on_hyphens=False):
        yield f"  {line}"


def notes(catalog: Catalog) -> Iterator[str]:
    """Yield what the figures mean."""
    fee = catalog.rates["vertex-fee"]
    yield "USD per GPU and hour on Compute Engine, with vCPUs, memory and local SSDs."
    yield f"Vertex AI adds {fee:.0%} of the list price. ≤: upper bound. bf16: dense TFLOP/s."
    if interruptions := catalog.interruptions("spot"):
        yield f"Spot: about {interruptions.hours:g} h between interruptions of a node, for any GPU (assumed)."


def offers_data(catalog: Catalog, offers: Sequence[Offer], total: int, live: Live) -> dict[str, Any]:
    """Return the offers as JSON data (docs/prices.md)."""
    interruptions = catalog.interruptions("spot")
    prices = catalog.price_table
    return {
        "offers": [
            {
                "gpu": offer.gpu.name,
                "title": offer.gpu.title,
                "memory_gb": offer.gpu.memory_gb,
                "bf16_tflops": offer.gpu.peak_tflops["bf16"],
                "region": offer.region,
                "regions": list(offer.regions),
                "cheapest_region": offer.cheapest,
                "machines": [
                    {"machine_type": each.name, "gpus": each.gpus, "share": each.share} for each in offer.machines
                ],
                "usd_per_gpu_hour": {model: msgspec.to_builtins(price) for model, price in offer.prices.items()},
                **(
                    {"live": msgspec.to_builtins(now)}
                    if (now := live.get((offer.gpu.name, offer.region or "")))
                    else {}
                ),
            }
            for offer in offers
        ],
        "total": total,
        "spot_interruptions": msgspec.to_builtins(interruptions) if interruptions else None,
        "prices": {"date": prices.date, "digest": prices.digest, "shipped": prices.shipped},
    }
