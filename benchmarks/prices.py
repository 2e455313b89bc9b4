"""Print how complete the price tables are, and the check totals of the list prices.

    python -m benchmarks.prices

A triple is a machine, a region that lists it, and a provisioning model that the service offers for it. It counts as
priced if a plan has a price or an upper bound for it. N1 machines are counted in the regions that have the GPU. Exits
with 1 if more than 5 % of the triples have neither, or if a check total differs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import NamedTuple

from launcher import catalog
from launcher.catalog import Catalog, MachineType, Price, Service

SERVICES: tuple[Service, ...] = ("compute", "vertex")
MOST_UNKNOWN = 0.05
TOTALS = {
    "a3-highgpu-8g": 88.490000,
    "a3-ultragpu-8g": 84.806908,
    "a2-ultragpu-8g": 40.550383,
    "g4-standard-48": 4.49993,
}
"""List prices in us-central1 that Google published, in USD per node and hour (tools/catalog/sources/README.md)."""
N1_STANDARD_4 = 0.189999
"""The same for n1-standard-4 without a GPU: 4 vCPUs and 15 GB."""


class Triple(NamedTuple):
    """A machine in a region by a provisioning model, and its price."""

    machine: MachineType
    region: str
    provisioning: str
    price: Price

    @property
    def unknown(self) -> bool:
        """Return whether a plan has neither a price nor an upper bound."""
        return self.price.usd is None and self.price.ceiling is None


def triples(known: Catalog, service: Service) -> Iterator[Triple]:
    """Yield all triples of a service."""
    for shape in (shape for shapes in known.machines.values() for shape in shapes):
        regions = known.regions_with_gpu(shape)
        for region in regions if service == "compute" else set(regions) & set(known.training_regions):
            for model in shape.provisioning(service):
                yield Triple(shape, region, model, known.price(shape, service, model, region))


def totals(known: Catalog) -> Iterator[tuple[str, float, float | None]]:
    """Yield each check total: machine type, published price, price of the table."""
    for name, usd in TOTALS.items():
        yield name, usd, known.price(known.machines[name][0], "compute", "standard", "us-central1").usd
    vcpu, ram = (known.component(name, "us-central1") for name in ("n1-vcpu", "n1-ram-gib"))
    yield "n1-standard-4", N1_STANDARD_4, 4 * vcpu.listed + 15 * ram.listed if vcpu and ram else None


def main() -> int:
    """Print both tables; return the exit code."""
    known, failed = catalog.load(), False
    print("| service | triples | without a price | without price or bound | share |\n|---|---:|---:|---:|---:|")
    for service in SERVICES:
        every = list(triples(known, service))
        unknown = sum(one.unknown for one in every)
        failed |= unknown > MOST_UNKNOWN * len(every)
        unpriced = sum(one.price.usd is None for one in every)
        print(f"| {service} | {len(every)} | {unpriced} | {unknown} | {unknown / len(every):.2%} |")
    print("\n| us-central1, list | published | table |\n|---|---:|---:|")
    for name, published, usd in totals(known):
        failed |= usd is None or abs(usd - published) > 1e-6
        print(f"| {name} | {published:.6f} | {usd if usd is None else f'{usd:.6f}'} |")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
