"""Print how many places have a price, and the check totals of the list prices.

    python -m benchmarks.prices

A place is a zone of Compute Engine (or a region of Vertex AI), a kind of GPU that it has, and a provisioning model that
the service offers for it; reservations count only for machines that have nothing else. Of the machines that a spec
selects there by GPU and count, the one with the least known price decides: *sourced* (a SKU, a published price, or
derived from them), *bounded* (an upper bound or an estimate) or *unpriced*. Exits with 1 if less than 95 % of the
places in zones are sourced or bounded, less than 80 % sourced, a bound is above 1.5 times a sourced price, or a check
total differs.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from launcher import catalog
from launcher.catalog import Catalog, MachineType, Price, Service, tables

SOURCES = Path(__file__).parents[1] / "tools" / "catalog" / "sources"
KINDS = ("sourced", "bounded", "unpriced")
TOTALS = {
    "a3-highgpu-8g": 88.490000,
    "a3-ultragpu-8g": 84.806908,
    "a2-ultragpu-8g": 40.550383,
    "g4-standard-48": 4.49993,
}
"""List prices in us-central1 that Google published, in USD per node and hour (tools/catalog/sources/README.md)."""
N1_STANDARD_4 = 0.189999
"""The same for n1-standard-4 without a GPU: 4 vCPUs and 15 GB."""


class Place(NamedTuple):
    """A machine in a zone or region by a provisioning model, and its price."""

    machine: MachineType
    name: str
    provisioning: str
    price: Price

    @property
    def kind(self) -> int:
        """Return the index of its kind in KINDS."""
        if self.price.usd is None:
            return 1 if self.price.ceiling is not None else 2
        return 1 if self.price.bound or "estimate" in self.price.rule else 0


def places(known: Catalog, service: Service) -> list[Place]:
    """Return each place with the least known price of its machines."""
    worst: dict[tuple[str, str, str], Place] = {}
    for machine in (shape for shape in known.shapes if shape.default):
        names = known.zones(machine) if service == "compute" else known.vertex_regions(machine)
        offered = machine.provisioning(service)
        for model in [model for model in offered if model != "reservation"] or offered:
            for name in names:
                place = Place(machine, name, model, known.price(machine, service, model, name))
                key = (machine.gpu, name, model)
                worst[key] = max(worst.get(key, place), place, key=lambda candidate: candidate.kind)
    return list(worst.values())


def distant_bounds(known: Catalog) -> Iterator[tuple[Place, float]]:
    """Yield the zones' places whose bound is above 1.5 times the dearest sourced price of the same machine and model in
    any region, with that price. Where no region has one, the Flex-start SKU of the machine's GPUs alone counts."""
    gpus = {
        row["component"]: float(row["usd_per_hour"])
        for row in tables.rows("gpu_price_components", str(SOURCES))
        if row["region"] == "us-central1"
    }
    for place in places(known, "compute"):
        machine, model = place.machine, place.provisioning
        regions = (known.price(machine, "compute", model, region) for region in known.regions(machine))
        sourced = [price.usd for price in regions if price.usd and Place(machine, "", model, price).kind == 0]
        dearest = max(sourced, default=gpus.get(f"{machine.gpu}-dws-flex-start", 0.0) * machine.gpus)
        bound = place.price.ceiling if place.price.usd is None else place.price.usd
        if place.kind == 1 and (bound or 0.0) > 1.5 * dearest:
            yield place, dearest


def totals(known: Catalog) -> Iterator[tuple[str, float, float | None]]:
    """Yield each check total: machine type, published price, price of the table."""
    for name, usd in TOTALS.items():
        yield name, usd, known.price(known.machines[name][0], "compute", "standard", "us-central1").usd
    vcpu, ram = (known.component(name, "us-central1") for name in ("n1-vcpu", "n1-ram-gib"))
    yield "n1-standard-4", N1_STANDARD_4, 4 * vcpu.listed + 15 * ram.listed if vcpu and ram else None


def main() -> int:
    """Print both tables; return the exit code."""
    known, failed = catalog.load(), False
    print(f"| service | GPU | places | {' | '.join(KINDS)} | share |\n|---|---|---:|---:|---:|---:|---|")
    for service in ("compute", "vertex"):
        by_gpu: dict[str, Counter[int]] = {}
        for place in places(known, service):
            by_gpu.setdefault(place.machine.gpu, Counter())[place.kind] += 1
        every = sum(by_gpu.values(), Counter[int]())
        for gpu, counts in {**by_gpu, "all": every}.items():
            shares = f"{counts[0] / counts.total():.1%} sourced, {1 - counts[2] / counts.total():.1%} with a bound"
            cells = " | ".join(str(counts[kind]) for kind in range(len(KINDS)))
            print(f"| {service} | {gpu} | {counts.total()} | {cells} | {shares} |")
        if service == "compute":
            failed |= every[2] > 0.05 * every.total() or every[0] < 0.80 * every.total()
    for place, dearest in distant_bounds(known):
        failed = True
        print(f"{place.machine.name} {place.provisioning} {place.name}: the bound is above 1.5 × {dearest:.2f}")
    print("\n| us-central1, list | published | table |\n|---|---:|---:|")
    for name, published, usd in totals(known):
        failed |= usd is None or abs(usd - published) > 1e-6
        print(f"| {name} | {published:.6f} | {usd if usd is None else f'{usd:.6f}'} |")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
