"""What the catalog hands out: frozen data. `None`, or an empty tuple of places, always means "unknown"."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from msgspec import Struct

from launcher.errors import PlanRefused

Service = Literal["vertex", "compute"]

UNKNOWN = "unknown"
"""What people see where a table's cell is empty."""


class CatalogError(PlanRefused):
    """A machine, GPU or count that isn't sold, or not by that service."""


class Gpu(Struct, frozen=True, gc=False):
    """One kind of GPU.

    `peak_tflops` is dense, without sparsity: keys bf16, fp16, tf32 and fp32, `None` where the GPU lacks the format or
    the figure is unknown. `min_driver` is the least driver for `wheel` (NVIDIA's CUDA compatibility table);
    `max_driver` the newest branch that is known to still drive this GPU. `notes` are worth a
    warning, `vm_notes` on a VM only. `quota_names` are what launcher.catalog.quotas puts its names together from.
    """

    name: str
    title: str
    accelerator: str
    vertex_accelerator: str | None
    memory_gb: int
    peak_tflops: Mapping[str, float | None]
    wheel: str
    min_driver: str | None
    max_driver: str | None
    notes: tuple[str, ...]
    vm_notes: tuple[str, ...]
    source: str
    peak_source: str
    quota_names: Mapping[str, str | None]


class MachineType(Struct, frozen=True, gc=False):
    """One machine type with its GPUs. An N1 type is there once for every GPU kind and count.

    Sizes: `memory_gb` and `local_ssd_gib` of the whole machine; `gbps` Gbit/s out of the machine. `share` is the part
    of one GPU that a fractional type has ("1/8"). `local_ssd_auto`: the disks come with the machine and must not be
    listed in the request. `default`: what its GPU's name and count mean in a spec.
    """

    name: str
    family: str
    gpu: str
    gpus: int
    share: str | None
    vcpus: int
    memory_gb: float | None
    local_ssd_gib: int
    local_ssd_max_gib: int | None
    local_ssd_auto: bool
    boot_disk_types: tuple[str, ...]
    boot_disk_default: str
    vertex_boot_disk_types: tuple[str, ...]
    vertex_boot_disk_default: str | None
    nics: int | None
    gbps: int | None
    arch: str
    guest_accelerator: bool
    on_vertex: bool
    compute_provisioning: tuple[str, ...]
    vertex_provisioning: tuple[str, ...]
    compute_default: tuple[str, ...]
    vertex_default: tuple[str, ...]
    vertex_warn: Mapping[str, str]
    default: bool
    notes: tuple[str, ...]
    source: str

    def provisioning(self, service: Service) -> tuple[str, ...]:
        """The provisioning models that `service` takes for this machine."""
        return self.vertex_provisioning if service == "vertex" else self.compute_provisioning

    def provisioning_default(self, service: Service) -> tuple[str, ...]:
        """What to try, in this order, when the spec says nothing."""
        return self.vertex_default if service == "vertex" else self.compute_default


class Price(Struct, frozen=True, gc=False):
    """USD for one node and hour. `usd` is `None` when unknown, and `rule` then says what is missing.

    `approx`: derived by `rule`, not read off a price list; `bound`: by a rule that gives at least the true price.
    `ceiling` is the most that is expected, by `ceiling_rule`; `hard_bound` the most that can be. Both are known in more
    places than `usd`, and `None` where no rule of data/price_bounds.csv covers the machine.
    """

    usd: float | None
    approx: bool
    rule: str
    source: str
    date: str
    excludes: tuple[str, ...]
    bound: bool = False
    ceiling: float | None = None
    ceiling_rule: str = ""
    hard_bound: float | None = None


class Quota(Struct, frozen=True, gc=False):
    """The quota that one node uses up: `units` of it, in each region.

    `metric` is the name in error messages and in Compute Engine's regions.get; `id` Cloud Quotas' name. Either may
    be unknown. `dims` are the dimensions beside the region.
    """

    metric: str | None
    id: str | None
    units: int
    dims: Mapping[str, str]


class Nccl(Struct, frozen=True, gc=False):
    """What NCCL needs for several nodes. `script` is to be sourced first; `library_path` goes on LD_LIBRARY_PATH."""

    env: Mapping[str, str]
    library_path: str | None
    script: str | None
    network: str
    source: str
    certainty: str


class ImageFamily(Struct, frozen=True, gc=False):
    """A family of Deep Learning VM images with its driver baked in."""

    family: str
    project: str
    arch: str
    driver: str
    python: str | None
    framework: str
    supported_until: str | None
    default: bool
    source: str


class Rate(Struct, frozen=True, gc=False):
    """A price for each unit of something: USD, or a share."""

    usd: float
    unit: str
    source: str
    date: str
    certainty: str


class Interruptions(Struct, frozen=True, gc=False):
    """How often one node is interrupted: hours between two preemptions or failures, and the rule behind the figure."""

    hours: float
    rule: str
    source: str
    date: str
    certainty: str


class PriceRule(Struct, frozen=True, gc=False):
    """Origin of a figure. kind: exact, derived, bound (at least the true price), or reported (by a third party; no
    bound is based on it)."""

    kind: str
    text: str


class PriceBound(Struct, frozen=True, gc=False):
    """A factor that gives an upper bound from another price; `gpus` are the ones it applies to, () all."""

    factor: float
    gpus: tuple[str, ...]
    text: str


class RegionPrices(Struct, frozen=True, gc=False):
    """What Compute Engine charges for a machine in a region, with the local SSDs that come with it: USD an hour, `None`
    if unknown. `local_ssds` is their part of the list price.

    The rules are keys of data/price_rules.csv.
    """

    region: str
    listed: float | None
    list_rule: str
    flex_start: float | None
    flex_rule: str
    spot: float | None
    spot_rule: str
    local_ssds: float
    source: str
    date: str


class AfterLimit(Struct, frozen=True, gc=False):
    """What may be billed after a time limit: `seconds` until the machine is off, and the service's own `restarts` of a
    job."""

    seconds: int
    restarts: int


class Component(Struct, frozen=True, gc=False):
    """The price of a unit of something in a region, USD an hour: a vCPU, a GiB of RAM or local SSD, a GPU."""

    listed: float
    spot: float | None
    source: str
    date: str
