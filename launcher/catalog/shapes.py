"""From what a spec says (a GPU or a machine type, a count) to the one machine that is meant."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

from msgspec import Struct

from launcher.catalog.model import CatalogError, Gpu, MachineType, Service
from launcher.text import either, near

SERVICES: Mapping[Service, str] = {"vertex": "Vertex AI", "compute": "Compute Engine"}


NOT_NVIDIA: Final = re.compile(
    r"(cloud-?)?tpu.*|v[2-6](e|p|litepod)?(-\d+)?|ct\d.*|trillium|ironwood|(amd-?)?mi\d{2,3}[a-z]*|gaudi.*|trn\d.*|inf\d.*"
)
"""Accelerators of others, by the names that people type: Google's TPUs, AMD's Instinct, Intel's Gaudi, AWS's own."""


class Stock(Struct, frozen=True, gc=False):
    """What there is: GPU name -> GPU, machine type -> its shapes."""

    gpus: Mapping[str, Gpu]
    machines: Mapping[str, tuple[MachineType, ...]]

    def shapes(self) -> Iterable[MachineType]:
        return (shape for shapes in self.machines.values() for shape in shapes)


class MachineQuery(Struct, frozen=True, gc=False):
    """What a spec says of its machine."""

    type: str
    gpus: int | None
    accelerator: str | None
    service: Service

    def offers(self, machine: MachineType) -> bool:
        """Whether the service has this shape at all."""
        return bool(machine.provisioning(self.service))


def find(stock: Stock, query: MachineQuery) -> MachineType:
    """The shape that is meant; Catalog.find tells the rules. Raises CatalogError."""
    if query.type in stock.machines:
        return _by_machine(stock, query)
    if query.type not in stock.gpus:
        raise unknown(query.type, stock, "machine.type")
    if query.accelerator is not None and _gpu(stock, query.accelerator).name != query.type:
        raise CatalogError(
            f"machine.type {query.type} and machine.accelerator {query.accelerator} are different GPUs",
            "leave machine.accelerator out; it is for N1 machine types",
            field="machine.accelerator",
        )
    return _by_gpu(stock, query)


def unknown(name: str, stock: Stock, field: str) -> CatalogError:
    """The error for a name in `field` that is neither a GPU nor a machine type."""
    every = f"GPUs: {' '.join(stock.gpus)}; or a machine type such as a3-highgpu-2g"
    low = name[:80].lower()
    if NOT_NVIDIA.fullmatch(low):
        return CatalogError(f"{name[:80]} is not supported: launch runs on NVIDIA GPUs", every, field=field)
    if len(sizes := [gpu for gpu in stock.gpus if re.fullmatch(rf"{re.escape(low)}-\d+gb", gpu)]) > 1:
        return CatalogError(f"{name[:80]} comes with different amounts of memory", f"use {either(sizes)}", field=field)
    close = _nearest(name, stock)
    return CatalogError(
        f"no GPU and no machine type with GPUs is called {name[:80]}",
        f"did you mean {either(close)}?" if close else every,
        field=field,
    )


def _by_gpu(stock: Stock, query: MachineQuery) -> MachineType:
    """A GPU's default shape with that many; without a count its smallest."""
    shapes = [shape for shape in stock.shapes() if shape.gpu == query.type and shape.default]
    sold = {shape.gpus: shape for shape in sorted(shapes, key=lambda shape: shape.gpus) if query.offers(shape)}
    if not sold:
        raise CatalogError(
            f"{SERVICES[query.service]} has no {stock.gpus[query.type].title}",
            "Compute Engine has it: launch vm",
            field="machine.type",
        )
    if query.gpus is None:
        return next(iter(sold.values()))
    if query.gpus not in sold:
        raise CatalogError(
            f"{query.type} comes as {_counts(sold)}, not {query.gpus}",
            "set machine.gpus to what exists; machine.nodes gives more machines",
            field="machine.gpus",
        )
    return sold[query.gpus]


def _by_machine(stock: Stock, query: MachineQuery) -> MachineType:
    """A machine type by its own name; an N1 type needs `accelerator` beside it."""
    shapes = _with_accelerator(stock, query)
    gpu = stock.gpus[shapes[0].gpu]
    sold = {shape.gpus: shape for shape in shapes if query.offers(shape)}
    if not sold:
        name = f"{query.type} with {gpu.name}" if shapes[0].guest_accelerator else query.type
        hint = _instead(stock, query, shapes[0])
        raise CatalogError(f"{SERVICES[query.service]} has no {name}", hint, field="machine.type")
    if query.gpus is None:
        return sold[min(sold)]
    if query.gpus not in sold:
        raise CatalogError(
            f"{query.type} has {_counts(sold)} ({gpu.title}), not {query.gpus}",
            f"leave machine.gpus out, or say machine.type: {gpu.name} and machine.gpus: {query.gpus}",
            field="machine.gpus",
        )
    return sold[query.gpus]


def _with_accelerator(stock: Stock, query: MachineQuery) -> list[MachineType]:
    """The shapes of one machine type that have the accelerator."""
    kinds = list(dict.fromkeys(shape.gpu for shape in stock.machines[query.type]))
    if query.accelerator is None and len(kinds) > 1:
        raise CatalogError(
            f"{query.type} takes several GPUs: {either(kinds)}",
            f"say which: machine.accelerator: {kinds[0]}",
            field="machine.type",
        )
    wanted = stock.gpus[kinds[0]] if query.accelerator is None else _gpu(stock, query.accelerator)
    shapes = [shape for shape in stock.machines[query.type] if shape.gpu == wanted.name]
    if not shapes:
        has = either(stock.gpus[kind].title for kind in kinds)
        raise CatalogError(f"{query.type} has no {wanted.title}", f"it has {has}", field="machine.accelerator")
    return shapes


def _gpu(stock: Stock, accelerator: str) -> Gpu:
    """t4, nvidia-tesla-t4 and NVIDIA_TESLA_T4 are the same GPU."""
    for gpu in stock.gpus.values():
        if accelerator in (gpu.accelerator, gpu.vertex_accelerator) or accelerator.lower() == gpu.name:
            return gpu
    raise unknown(accelerator, stock, "machine.accelerator")


def _instead(stock: Stock, query: MachineQuery, missing: MachineType) -> str:
    """The machine types with the same GPU that the service does have: those of the same series, then by size."""

    def far(shape: MachineType) -> tuple[bool, int]:
        return shape.name.rpartition("-")[0] != missing.name.rpartition("-")[0], shape.vcpus

    others = sorted((shape for shape in stock.shapes() if shape.gpu == missing.gpu and query.offers(shape)), key=far)
    same = list(dict.fromkeys(shape.name for shape in others))[:4]
    return f"it has {either(same)}; Compute Engine has {missing.name}: launch vm" if same else "try launch vm"


def _nearest(name: str, stock: Stock) -> list[str]:
    low = name[:80].lower().replace("_", "-")
    names = {gpu.accelerator: gpu.name for gpu in stock.gpus.values()}
    names |= {(gpu.vertex_accelerator or "").lower().replace("_", "-"): gpu.name for gpu in stock.gpus.values()}
    known = [*stock.gpus, *stock.machines]
    if low in names or low in known:
        return [names.get(low, low)]
    starts = [other for other in known if len(low) > 2 and other.startswith(low)]
    return starts[:4] or near(low, known, 0.5, 3)


def _counts(sold: Iterable[int]) -> str:
    counts = sorted(sold)
    return f"{either(map(str, counts))} {'GPU' if counts == [1] else 'GPUs'}"
