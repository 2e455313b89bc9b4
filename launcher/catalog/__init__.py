"""The catalog of Google Cloud: GPUs, machine types, regions, zones, prices, quotas, images and NCCL settings, as data.

Every figure is in data/*.csv with its source and date; tools/catalog/sources/README.md lists the sources. An empty cell
means unknown. Tables are loaded on first use, so that a plan loads only those that it needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache, cached_property

from launcher.catalog import machine_choice, prices, quotas, tables
from launcher.catalog.model import (
    UNKNOWN,
    AfterLimit,
    BaseImage,
    CatalogError,
    Component,
    Gpu,
    ImageFamily,
    Interruptions,
    MachineType,
    Nccl,
    Price,
    PriceTable,
    Quota,
    RegionPrices,
    Service,
    Throughput,
    TorchRelease,
)

__all__ = [
    "UNKNOWN",
    "AfterLimit",
    "BaseImage",
    "Catalog",
    "CatalogError",
    "Component",
    "Gpu",
    "ImageFamily",
    "Interruptions",
    "MachineType",
    "Nccl",
    "Price",
    "PriceTable",
    "Quota",
    "Service",
    "TorchRelease",
    "load",
]

PLAIN = Nccl({}, None, None, "NCCL's own choice: no settings for this machine are known")


@cache
def load(prices: PriceTable | None = None) -> Catalog:
    """Return the catalog that ships with launch, with its own prices or those of another table."""
    return Catalog(prices)


class Catalog:
    """All tables and their look-ups. Pure, except that it reads its own data files once."""

    def __init__(self, prices: PriceTable | None = None) -> None:
        """`prices`: another price table than the shipped one."""
        self._other_prices = prices
        self._price_folder = prices.folder if prices else tables.DATA
        self._priced: dict[tuple[str, str, int, str, str, str], Price] = {}

    gpus = cached_property(lambda _: tables.gpus())
    """GPU name -> GPU."""

    machines = cached_property(lambda _: tables.machines())
    """Machine type -> its shapes: one, or for N1 one per GPU kind and count."""

    @property
    def shapes(self) -> Iterator[MachineType]:
        return tables.shapes()

    @cached_property
    def price_table(self) -> PriceTable:
        return self._other_prices or tables.price_table()

    rates = cached_property(lambda _: tables.rates())
    """vertex-fee (a share), vertex-boot-pd-ssd (USD a GB and hour), cloud-build-minute (USD)."""

    wheels = cached_property(lambda _: tables.wheels())
    """PyTorch's CUDA variant -> the oldest driver branch that supports it; `None`: unknown."""

    torch_releases = cached_property(lambda _: tables.torch_releases())
    """The releases of PyTorch, oldest first."""

    def base_image(self, reference: str) -> BaseImage | None:
        """Return what is known of a public base image; `None` if nothing is."""
        name = reference.partition("@")[0]
        host, slash, _ = name.partition("/")
        if not slash or not ("." in host or ":" in host or host == "localhost"):  # as Docker reads short names
            name = f"docker.io/{name}" if slash else f"docker.io/library/{name}"
        known = (base for base in tables.base_images() if name.startswith(base.name))
        return max(known, key=lambda base: len(base.name), default=None)

    transformers_types = cached_property(lambda _: tables.transformers_types())
    """Model type of the image's transformers -> the trainer's tasks that it has a head for."""

    def runs(self, wheel: str, gpu: Gpu) -> bool:
        """Return whether a GPU supports PyTorch's CUDA variant: not older than the GPU's default, and with a driver
        that still supports the GPU."""
        return wheel >= gpu.wheel and int(self.wheels[wheel] or 0) <= int(gpu.max_driver or 9999)

    def interruptions(self, provisioning: str) -> Interruptions | None:
        """Return how often a node is interrupted; `None` if unknown."""
        return tables.interruptions().get(provisioning.partition(":")[0])

    def throughput(self, model: str, gpu: str) -> Throughput | None:
        """Return the measured speed of a published model on a GPU; `None` if unknown."""
        return tables.throughput().get((model, gpu))

    def gpu(self, name: str) -> Gpu:
        """Return a GPU by its name, ignoring case. Raises CatalogError."""
        if name.lower() not in self.gpus:
            raise machine_choice.unknown(name, "machine.type")
        return self.gpus[name.lower()]

    def find(
        self,
        type: str,  # noqa: A002 -- the name of the spec's setting
        gpus: int | None,
        accelerator: str | None,
        service: Service,
    ) -> MachineType:
        """Return the machine that `service` offers for a GPU name and a count, or for a machine type.

        A GPU name selects its default shapes: whole GPUs, with the same share of the host per GPU at every count (L4:
        g2-standard-12, whose multiples are -24, -48 and -96; N1: 8 vCPUs per GPU). Without a count, the smallest. N1
        types need `accelerator`. Case is ignored. Raises CatalogError, which lists the alternatives.
        """
        known = type.lower() if type.lower() in (*self.gpus, *self.machines) else type  # errors show the user's text
        return machine_choice.find(machine_choice.MachineQuery(known, gpus, accelerator, service))

    def regions(self, machine: MachineType) -> tuple[str, ...]:
        """Return the regions where Compute Engine has the machine, those with uncertain zones only last."""
        return tuple(dict.fromkeys(zone.region for zone in tables.zones(machine.zones)))

    @cached_property
    def n1_regions(self) -> frozenset[str]:
        """The regions that have N1 machines."""
        return frozenset(zone.region for zone in tables.zones("n1"))

    def vertex_regions(self, machine: MachineType) -> tuple[str, ...]:
        """Return the regions where Vertex AI trains on the machine's GPU; () if it does not offer the machine."""
        if not machine.on_vertex:
            return ()
        listed = set(self.training_regions).intersection(self.regions(machine))
        return tuple(region for region in self._vertex_gpus.get(machine.gpu, ()) if region in listed)

    @cached_property
    def training_regions(self) -> tuple[str, ...]:
        """The regions with Vertex AI training, for any machine."""
        return tuple(sorted(row["region"] for row in tables.rows("vertex_regions")))

    @cached_property
    def gpu_regions(self) -> tuple[str, ...]:
        """The regions in which Vertex AI trains on a machine of the catalog: launch submits jobs to these alone."""
        return tuple(sorted({region for shape in self.shapes for region in self.vertex_regions(shape)}))

    def zones(self, machine: MachineType, region: str | None = None) -> tuple[str, ...]:
        """Return the zones that have the machine, in one region or in all, uncertain ones last; () if unknown."""
        zones = tables.zones(machine.zones)
        return tuple(zone.name for zone in zones if zone.name and region in (None, zone.region))

    def doubt(self, machine: MachineType, place: str) -> str:
        """Return why it is uncertain that a zone has the machine; empty if it is certain, or nothing is known."""
        return next((zone.doubt for zone in tables.zones(machine.zones) if place == zone.name), "")

    def price(self, machine: MachineType, service: Service, provisioning: str, place: str) -> Price:
        """Return the price of a node and hour in a region or zone; prices are equal in all zones of a region."""
        region, model = region_of(place), provisioning.partition(":")[0]
        key = (machine.name, machine.gpu, machine.gpus, service, model, region)
        if key not in self._priced:
            query = prices.PriceQuery(machine, service, model, region)
            known, home = (self._region_prices(machine, region_name) for region_name in (region, "us-central1"))
            self._priced[key] = prices.price(query, known, home)
        return self._priced[key]

    def component(self, name: str, place: str) -> Component | None:
        """Return the price of a unit of local-ssd-gib, n1-vcpu, n1-ram-gib, p4, t4 or v100 in a region or zone;
        `None` if unknown."""
        return tables.components(name, self._price_folder).get(region_of(place))

    def after_limit(self, service: Service, provisioning: str) -> AfterLimit:
        """Return the seconds that may be billed after a time limit, and the service's own restarts."""
        return tables.after_limit()[service, provisioning.partition(":")[0]]

    def disk_price(self, kind: str, region: str) -> float | None:
        """Return the USD per GB and month of a disk type, whether its VM runs or not; `None` if unknown."""
        return tables.disk_prices().get((kind, region))

    def disk_price_at_most(self, kind: str, region: str) -> float | None:
        """Return USD per GB and month, or an upper bound: hyperdisk-balanced costs less than pd-ssd."""
        substitute = "pd-ssd" if kind in tables.price_bounds() else kind
        return self.disk_price(kind, region) or self.disk_price(substitute, region)

    def warnings(self, machine: MachineType, service: Service, provisioning: str) -> tuple[str, ...]:
        """Return notes on the machine with this service and provisioning model."""
        gpu, doubts = self.gpus[machine.gpu], machine.vertex_warn if service == "vertex" else {}
        on_vm = gpu.vm_notes if service == "compute" else ()
        return (*gpu.notes, *on_vm, *machine.notes, *filter(None, [doubts.get(provisioning.partition(":")[0])]))

    def nccl(self, machine: MachineType, service: Service) -> Nccl:
        """Return the NCCL settings of this machine for several nodes."""
        return tables.nccl().get((machine.name, service), PLAIN)

    def quota(self, machine: MachineType, service: Service, provisioning: str) -> Quota | None:
        """Return the GPU quota that a node needs; `None` if its name is unknown."""
        return quotas.quota(machine.gpus, self.gpus[machine.gpu], service, provisioning)

    def image_family(self, machine: MachineType) -> ImageFamily | None:
        """Return the family to boot: for the machine's CPU, preferably with a driver that supports its GPU.

        `None` if no family for its CPU is known.
        """
        gpu = self.gpus[machine.gpu]
        least, most = int(gpu.min_driver or 0), int(gpu.max_driver or 9999)
        fitting = (image for image in tables.images() if image.default and image.arch == machine.arch)
        return max(fitting, key=lambda image: least <= int(image.driver) <= most, default=None)

    @cached_property
    def _vertex_gpus(self) -> Mapping[str, tuple[str, ...]]:
        regions: dict[str, tuple[str, ...]] = {}
        for row in tables.rows("vertex_gpus"):
            regions[row["gpu"]] = (*regions.get(row["gpu"], ()), row["region"])
        return regions

    def _region_prices(self, machine: MachineType, region: str) -> RegionPrices | None:
        if machine.family == "n1":
            parts = (self.component(name, region) for name in ("n1-vcpu", "n1-ram-gib", machine.gpu))
            return prices.of_components(machine, region, *parts)
        table = tables.prices(machine.name, self._price_folder)
        return (table or tables.prices(machine.name)).get(region)  # a machine that is new in this launch


def region_of(place: str) -> str:
    """Return the region of a zone (us-central1-a), or the region itself."""
    return place.rpartition("-")[0] if place.count("-") > 1 else place
