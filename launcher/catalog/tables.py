"""Read the data files into frozen data. An empty cell means unknown: `None`, or an empty tuple."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator, Mapping
from functools import cache
from typing import TextIO

from launcher.catalog.model import (
    AfterLimit,
    BaseImage,
    Component,
    Gpu,
    ImageFamily,
    Interruptions,
    MachineType,
    Nccl,
    PriceBound,
    PriceRule,
    PriceTable,
    Rate,
    RegionPrices,
    Throughput,
    TorchRelease,
    Zone,
)

DATA = os.path.join(os.path.dirname(__file__), "data")  # noqa: PTH118, PTH120 -- pathlib would cost 2 ms of import
Row = Mapping[str, str]


@cache
def gpus() -> dict[str, Gpu]:
    """GPU name -> GPU."""
    drivers = wheels()
    return {row["name"]: _gpu(row, drivers[row["wheel"]]) for row in rows("gpus")}


def wheels() -> dict[str, str | None]:
    """PyTorch's CUDA variant -> the oldest driver branch that supports it."""
    return {row["wheel"]: row["min_driver"] or None for row in rows("wheels")}


def torch_releases() -> tuple[TorchRelease, ...]:
    """The releases of PyTorch, oldest first."""
    return tuple(
        TorchRelease(
            version=row["torch"],
            builds=dict(_build(part) for part in row["builds"].split()),
            pypi=row["pypi"],
            pypi_arm64=row["pypi_arm64"],
            python=tuple(row["python"].split()),
            companions={name: tuple(row[name].split()) for name in COMPANIONS if row[name]},
            source=row["source"],
            certainty=row["certainty"],
        )
        for row in rows("torch")
    )


COMPANIONS = ("torchvision", "torchaudio", "triton", "xformers")
"""Packages that are built for one release of PyTorch each."""


def _build(cell: str) -> tuple[str, tuple[float, float]]:
    name, _, kernels = cell.partition(":")
    oldest, _, newest = kernels.partition("-")
    return name, (float(oldest), float(newest))


def base_images() -> tuple[BaseImage, ...]:
    """Public base images; a name also stands for the names below it."""
    return tuple(
        BaseImage(
            name=row["name"],
            python=row["python"] == "yes",
            torch=row["torch"] == "yes",
            nvcc=row["nvcc"] == "yes",
            source=row["source"],
            certainty=row["certainty"],
        )
        for row in rows("bases")
    )


def transformers_types() -> dict[str, tuple[str, ...]]:
    """A model type of transformers -> the trainer's tasks that it has a head for."""
    return {row["type"]: tuple(row["tasks"].split()) for row in rows("transformers_types")}


@cache
def machines() -> dict[str, tuple[MachineType, ...]]:
    """Machine type -> its shapes: one for most types; for N1 one per GPU kind and count."""
    families = {row["family"]: _family(row) for row in rows("families")}
    shapes: dict[str, list[MachineType]] = {}
    for row in rows("machines"):
        shapes.setdefault(row["name"], []).append(_machine(row, families[row["family"]]))
    for row in rows("n1"):
        shapes.setdefault(row["name"], []).extend(_n1(row, families["n1"]))
    return {name: tuple(shapes) for name, shapes in shapes.items()}


def zones(machines: str) -> tuple[Zone, ...]:
    """Return the zones of a key of zones.csv, uncertain ones last. Only the key's own lines are parsed."""
    with _open("zones", DATA) as file:
        cells = [Zone(zone, region, doubt) for _, zone, region, doubt, *_ in csv.reader(_starting(file, machines))]
    return tuple(sorted(cells, key=lambda zone: bool(zone.doubt)))


def price_table(folder: str = DATA) -> PriceTable:
    """Return the date and digest of a folder's prices. Raises OSError, ValueError, KeyError: it has no price table."""
    from hashlib import sha256

    [row] = rows("price_table", folder)
    texts = []
    for name in ("prices", "price_components"):
        with open(os.path.join(folder, f"{name}.csv"), "rb") as file:  # noqa: PTH118, PTH123 -- as DATA
            texts.append(file.read())
    return PriceTable(row["date"], sha256(b"\0".join(texts)).hexdigest()[:16], folder == DATA, folder)


def prices(machine: str, folder: str = DATA) -> dict[str, RegionPrices]:
    """Region -> prices of a machine. Only the machine's own lines are parsed."""
    with _open("prices", folder) as file:
        return {cells[0]: _region_prices(cells) for _, *cells in csv.reader(_starting(file, machine))}


