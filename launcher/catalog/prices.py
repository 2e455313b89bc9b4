"""Compute the price of a node on either service from Compute Engine's prices in a region.

The figures include a machine's own local SSDs. Vertex AI adds 15 % of the list price of GPUs, vCPUs and RAM, whatever
the provisioning model (real bills of 2025-08), so without a list price its price is unknown. A reservation costs the
list price.

Each price has two upper bounds, which limits.usd needs: Spot prices change up to once a day, and new Flex-start prices
are announced. If the list price is unknown, the bounds are us-central1's times the highest regional factor.
"""

from __future__ import annotations

from msgspec import Struct, structs

from launcher.catalog import tables
from launcher.catalog.model import (
    Component,
    MachineType,
    Price,
    RegionPrices,
    Service,
)

MODELS = {"standard": "list", "reservation": "list", "flex-start": "Flex-start", "spot": "Spot"}
"""Provisioning model -> the kind of price that it costs."""


class PriceQuery(Struct, frozen=True, gc=False):
    """The machine to price, with its service, provisioning model and region."""

    machine: MachineType
    service: Service
    model: str
    region: str


def price(query: PriceQuery, known: RegionPrices | None, home: RegionPrices | None) -> Price:
    """Return the price of one node and hour with its upper bounds; `home` are us-central1's prices of the machine."""
    expected, most = _expected(query, known), _list_at_most(known, home)
    if most is None:
        return expected
    listed, fee_base, text = most
    usd = (known and _base(known, query.model)[0]) or 0.0
    bounds = tables.price_bounds()
    older = query.model == "flex-start" and query.machine.gpu in bounds["flex-older"].gpus
    hard = bounds["flex-older" if older else "at-list"]
    ceiling = bounds["spot-ceiling"] if query.model == "spot" else hard
    fee = tables.rates()["vertex-fee"] * (listed if query.model == "standard" else fee_base)
    on_top = fee if query.service == "vertex" else 0.0
    return structs.replace(
        expected,
        ceiling=max(usd, ceiling.factor * listed) + on_top,
        ceiling_rule=ceiling.text.replace("list price", text)
        + (f" plus {_share_of_list()} for Vertex AI" if on_top else ""),
        hard_bound=max(usd, hard.factor * listed) + on_top,
    )


def _list_at_most(known: RegionPrices | None, home: RegionPrices | None) -> tuple[float, float, str] | None:
    """Return the list price or its upper bound, the part that Vertex AI's fee applies to, and a name; None if no rule
    covers the machine."""
    if known and known.listed is not None and tables.price_rules()[known.list_rule].kind != "estimate":
        return known.listed, known.listed - known.local_ssds, "list price"
    if home is None or home.listed is None:
        return None
    bound = tables.price_bounds()["unknown-list"]
    most = bound.factor * home.listed
    return most, most, bound.text


def _expected(query: PriceQuery, known: RegionPrices | None) -> Price:
    """Return the expected price, without upper bounds."""
    if known is None:
        return _unknown_price(query, f"the price of {query.machine.name} in {query.region} is unknown")
    usd, key = _base(known, query.model)
    if usd is None:
        return _unknown_price(
            query, f"the {MODELS[query.model]} price of {query.machine.name} in {query.region} is unknown"
        )
    rule = tables.price_rules()[key]
    bare = Price(
        usd=usd,
        approx=rule.kind != "exact" or query.model == "reservation",
        bound=rule.kind == "bound",
        rule=rule.text,
        excludes=_excludes(query),
    )
    return _on_vertex(bare, query, known) if query.service == "vertex" else bare


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
    )


def _base(known: RegionPrices, model: str) -> tuple[float | None, str]:
    """Return the region's figure for a provisioning model, and its rule's key."""
    if model == "flex-start":
        return known.flex_start, known.flex_rule
    if model == "spot":
        return known.spot, known.spot_rule
    return known.listed, known.list_rule


def _on_vertex(compute: Price, query: PriceQuery, known: RegionPrices) -> Price:
    """Return Vertex AI's price, given Compute Engine's."""
    fee, share = tables.rates()["vertex-fee"], _share_of_list()
    if known.listed is None or compute.usd is None:
        return _unknown_price(query, f"Vertex AI adds {share} of the list price, which is unknown in {known.region}")
    # For standard the fee includes the local SSDs: the bills of 2025 do not cover that case, so this is an upper bound.
    on_top = fee * (compute.usd if query.model == "standard" else known.listed - known.local_ssds)
    estimated = "estimated " if tables.price_rules()[known.list_rule].kind == "estimate" else ""
    return structs.replace(
        compute,
        usd=compute.usd + on_top,
        approx=True,
        rule=f"{compute.rule}, plus {share} of the {estimated}list price (Vertex AI)",
    )


def _share_of_list() -> str:
    return f"{tables.rates()['vertex-fee'] * 100:g} %"


def _excludes(query: PriceQuery) -> tuple[str, ...]:
    """Return the billed items that the price excludes."""
    machine = query.machine
    optional_disks = query.service == "compute" and not machine.local_ssd_auto and machine.local_ssd_max_gib != 0
    return ("boot disk", "local SSD", "network traffic") if optional_disks else ("boot disk", "network traffic")


def _unknown_price(query: PriceQuery, why: str) -> Price:
    return Price(usd=None, approx=True, rule=why, excludes=_excludes(query))
