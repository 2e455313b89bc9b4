"""Find the machine that a spec names by GPU or machine type and by count."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

from msgspec import Struct

from launcher.catalog import tables
from launcher.catalog.model import CatalogError, Gpu, MachineType, Service
from launcher.text import did_you_mean, either, near

SERVICES: Mapping[Service, str] = {"vertex": "Vertex AI", "compute": "Compute Engine"}


NOT_NVIDIA: Final = (
    r"(cloud-?)?tpu.*|v[2-6](e|p|litepod)?(-\d+)?|ct\d.*|trillium|ironwood"
    r"|(amd-?)?mi\d{2,3}[a-z]*|gaudi.*|trn\d.*|inf\d.*"
)
"""Accelerators that are not NVIDIA GPUs: Google TPU, AMD Instinct, Intel Gaudi, AWS Trainium and Inferentia."""


class MachineQuery(Struct, frozen=True, gc=False):
    """The machine settings of a spec, and the service."""

    type: str
    gpus: int | None
    accelerator: str | None
    service: Service

    def offers(self, machine: MachineType) -> bool:
        return bool(machine.provisioning(self.service))


def find(query: MachineQuery) -> MachineType:
    """Return the shape by the rules of Catalog.find. Raises CatalogError."""
    if query.type in tables.machines():
        return _by_machine(query)
    if query.type not in tables.gpus():
        raise unknown(query.type, "machine.type")
    check_offered(tables.gpus()[query.type], "machine.type")
    if query.accelerator is not None and _gpu_of_name(query.accelerator).name != query.type:
        raise CatalogError(
            f"machine.type {query.type} and machine.accelerator {query.accelerator} are different GPUs",
            "Remove machine.accelerator: it is for N1 machine types",
            field="machine.accelerator",
        )
    return _by_gpu(query)


def check_offered(gpu: Gpu, field: str) -> None:
    """Raise CatalogError if Google has shut the GPU down."""
    if gpu.shut_down:
        why = f"Google shut down {gpu.title} on {gpu.shut_down}: no job or VM can use it"
        raise CatalogError(why, "Use another GPU: --type t4, or --type l4", field=field)


def unknown(name: str, field: str) -> CatalogError:
    """Return the error for a name in `field` that is neither a GPU nor a machine type."""
    offered = " ".join(gpu.name for gpu in tables.gpus().values() if not gpu.shut_down)
    every = f"Use a GPU: {offered}\nor a machine type such as a3-highgpu-2g"
    low = name[:80].lower()
    if re.fullmatch(NOT_NVIDIA, low):
        return CatalogError(f"{name[:80]} is not supported: launch needs NVIDIA GPUs", every, field=field)
    if len(sizes := [gpu for gpu in tables.gpus() if re.fullmatch(rf"{re.escape(low)}-\d+gb", gpu)]) > 1:
        return CatalogError(
            f"{name[:80]} is ambiguous: it comes in two memory sizes", f"Use {either(sizes)}", field=field
        )
    close = _nearest(name)
    return CatalogError(
        f"unknown GPU or machine type {name[:80]}",
        did_you_mean(close, every),
        field=field,
    )


def _by_gpu(query: MachineQuery) -> MachineType:
    """Return a GPU's default shape with the count; without a count, the smallest."""
    shapes = [shape for shape in tables.shapes() if shape.gpu == query.type and shape.default]
    sold = {shape.gpus: shape for shape in sorted(shapes, key=lambda shape: shape.gpus) if query.offers(shape)}
    if not sold:
        raise CatalogError(
            f"{tables.gpus()[query.type].title} is not available on {SERVICES[query.service]}",
            "Compute Engine has it: launch vm SPEC",
            field="machine.type",
        )
    if query.gpus is None:
        return next(iter(sold.values()))
    if query.gpus not in sold:
        raise CatalogError(
            f"machine.gpus: {query.gpus} is not available for {query.type}, only {_gpu_counts(sold)} per node",
            f"Use --gpus {min(sold, key=lambda count: abs(count - (query.gpus or 0)))}; for more GPUs, add nodes: "
            f"--gpus {max(sold)} --nodes 2",
            field="machine.gpus",
        )
    return sold[query.gpus]


