"""From Compute Engine's prices in a region to what one node costs on either service.

Local SSDs that come with a machine are in the figures. Vertex AI takes 15 % of the list price of GPUs, vCPUs and RAM
on top, whatever the provisioning model (real bills of 2025-08), so without a list price its price is unknown. A
reservation costs the list price.

Each price has two upper bounds, which a cap needs: Spot changes up to once a day, and new Flex-start prices are
announced. Where the list price is unknown, they rest on us-central1's and the highest regional factor.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, structs

from launcher.catalog.model import (
    Component,
    MachineType,
    Price,
    PriceBound,
    PriceRule,
    Rate,
    RegionPrices,
    Service,
)

MODELS = {"standard": "list", "reservation": "list", "flex-start": "Flex-start", "spot": "Spot"}
"""Provisioning model -> which of a region's prices it pays."""


class Order(Struct, frozen=True, gc=False):
    """What is to be priced."""

    machine: MachineType
    service: Service
    model: str
    region: str


class Tariff(Struct, frozen=True, gc=False):
    """What applies everywhere: the rules of figures, their bounds, and Vertex AI's share of the list price."""

    rules: Mapping[str, PriceRule]
    bounds: Mapping[str, PriceBound]
    vertex_fee: Rate


def price(order: Order, known: RegionPrices | None, home: RegionPrices | None, tariff: Tariff) -> Price:
    """Return the price of one node and hour with its upper bounds; `home` are us-central1's prices of the machine."""
    found, most = _expected(order, known, tariff), _list_at_most(known, home, tariff)
    if most is None:
        return found
    listed, fee_base, text = most
    usd = (known and _base(known, order.model)[0]) or 0.0
    ceiling, hard = (tariff.bounds[key] for key in _bound_keys(order, tariff))
    fee = tariff.vertex_fee.usd * (listed if order.model == "standard" else fee_base)
    on_top = fee if order.service == "vertex" else 0.0
    return structs.replace(
        found,
        ceiling=max(usd, ceiling.factor * listed) + on_top,
        ceiling_rule=ceiling.text.replace("list price", text)
        + (f" plus {_share(tariff.vertex_fee)} for Vertex AI" if on_top else ""),
        hard_bound=max(usd, hard.factor * listed) + on_top,
    )


def _list_at_most(
    known: RegionPrices | None, home: RegionPrices | None, tariff: Tariff
) -> tuple[float, float, str] | None:
    """Return the list price or its upper bound, the part that Vertex AI's fee applies to, and a name; None if no rule
    covers the machine."""
    if known and known.listed is not None and tariff.rules[known.list_rule].kind != "reported":
        return known.listed, known.listed - known.local_ssds, "list price"
    if home is None or home.listed is None:
        return None
    most = tariff.bounds["unknown-list"].factor * home.listed
    return most, most, tariff.bounds["unknown-list"].text


def _bound_keys(order: Order, tariff: Tariff) -> tuple[str, str]:
    """Return the rules of the expected ceiling and of the hard bound."""
    if order.model == "spot":
        return "spot-ceiling", "at-list"
    older = order.model == "flex-start" and order.machine.gpu in tariff.bounds["flex-older"].gpus
    return ("flex-older", "flex-older") if older else ("at-list", "at-list")


def _expected(order: Order, known: RegionPrices | None, tariff: Tariff) -> Price:
    """Compute Engine's price, and Vertex AI's made of it."""
    if known is None:
        return _unknown(order, f"no price of {order.machine.name} in {order.region} is known")
    usd, key = _base(known, order.model)
    if usd is None:
        return _unknown(order, f"no {MODELS[order.model]} price of {order.machine.name} in {order.region} is known")
    rule = tariff.rules[key]
    bare = Price(
        usd=usd,
        approx=rule.kind != "exact" or order.model == "reservation",
        bound=rule.kind == "bound",
        rule=rule.text,
        source=known.source,
        date=known.date,
        excludes=_excludes(order),
    )
    return _on_vertex(bare, order, known, tariff.vertex_fee) if order.service == "vertex" else bare


def of_components(
    machine: MachineType, region: str, vcpu: Component | None, ram: Component | None, gpu: Component | None
) -> RegionPrices | None:
    """Return the prices of an N1 machine with its GPUs; None if a component's price is unknown."""
    if vcpu is None or ram is None or gpu is None or machine.memory_gb is None:
        return None
    parts = ((machine.vcpus, vcpu), (machine.memory_gb, ram), (machine.gpus, gpu))
    spot = [count * part.spot for count, part in parts if part.spot is not None]
    return RegionPrices(
        region=region,
        listed=round(sum(count * part.listed for count, part in parts), 6),
        list_rule="n1-list",
        flex_start=None,
        flex_rule="",
        spot=round(sum(spot), 6) if len(spot) == len(parts) else None,
        spot_rule="n1-spot",
        local_ssds=0.0,
        source=_sources(*(part.source for _, part in parts)),
        date=_sources(*(part.date for _, part in parts)),
    )


def _base(known: RegionPrices, model: str) -> tuple[float | None, str]:
    """Return the region's figure for a provisioning model, and its rule's key."""
    if model == "flex-start":
        return known.flex_start, known.flex_rule
    if model == "spot":
        return known.spot, known.spot_rule
    return known.listed, known.list_rule


def _on_vertex(compute: Price, order: Order, known: RegionPrices, fee: Rate) -> Price:
    """Vertex AI's price for what Compute Engine would charge `compute` for."""
    share = _share(fee)
    if known.listed is None or compute.usd is None:
        return _unknown(order, f"Vertex AI adds {share} of the list price, and none is known in {known.region}")
    # On-demand the local SSDs are in it too: 2025's bills show none, so this is the upper side.
    on_top = fee.usd * (compute.usd if order.model == "standard" else known.listed - known.local_ssds)
    return structs.replace(
        compute,
        usd=compute.usd + on_top,
        approx=True,
        rule=f"{compute.rule}, plus {share} of the list price (Vertex AI)",
        source=_sources(compute.source, fee.source),
    )


def _share(fee: Rate) -> str:
    return f"{fee.usd * 100:g} %"


def _excludes(order: Order) -> tuple[str, ...]:
    """What the figure leaves out."""
    machine = order.machine
    optional_disks = order.service == "compute" and not machine.local_ssd_auto and machine.local_ssd_max_gib != 0
    return ("boot disk", "local SSD", "network traffic") if optional_disks else ("boot disk", "network traffic")


def _sources(*texts: str) -> str:
    """Each source once."""
    return "; ".join(dict.fromkeys(part for text in texts for part in text.split("; ")))


def _unknown(order: Order, why: str) -> Price:
    return Price(usd=None, approx=True, rule=why, source="", date="", excludes=_excludes(order))
