"""The catalog: GPUs, machine types, places, prices, quotas, images and NCCL settings of Google Cloud, as data.

Every figure is in data/*.csv with its source and date; tools/catalog/sources/README.md of the repository says what the
sources are. An empty cell is unknown and stays so. Tables are read when they are first asked for, so a plan pays for
what it uses.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, cached_property

from launcher.catalog import prices, quotas, shapes, tables
from launcher.catalog.model import (
    UNKNOWN,
    AfterLimit,
    CatalogError,
    Component,
    Gpu,
    ImageFamily,
    Interruptions,
    MachineType,
    Nccl,
    Price,
    PriceBound,
    Quota,
    Rate,
    RegionPrices,
    Service,
)

__all__ = [
    "UNKNOWN",
    "AfterLimit",
    "Catalog",
    "CatalogError",
    "Component",
    "Gpu",
    "ImageFamily",
    "Interruptions",
    "MachineType",
    "Nccl",
    "Price",
    "Quota",
    "Rate",
    "Service",
    "load",
]

PLAIN = Nccl({}, None, None, "NCCL's own choice: no settings for this machine are known", "", "")


@cache
def load() -> Catalog:
    """The catalog that travels with launch."""
    return Catalog()


class Catalog:
    """All tables and their look-ups; pure, but for reading its own data files once."""

    def __init__(self) -> None:
        self._priced: dict[tuple[str, str, int, str, str, str], Price] = {}
        self._prices: dict[str, Mapping[str, RegionPrices]] = {}
        self._components: dict[str, Mapping[str, Component]] = {}

    @cached_property
    def gpus(self) -> Mapping[str, Gpu]:
        """GPU name -> GPU."""
        return tables.gpus()

    @cached_property
    def machines(self) -> Mapping[str, tuple[MachineType, ...]]:
        """Machine type -> its shapes: one, or for N1 one for each GPU kind and count."""
        return tables.machines()

    @cached_property
    def rates(self) -> Mapping[str, Rate]:
        """vertex-fee (a share), vertex-boot-pd-ssd (USD a GB and hour), cloud-build-minute (USD)."""
        return tables.rates()

    @cached_property
    def wheels(self) -> Mapping[str, str | None]:
        """PyTorch's CUDA variant -> the least driver branch that runs it; `None` is unknown."""
        return tables.wheels()

    @cached_property
    def transformers_types(self) -> Mapping[str, tuple[str, ...]]:
        """The model types of the image's transformers -> the trainer's tasks that each has a head for."""
        return tables.transformers_types()

    def runs(self, wheel: str, gpu: Gpu) -> bool:
        """Whether a GPU takes PyTorch's CUDA variant: not one that is older than its own, nor one whose driver has
        left the GPU behind."""
        return wheel >= gpu.wheel and int(self.wheels[wheel] or 0) <= int(gpu.max_driver or 9999)

    def interruptions(self, provisioning: str) -> Interruptions | None:
        """How often one node is interrupted; `None` when that is unknown."""
        return self._interruptions.get(provisioning.partition(":")[0])

    def gpu(self, name: str) -> Gpu:
        """The GPU of that name, in capitals or not. Raises CatalogError."""
        if name.lower() not in self.gpus:
            raise shapes.unknown(name, self._stock, "machine.type")
        return self.gpus[name.lower()]

    def find(
        self,
        type: str,  # noqa: A002 -- the spec's own word
        gpus: int | None,
        accelerator: str | None,
        service: Service,
    ) -> MachineType:
        """The machine that `service` has for a GPU name and a count, or for a machine type.

        A GPU's name means its default shape: whole GPUs, the same host for each GPU at every count (L4: the
        g2-standard-12 that -24, -48 and -96 are multiples of; on N1 8 vCPUs a GPU). No count means the smallest.
        N1 types need `accelerator`. Capitals don't matter. Raises CatalogError, which names what exists.
        """
        known = type.lower() if type.lower() in (*self.gpus, *self.machines) else type  # an error shows what was typed
        return shapes.find(self._stock, shapes.MachineQuery(known, gpus, accelerator, service))

    def regions(self, machine: MachineType) -> tuple[str, ...]:
        """Where Compute Engine lists the machine; () is unknown."""
        return self._regions.get(machine.name, ())

    def vertex_regions(self, machine: MachineType) -> tuple[str, ...]:
        """Its regions, less those that Vertex AI doesn't train in; () when it isn't on Vertex AI, or unknown."""
        if not machine.on_vertex:
            return ()
        return tuple(region for region in self.regions(machine) if region in self._vertex_regions)

    @cached_property
    def training_regions(self) -> tuple[str, ...]:
        """The regions in which Vertex AI trains at all, whatever the machine."""
        return tuple(sorted(self._vertex_regions))

    def zones(self, machine: MachineType, region: str | None = None) -> tuple[str, ...]:
        """The zones known to have the machine, in one region or in all; () is unknown."""
        zones = self._zones.get(machine.name, ())
        return zones if region is None else tuple(zone for zone in zones if zone.rpartition("-")[0] == region)

    def price(self, machine: MachineType, service: Service, provisioning: str, place: str) -> Price:
        """What one node costs an hour in a region or zone: prices are the same in all zones of a region."""
        region, model = region_of(place), provisioning.partition(":")[0]
        key = (machine.name, machine.gpu, machine.gpus, service, model, region)
        if key not in self._priced:
            order = prices.Order(machine, service, model, region)
            known, home = (self._region_prices(machine, one) for one in (region, "us-central1"))
            self._priced[key] = prices.price(order, known, home, self._tariff)
        return self._priced[key]

    def component(self, name: str, place: str) -> Component | None:
        """What a unit of local-ssd-gib, n1-vcpu, n1-ram-gib, p4, p100, t4 or v100 costs in a region or zone; `None` is
        unknown."""
        if name not in self._components:
            self._components[name] = tables.components(name)
        return self._components[name].get(region_of(place))

    def after_limit(self, service: Service, provisioning: str) -> AfterLimit:
        """Return what may be billed after a time limit, until the machine is off."""
        return self._after_limit[service, provisioning.partition(":")[0]]

    def disk_price(self, kind: str, region: str) -> Rate | None:
        """What a GB of a disk type costs a month, whether its VM runs or not; `None` when that is unknown."""
        return self._disk_prices.get((kind, region))

    def disk_price_at_most(self, kind: str, region: str) -> float | None:
        """Return USD per GB and month, or an upper bound: hyperdisk-balanced costs less than pd-ssd."""
        bounded = kind in self._price_bounds
        found = self.disk_price(kind, region) or (self.disk_price("pd-ssd", region) if bounded else None)
        return None if found is None else found.usd

    def warnings(self, machine: MachineType, service: Service, provisioning: str) -> tuple[str, ...]:
        """What someone should know before taking this machine there, in this way."""
        gpu, doubts = self.gpus[machine.gpu], machine.vertex_warn if service == "vertex" else {}
        on_vm = gpu.vm_notes if service == "compute" else ()
        return (*gpu.notes, *on_vm, *machine.notes, *filter(None, [doubts.get(provisioning.partition(":")[0])]))

    def nccl(self, machine: MachineType, service: Service) -> Nccl:
        """What NCCL needs on this machine when there are several nodes."""
        return self._nccl.get((machine.name, service), PLAIN)

    def quota(self, machine: MachineType, service: Service, provisioning: str) -> Quota | None:
        """The GPU quota of one node; `None` when its name is unknown."""
        return quotas.quota(machine, self.gpus[machine.gpu], service, provisioning)

    @cached_property
    def image_families(self) -> tuple[ImageFamily, ...]:
        """The Deep Learning VM image families, best first."""
        return tables.images()

    def image_family(self, machine: MachineType) -> ImageFamily | None:
        """The family to boot on this machine: built for its CPU, with a driver that knows its GPU if there is one.

        `None` when the catalog knows no family for its CPU.
        """
        gpu = self.gpus[machine.gpu]
        fitting = (image for image in self.image_families if image.default and image.arch == machine.arch)
        return max(fitting, key=lambda image: _drives(image.driver, gpu), default=None)

    @cached_property
    def _regions(self) -> Mapping[str, tuple[str, ...]]:
        return tables.places("regions")

    @cached_property
    def _zones(self) -> Mapping[str, tuple[str, ...]]:
        return tables.places("zones")

    @cached_property
    def _vertex_regions(self) -> frozenset[str]:
        return tables.vertex_regions()

    def _region_prices(self, machine: MachineType, region: str) -> RegionPrices | None:
        if machine.family == "n1":
            names = ("n1-vcpu", "n1-ram-gib", machine.gpu)
            return prices.of_components(machine, region, *(self.component(name, region) for name in names))
        if machine.name not in self._prices:
            self._prices[machine.name] = tables.prices(machine.name)
        return self._prices[machine.name].get(region)

    @cached_property
    def _tariff(self) -> prices.Tariff:
        return prices.Tariff(tables.price_rules(), self._price_bounds, self.rates["vertex-fee"])

    @cached_property
    def _after_limit(self) -> Mapping[tuple[str, str], AfterLimit]:
        return tables.after_limit()

    @cached_property
    def _price_bounds(self) -> Mapping[str, PriceBound]:
        return tables.price_bounds()

    @cached_property
    def _disk_prices(self) -> Mapping[tuple[str, str], Rate]:
        return tables.disk_prices()

    @cached_property
    def _interruptions(self) -> Mapping[str, Interruptions]:
        return tables.interruptions()

    @cached_property
    def _stock(self) -> shapes.Stock:
        return shapes.Stock(self.gpus, self.machines)

    @cached_property
    def _nccl(self) -> Mapping[tuple[str, str], Nccl]:
        return tables.nccl()


def region_of(place: str) -> str:
    """Return the region of a zone (us-central1-a), or the region itself."""
    return place.rpartition("-")[0] if place.count("-") > 1 else place


def _drives(driver: str, gpu: Gpu) -> bool:
    """Whether a driver branch knows the GPU and its CUDA wheel."""
    least, most = int(gpu.min_driver or 0), int(gpu.max_driver or 9999)
    return least <= int(driver) <= most
