"""The catalog's data types, all frozen. `None`, or an empty tuple of places, always means "unknown"."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from msgspec import Struct

from launcher.errors import PlanRefused

Service = Literal["vertex", "compute"]

UNKNOWN = "unknown"
"""Shown for an empty cell."""


class CatalogError(PlanRefused):
    """The machine, GPU or count does not exist, or the service does not offer it."""


class Gpu(Struct, frozen=True, gc=False):
    """A kind of GPU.

    `peak_tflops` is dense (without sparsity), with keys bf16, fp16, tf32 and fp32; `None` if the GPU lacks the format
    or the figure is unknown. `sm` is its compute capability (9.0). `min_driver` is the oldest driver for `wheel`
    (NVIDIA's CUDA compatibility table), `max_driver` the newest branch known to support this GPU. `shut_down`: the day
    on which Google ended it (2026-09-15); empty for all others. `notes` become warnings, `vm_notes` on VMs only.
    launcher.catalog.quotas composes quota names from `quota_names`.
    """

    name: str
    title: str
    accelerator: str
    vertex_accelerator: str | None
    memory_gb: int
    peak_tflops: Mapping[str, float | None]
    sm: float
    wheel: str
    min_driver: str | None
    max_driver: str | None
    shut_down: str
    notes: tuple[str, ...]
    vm_notes: tuple[str, ...]
    quota_names: Mapping[str, str | None]


class TorchRelease(Struct, frozen=True, gc=False):
    """A release of PyTorch and the releases of other packages that were built for it.

    `builds`: CUDA build (cu126) -> the oldest and the newest compute capability that it has kernels for. `pypi` is the
    build that PyPI has, `pypi_arm64` for Arm (empty: PyPI has none with CUDA). `companions`: package -> its releases
    for this one; a package without any is left out.
    """

    version: str
    builds: Mapping[str, tuple[float, float]]
    pypi: str
    pypi_arm64: str
    python: tuple[str, ...]
    companions: Mapping[str, tuple[str, ...]]

    def has_kernels(self, build: str, gpu: Gpu) -> bool:
        """Return whether a build has kernels for a GPU: those of an older GPU of the same generation run too."""
        oldest, newest = self.builds[build]
        return oldest <= gpu.sm and int(gpu.sm) <= int(newest)


class BaseImage(Struct, frozen=True, gc=False):
    """A public base image, and whether it contains Python, PyTorch and CUDA's compiler (nvcc)."""

    name: str
    python: bool
    torch: bool
    nvcc: bool


class MachineType(Struct, frozen=True, gc=False):
    """A machine type with its GPUs. An N1 type occurs once per GPU kind and count.

    `memory_gb` and `local_ssd_gib` are of the whole machine. `share` is a fractional type's part of one GPU ("1/8").
    `local_ssd_auto`: the machine includes the disks, and the request must not list them. `default`: a spec selects this
    shape by GPU name and count. `zones`: its key in zones.csv.
    """

    name: str
    family: str
    zones: str
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

    def provisioning(self, service: Service) -> tuple[str, ...]:
        """Return the provisioning models that `service` offers for this machine."""
        return self.vertex_provisioning if service == "vertex" else self.compute_provisioning

    def provisioning_default(self, service: Service) -> tuple[str, ...]:
        """Return the default provisioning models, in fallback order."""
        return self.vertex_default if service == "vertex" else self.compute_default


class Zone(Struct, frozen=True, gc=False):
    """A zone that has a machine. `name` is empty if only its region is known. `doubt`: why that is uncertain; empty if
    it is not."""

    name: str
    region: str
    doubt: str


class Price(Struct, frozen=True, gc=False):
    """USD per node and hour. If `usd` is unknown (`None`), `rule` says what is missing.

    `approx`: derived by `rule`, not from a price list; `bound`: an upper bound of the true price. `ceiling` is the
    highest expected price, by `ceiling_rule`; `hard_bound` the highest possible. Both are known in more places than
    `usd`; `None` if no rule of data/price_bounds.csv covers the machine.
    """

    usd: float | None
    approx: bool
    rule: str
    excludes: tuple[str, ...]
    bound: bool = False
    ceiling: float | None = None
    ceiling_rule: str = ""
    hard_bound: float | None = None


class Quota(Struct, frozen=True, gc=False):
    """The quota that a node consumes: `units` of it, in its region.

    `metric` is the name in error messages and in Compute Engine's regions.get; `id` is the name in Cloud Quotas.
    Either may be unknown. `dims` are dimensions other than the region.
    """

    metric: str | None
    id: str | None
    units: int
    dims: Mapping[str, str]


class QuotaFigures(Struct, frozen=True, kw_only=True):
    """The figures of a quota, by its name in error messages. None: unknown, or no job that needs it is planned."""

    metric: str
    region: str
    """Empty: all regions together."""
    limit: float | None
    """-1: no limit."""
    used: float | None
    needed: int | None
    no_increase: str = ""
    """Google's reason why no higher limit can be requested by command."""


class Nccl(Struct, frozen=True, gc=False):
    """NCCL settings for several nodes. `script` must be sourced first; `library_path` is added to LD_LIBRARY_PATH."""

    env: Mapping[str, str]
    library_path: str | None
    script: str | None
    network: str


class ImageFamily(Struct, frozen=True, gc=False):
    """A family of Deep Learning VM images that include a driver."""

    family: str
    project: str
    arch: str
    driver: str
    default: bool


class Interruptions(Struct, frozen=True, gc=False):
    """Mean hours between two preemptions or failures of a node, and the derivation of the figure."""

    hours: float
    rule: str
    source: str
    date: str
    certainty: str


class Throughput(Struct, frozen=True, gc=False):
    """Tokens or images per second and GPU that somebody measured; `rule` says with which program and on what."""

    per_second: float
    unit: str
    rule: str


class PriceRule(Struct, frozen=True, gc=False):
    """Origin of a figure. kind: exact, derived, bound (an upper bound of the true price), or estimate (by a third party
    or by analogy, so no bound is based on it)."""

    kind: str
    text: str


class PriceBound(Struct, frozen=True, gc=False):
    """A factor that turns another price into an upper bound, for `gpus` (all if empty)."""

    factor: float
    gpus: tuple[str, ...]
    text: str


class RegionPrices(Struct, frozen=True, gc=False):
    """Compute Engine's prices of a machine in a region, with its included local SSDs: USD per hour, `None` if unknown.
    `local_ssds` is their part of the list price.

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


class PriceTable(Struct, frozen=True, gc=False):
    """The prices that a catalog uses: their day (2026-07-30), a digest of the tables, and their folder. `shipped`:
    they come with launch; otherwise `launch prices --update` fetched them."""

    date: str
    digest: str
    shipped: bool
    folder: str


class AfterLimit(Struct, frozen=True, gc=False):
    """Costs after a time limit: the billed `seconds` until the machine is off, and the service's own `restarts` of a
    job."""

    seconds: int
    restarts: int


class Component(Struct, frozen=True, gc=False):
    """The price of a unit in a region, in USD per hour: a vCPU, a GiB of RAM or local SSD, a GPU."""

    listed: float
    spot: float | None