def components(name: str, folder: str = DATA) -> dict[str, Component]:
    """Region -> the price of a unit of a component."""
    with _open("price_components", folder) as file:
        return {
            region: Component(float(listed), _usd(spot), source, date)
            for _, region, listed, spot, source, date, _ in csv.reader(_starting(file, name))
            if _usd(listed)
        }


def price_rules() -> dict[str, PriceRule]:
    """Key -> the derivation of a figure."""
    return {row["rule"]: PriceRule(row["kind"], row["text"]) for row in rows("price_rules")}


@cache
def price_bounds() -> dict[str, PriceBound]:
    """Key -> the factor that bounds a price."""
    return {
        row["rule"]: PriceBound(float(row["factor"]), tuple(row["gpus"].split()), row["text"])
        for row in rows("price_bounds")
    }


@cache
def after_limit() -> dict[tuple[str, str], AfterLimit]:
    """(service, provisioning model) -> costs after a time limit."""
    return {
        (row["service"], row["provisioning"]): AfterLimit(int(row["seconds"]), int(row["restarts"]))
        for row in rows("after_limit")
    }


def rates() -> dict[str, Rate]:
    """Name -> a price per unit."""
    return {
        row["rate"]: Rate(float(row["usd"]), row["unit"], row["source"], row["date"], row["certainty"])
        for row in rows("rates")
    }


@cache
def disk_prices() -> dict[tuple[str, str], Rate]:
    """(disk type, region) -> its price per GB and month."""
    return {
        (kind, row["region"]): Rate(float(row[kind]), "GB and month", row["source"], row["date"], row["certainty"])
        for row in rows("disk_prices")
        for kind in ("pd-standard", "pd-balanced", "pd-ssd")
        if row[kind]
    }


@cache
def interruptions() -> dict[str, Interruptions]:
    """Provisioning model -> how often a node is interrupted."""
    return {
        row["provisioning"]: Interruptions(
            float(row["hours"]), row["rule"], row["source"], row["date"], row["certainty"]
        )
        for row in rows("interruptions")
    }


@cache
def throughput() -> dict[tuple[str, str], Throughput]:
    """Model and GPU -> measured speed per GPU."""
    return {
        (row["model"], row["gpu"]): Throughput(
            float(row["per_second"]), row["unit"], row["rule"], row["source"], row["date"], row["certainty"]
        )
        for row in rows("throughput")
    }


def images() -> tuple[ImageFamily, ...]:
    """The Deep Learning VM image families, best first."""
    return tuple(
        ImageFamily(
            family=row["family"],
            project=row["project"],
            arch=row["arch"],
            driver=row["driver"],
            python=row["python"] or None,
            framework=row["framework"],
            supported_until=row["supported_until"] or None,
            default=row["default"] == "yes",
            source=row["source"],
        )
        for row in rows("images")
    )


@cache
def nccl() -> dict[tuple[str, str], Nccl]:
    """(machine type, service) -> its NCCL settings."""
    settings: dict[tuple[str, str], list[dict[str, str]]] = {}
    for row in rows("nccl"):
        settings.setdefault((row["machine"], row["service"]), []).append(row)
    return {key: _nccl(lines) for key, lines in settings.items()}


def rows(table: str, folder: str = DATA) -> Iterator[dict[str, str]]:
    """Return the rows of <table>.csv in data/ or another folder."""
    with _open(table, folder) as file:
        names, *lines = csv.reader(file)  # csv.DictReader takes twice the time
    return (dict(zip(names, cells, strict=True)) for cells in lines)


def _open(table: str, folder: str) -> TextIO:
    return open(os.path.join(folder, f"{table}.csv"), encoding="utf-8", newline="")  # noqa: PTH118, PTH123 -- as DATA


def _starting(file: TextIO, first: str) -> Iterator[str]:
    """Yield the lines with `first` as their first cell."""
    start = f"{first},"
    return (line for line in file if line.startswith(start))


def _region_prices(cells: list[str]) -> RegionPrices:
    region, listed, list_rule, flex, flex_rule, spot, spot_rule, disks, source, date, _ = cells
    return RegionPrices(
        region, _usd(listed), list_rule, _usd(flex), flex_rule, _usd(spot), spot_rule, float(disks or 0), source, date
    )