def _by_machine(query: MachineQuery) -> MachineType:
    """Return a machine type by its name; an N1 type also needs `accelerator`."""
    shapes = _with_accelerator(query)
    gpu = tables.gpus()[shapes[0].gpu]
    sold = {shape.gpus: shape for shape in shapes if query.offers(shape)}
    if not sold:
        name = f"{query.type} with {gpu.name}" if shapes[0].guest_accelerator else query.type
        hint = _instead(query, shapes[0])
        raise CatalogError(f"{name} is not available on {SERVICES[query.service]}", hint, field="machine.type")
    if query.gpus is None:
        return sold[min(sold)]
    if query.gpus not in sold:
        raise CatalogError(
            f"machine.gpus: {query.type} has {_gpu_counts(sold)} ({gpu.title}), not {query.gpus}",
            f"Remove machine.gpus, or use the GPU's name: --type {gpu.name} --gpus {query.gpus}",
            field="machine.gpus",
        )
    return sold[query.gpus]


def _with_accelerator(query: MachineQuery) -> list[MachineType]:
    """Return the shapes of a machine type that have the accelerator. Raises CatalogError."""
    kinds = list(dict.fromkeys(shape.gpu for shape in tables.machines()[query.type]))
    if query.accelerator is None and len(kinds) > 1:
        raise CatalogError(
            f"{query.type} needs machine.accelerator: it takes {either(kinds)}",
            f"Use --set machine.accelerator={kinds[0]}",
            field="machine.type",
        )
    wanted = tables.gpus()[kinds[0]] if query.accelerator is None else _gpu_of_name(query.accelerator)
    shapes = [shape for shape in tables.machines()[query.type] if shape.gpu == wanted.name]
    if not shapes:
        has = either(tables.gpus()[kind].title for kind in kinds)
        fix = f"Use --set machine.accelerator={kinds[0]}, or remove it"
        raise CatalogError(f"{query.type} has {has}, not {wanted.title}", fix, field="machine.accelerator")
    return shapes


def _gpu_of_name(accelerator: str) -> Gpu:
    """Return a GPU by any of its names: t4, nvidia-tesla-t4, NVIDIA_TESLA_T4. Raises CatalogError."""
    for gpu in tables.gpus().values():
        if accelerator in (gpu.accelerator, gpu.vertex_accelerator) or accelerator.lower() == gpu.name:
            check_offered(gpu, "machine.accelerator")
            return gpu
    raise unknown(accelerator, "machine.accelerator")


def _instead(query: MachineQuery, missing: MachineType) -> str:
    """Suggest machine types with the same GPU that the service offers: those of the same series first, then by size."""

    def distance(shape: MachineType) -> tuple[bool, int]:
        return shape.name.rpartition("-")[0] != missing.name.rpartition("-")[0], shape.vcpus

    offered = (shape for shape in tables.shapes() if shape.gpu == missing.gpu and query.offers(shape))
    near = list(dict.fromkeys(shape.name for shape in sorted(offered, key=distance)))[:4]
    on_compute = f"Compute Engine has {missing.name}: launch vm SPEC"
    return f"Use {either(near)}; or {on_compute}" if near else on_compute


def _nearest(name: str) -> list[str]:
    low = name[:80].lower().replace("_", "-")
    names = {gpu.accelerator: gpu.name for gpu in tables.gpus().values()}
    names |= {(gpu.vertex_accelerator or "").lower().replace("_", "-"): gpu.name for gpu in tables.gpus().values()}
    known = [*tables.gpus(), *tables.machines()]
    if low in names or low in known:
        return [names.get(low, low)]
    starts = [other for other in known if len(low) > 2 and other.startswith(low)]
    return starts[:4] or near(low, known, 0.5, 3)


def _gpu_counts(sold: Iterable[int]) -> str:
    counts = sorted(sold)
    return f"{either(map(str, counts))} {'GPU' if counts == [1] else 'GPUs'}"
