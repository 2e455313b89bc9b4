"""The GPUs that Compute Engine offers, with their prices per GPU and hour. Pure.

An offer is a kind of GPU, either in all regions that have it or in one region. Its prices are ranges over its machine
types and regions. N1 machines are limited to those that a spec selects by GPU name: 8 vCPUs per GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from typing import Final, Literal

from msgspec import Struct

from launcher.catalog import Catalog, Gpu, MachineType

MODELS: Final = ("standard", "spot", "flex-start")
Sort = Literal["price", "memory", "flops"]


class PriceRange(Struct, frozen=True):
    """USD per GPU and hour, lowest and highest; None: no price is known and no rule bounds it. `bound`: the true
    prices are at most these; `approx`: some are derived by a rule."""

    low: float | None
    high: float | None
    bound: bool = False
    approx: bool = False


UNKNOWN: Final = PriceRange(None, None)


class Offer(Struct, frozen=True, kw_only=True):
    """A kind of GPU with its machine types, its regions, and its price by provisioning model (absent: not offered)."""

    gpu: Gpu
    machines: tuple[MachineType, ...]
    regions: tuple[str, ...]
    region: str | None
    """The region of this offer; None: all of `regions`."""
    prices: dict[str, PriceRange]
    cheapest: dict[str, str] = {}
    """Provisioning model -> the region with the lowest known price, for an offer in several regions."""

    @property
    def lowest(self) -> float:
        """Return the lowest price of any provisioning model; infinite if none is known."""
        return min((price.low for price in self.prices.values() if price.low is not None), default=math.inf)


class OfferQuery(Struct, frozen=True, kw_only=True):
    """What to list. Empty and None: no restriction.

    `type`: a GPU or a machine type; `regions`: an offer for each of them, or for every region if it is ("any",);
    `models`: the provisioning models to show; `memory_gb`: at least that much memory per GPU; `max_usd`: at most that
    much per GPU and hour.
    """

    type: str | None = None
    regions: tuple[str, ...] = ()
    models: tuple[str, ...] = MODELS
    memory_gb: float | None = None
    max_usd: float | None = None
    sort: Sort = "price"


def offers(catalog: Catalog, query: OfferQuery) -> tuple[list[Offer], int]:
    """Return the offers that match a query, in its order, and how many there are without its restrictions.

    Raises CatalogError: the GPU or machine type does not exist.
    """
    shapes = [shape for shape in catalog.shapes if shape.family != "n1" or shape.default]
    wanted = [shape for shape in shapes if matches(catalog, shape, query)]
    if query.type and not wanted and query.type.lower() not in (*catalog.gpus, *catalog.machines):
        catalog.gpu(query.type)  # raises
    reserved = query.models == MODELS  # also show GPUs that are only offered by reservation
    matching = [offer for offer in by_gpu(catalog, wanted, query) if offer.prices or reserved]
    if query.max_usd is not None:
        matching = [offer for offer in matching if offer.lowest <= query.max_usd]
    every = OfferQuery(regions=query.regions and ("any",))
    return sorted(matching, key=sort_key(query.sort)), sum(1 for _ in places(catalog, shapes, every))


def matches(catalog: Catalog, shape: MachineType, query: OfferQuery) -> bool:
    """Return whether a machine has the queried GPU, or is the queried machine type, and enough memory per GPU."""
    named = query.type is None or query.type.lower() in (shape.gpu, shape.name)
    memory = catalog.gpus[shape.gpu].memory_gb * min(Fraction(1), share(shape))
    return named and (query.memory_gb is None or memory >= query.memory_gb)


def share(shape: MachineType) -> Fraction:
    """Return how much of a GPU a fractional type has (1/8); 1 for the others."""
    return Fraction(shape.share or 1)


def places(
    catalog: Catalog, shapes: Iterable[MachineType], query: OfferQuery
) -> Iterator[tuple[str, str | None, list[MachineType]]]:
    """Yield each GPU, with a region if the query is for regions, and its machines there."""
    groups: dict[tuple[str, str | None], list[MachineType]] = {}
    for shape in shapes:
        regions = catalog.regions(shape)
        wanted = regions if "any" in query.regions else [region for region in query.regions if region in regions]
        for region in wanted if query.regions else [None]:
            groups.setdefault((shape.gpu, region), []).append(shape)
    for (gpu, region), group in groups.items():
        yield gpu, region, group


def by_gpu(catalog: Catalog, shapes: Iterable[MachineType], query: OfferQuery) -> Iterator[Offer]:
    for gpu, region, group in places(catalog, shapes, query):
        everywhere = sorted({region for shape in group for region in catalog.regions(shape)})
        cheapest: dict[str, str] = {}
        for model in query.models if region is None else ():
            prices = [(price_range(catalog, group, model, place), place) for place in everywhere]
            if known := [(price.low, place) for price, place in prices if price.low is not None and not price.bound]:
                cheapest[model] = min(known)[1]
        yield Offer(
            gpu=catalog.gpus[gpu],
            machines=tuple(group),
            regions=tuple(everywhere),
            region=region,
            cheapest=cheapest,
            prices={
                model: price_range(catalog, group, model, region)
                for model in query.models
                if any(model in shape.compute_provisioning for shape in group)
            },
        )


def price_range(catalog: Catalog, shapes: Iterable[MachineType], model: str, region: str | None) -> PriceRange:
    """Return the price per GPU and hour of these machines, in one region or in all of their regions.

    If no price is known, the range is of the upper bounds.
    """
    prices = [
        (catalog.price(shape, "compute", model, place), gpus)
        for shape, gpus in (
            (shape, float(shape.gpus * share(shape))) for shape in shapes if model in shape.compute_provisioning
        )
        for place in ([region] if region else catalog.regions(shape))
    ]
    known = [(price.usd / gpus, price) for price, gpus in prices if price.usd is not None]
    if known:
        usd = [each for each, _ in known]
        bound, approx = any(price.bound for _, price in known), any(price.approx for _, price in known)
        return PriceRange(min(usd), max(usd), bound, approx)
    bounds = [price.ceiling / gpus for price, gpus in prices if price.ceiling is not None]
    return PriceRange(min(bounds), max(bounds), bound=True) if bounds else UNKNOWN


def sort_key(sort: Sort) -> Callable[[Offer], tuple[float, float, str, str]]:
    """Return the key of an order: cheapest first, or most memory or FLOP/s first; unknown figures last."""

    def key(offer: Offer) -> tuple[float, float, str, str]:
        first = {
            "price": offer.lowest,
            "memory": -offer.gpu.memory_gb,
            "flops": -(offer.gpu.peak_tflops["bf16"] or 0.0),
        }[sort]
        return first, offer.lowest, offer.gpu.name, offer.region or ""

    return key