def _gpu(row: Row, min_driver: str | None) -> Gpu:
    return Gpu(
        name=row["name"],
        title=row["title"],
        accelerator=row["accelerator"],
        vertex_accelerator=row["vertex_accelerator"] or None,
        memory_gb=int(row["memory_gb"]),
        peak_tflops={kind: _usd(row[kind]) for kind in ("bf16", "fp16", "tf32", "fp32")},
        sm=float(row["sm"]),
        wheel=row["wheel"],
        min_driver=min_driver,
        max_driver=row["max_driver"] or None,
        shut_down=row["shut_down"],
        notes=_notes(row["note"]),
        vm_notes=_notes(row["vm_note"]),
        source=row["source"],
        peak_source=row["peak_source"],
        quota_names={name: row[name] or None for name in _QUOTA_COLUMNS},
    )


_QUOTA_COLUMNS = (
    "vertex_quota_metric",
    "vertex_quota_id",
    "compute_quota",
    "compute_spot_quota",
    "compute_spot_quota_id",
    "compute_family",
)


def _family(row: Row) -> dict[str, object]:
    """Return the properties that all machines of a family share, as MachineType's keywords."""
    return {
        "family": row["family"],
        "arch": row["arch"],
        "guest_accelerator": row["guest_accelerator"] == "yes",
        "local_ssd_auto": row["local_ssd_auto"] == "yes",
        "boot_disk_default": row["boot_disk_default"],
        "vertex_boot_disk_default": row["vertex_boot_disk_default"] or None,
        "vertex_warn": dict.fromkeys(row["vertex_warn"].split(), row["vertex_why"]),
        "notes": _notes(row["note"]),
        **{name: tuple(row[name].split()) for name in _FAMILY_LISTS},
    }


_FAMILY_LISTS = (
    "boot_disk_types",
    "vertex_boot_disk_types",
    "compute_provisioning",
    "vertex_provisioning",
    "compute_default",
    "vertex_default",
)


def _machine(row: Row, family: Mapping[str, object]) -> MachineType:
    on_vertex = row["on_vertex"] == "yes"
    return _machine_shape(
        family,
        name=row["name"],
        zones=row["zones"],
        gpu=row["gpu"],
        gpus=int(row["gpus"]),
        share=row["share"] or None,
        vcpus=int(row["vcpus"]),
        memory_gb=float(row["memory_gb"]),
        local_ssd_gib=int(row["local_ssd_gib"]),
        local_ssd_max_gib=_int(row["local_ssd_max_gib"]),
        local_ssd_auto=bool(family["local_ssd_auto"]) and row["local_ssd_gib"] != "0",
        nics=_int(row["nics"]),
        gbps=_int(row["gbps"]),
        on_vertex=on_vertex,
        default=row["default"] == "yes",
        source=row["source"],
    )


def _n1(row: Row, family: Mapping[str, object]) -> Iterator[MachineType]:
    """Yield a shape per GPU count of an N1 type with a GPU kind."""
    on_vertex, default = set(row["vertex_counts"].split()), set(row["default_counts"].split())
    for count in row["counts"].split():
        yield _machine_shape(
            family,
            name=row["name"],
            zones=row["gpu"],
            gpu=row["gpu"],
            gpus=int(count),
            share=None,
            vcpus=int(row["vcpus"]),
            memory_gb=float(row["memory_gb"]),
            local_ssd_gib=0,
            local_ssd_max_gib=None,
            nics=None,
            gbps=None,
            on_vertex=count in on_vertex,
            default=count in default,
            notes=_notes(row["note"]) if count == "4" else (),
            source=row["source"],
        )


def _machine_shape(family: Mapping[str, object], **own: object) -> MachineType:
    """Return a machine of a family; without provisioning models on Vertex AI if it is not offered there."""
    if not own["on_vertex"]:
        own |= {"vertex_provisioning": (), "vertex_default": (), "vertex_warn": {}}
    return MachineType(**{**family, **own})  # type: ignore[arg-type]  # read and checked by column


def _nccl(lines: list[dict[str, str]]) -> Nccl:
    single = {row["kind"]: row["value"] for row in lines if row["kind"] != "env"}
    return Nccl(
        env={row["key"]: row["value"] for row in lines if row["kind"] == "env"},
        library_path=single.get("library_path"),
        script=single.get("script"),
        network=single["network"],
        source=lines[0]["source"],
        certainty=lines[0]["certainty"],
    )


def _notes(cell: str) -> tuple[str, ...]:
    return tuple(cell.split("|")) if cell else ()


def _int(cell: str) -> int | None:
    return int(cell) if cell else None


def _usd(cell: str) -> float | None:
    """Return a figure; None for an empty cell, and for 0: nothing that a plan uses is free."""
    return float(cell or 0) or None
