"""From Compute Engine's prices in each zone to what one node costs on either service.

The rules (Vertex AI's from real bills of 2025-08): local SSDs that come with a machine are added at their on-demand
rate, which is an upper bound for Spot. Vertex AI takes 15 % of the list price of GPUs, vCPUs and RAM on top, whatever
the provisioning model; so without a list price its price is unknown. A reservation costs the list price.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct, structs

from launcher.catalog.model import MachineType, Price, Rate, Service, ZonePrices

MODELS = {"standard": "list", "reservation": "list", "flex-start": "Flex-start", "spot": "Spot"}
"""Provisioning model -> which of a zone's prices it pays."""


class Order(Struct, frozen=True, gc=False):
    """What is to be priced."""

    machine: MachineType
    service: Service
    model: str


class Tariff(Struct, frozen=True, gc=False):
    """What holds everywhere: the rules (key -> text, approximate) and the rates for each unit."""

    rules: Mapping[str, tuple[str, bool]]
    rates: Mapping[str, Rate]


def price(order: Order, place: str, known: Iterable[ZonePrices], tariff: Tariff) -> Price:
    """The price in `place`: a zone, or a region, which takes its dearest known zone."""
    here = [zone for zone in known if place in (zone.zone, zone.zone.rpartition("-")[0])]
    if not here:
        return _unknown(f"no price of {order.machine.name} in {place} is known")
    prices = [_in_zone(order, zone, tariff) for zone in here]
    best = max(prices, key=lambda found: -1.0 if found.usd is None else found.usd)
    if len({found.usd for found in prices}) == 1:
        return best
    return structs.replace(best, rule=f"{best.rule}; of {place}'s zones the dearest, {best.zone}")


def _in_zone(order: Order, zone: ZonePrices, tariff: Tariff) -> Price:
    """Compute Engine's price, and Vertex AI's made of it."""
    usd, key = _base(zone, order.model)
    if usd is None:
        return _unknown(f"no {MODELS[order.model]} price of {order.machine.name} in {zone.zone} is known")
    rule, approx = tariff.rules[key]
    bare = Price(
        usd=usd,
        approx=approx or order.model == "reservation",
        rule=rule,
        source=zone.source,
        date=zone.date,
        excludes=_excludes(order),
        zone=zone.zone,
    )
    compute = _with_disks(bare, order, tariff.rates["local-ssd"])
    return _on_vertex(compute, order.model, zone, tariff.rates["vertex-fee"]) if order.service == "vertex" else compute


def _base(zone: ZonePrices, model: str) -> tuple[float | None, str]:
    """The zone's figure for a provisioning model, and its rule's key."""
    if model == "flex-start":
        return zone.flex_start, zone.flex_rule
    if model == "spot":
        return zone.spot, zone.spot_rule
    return zone.listed, zone.list_rule


def _with_disks(bare: Price, order: Order, rate: Rate) -> Price:
    """The price with the local SSDs that come with the machine."""
    if not order.machine.local_ssd_auto or bare.usd is None:
        return bare
    spot = order.model == "spot"
    return structs.replace(
        bare,
        usd=bare.usd + order.machine.local_ssd_gib * rate.usd,
        approx=bare.approx or spot,
        rule=f"{bare.rule}, plus local SSDs" + (" at their on-demand rate (an upper bound)" if spot else ""),
        source=_sources(bare.source, rate.source),
    )


def _on_vertex(compute: Price, model: str, zone: ZonePrices, fee: Rate) -> Price:
    """Vertex AI's price for what Compute Engine would charge `compute` for."""
    share = f"{fee.usd * 100:g} %"
    if zone.listed is None or compute.usd is None:
        return _unknown(f"Vertex AI adds {share} of the list price, and none is known in {zone.zone}")
    # On-demand the local SSDs are in it too: 2025's bills show none, so this is the upper side.
    on_top = fee.usd * (compute.usd if model == "standard" else zone.listed)
    return structs.replace(
        compute,
        usd=compute.usd + on_top,
        approx=True,
        rule=f"{compute.rule}, plus {share} of the list price (Vertex AI)",
        source=_sources(compute.source, fee.source),
    )


def _excludes(order: Order) -> tuple[str, ...]:
    """What the figure leaves out."""
    machine = order.machine
    optional_disks = order.service == "compute" and not machine.local_ssd_auto and machine.local_ssd_max_gib != 0
    return ("boot disk", "local SSD", "network traffic") if optional_disks else ("boot disk", "network traffic")


def _sources(*texts: str) -> str:
    """Each source once."""
    return "; ".join(dict.fromkeys(part for text in texts for part in text.split("; ")))


def _unknown(why: str) -> Price:
    return Price(usd=None, approx=True, rule=why, source="", date="", excludes=())
