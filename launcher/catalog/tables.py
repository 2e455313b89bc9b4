"""Read the data files into frozen data. An empty cell means unknown: `None`, or an empty tuple."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import chain
from typing import Any, Final, TextIO, TypeVar

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
    RegionPrices,
    Throughput,
    TorchRelease,
    Zone,
)

DATA = os.path.join(os.path.dirname(__file__), "data")  # noqa: PTH118, PTH120 -- pathlib would cost 2 ms of import
Row = Mapping[str, str]
T = TypeVar("T")


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


def _usd(cell: str) -> float | None:
    """Return a figure; None for an empty cell, and for 0: nothing that a plan uses is free."""
    return float(cell or 0) or None


PARSERS: Final[Mapping[str, Callable[[str], object]]] = {
    "str": str,
    "str | None": lambda cell: cell or None,
    "int": int,
    "int | None": lambda cell: int(cell) if cell else None,
    "float": float,
    "float | None": _usd,
    "bool": lambda cell: cell == "yes",
    "tuple[str, ...]": lambda cell: tuple(cell.split()),
}
"""The type of a struct's field -> how a cell is read."""


def _record(kind: type[T], row: Row, **others: object) -> T:
    """Return a row as a struct: a column of a field's name gives its value, unless it is one of `others`."""
    types: Mapping[str, Any] = kind.__annotations__
    cells = {name: PARSERS[types[name]](row[name]) for name in types if name in row and name not in others}
    return kind(**cells, **others)


# --- Machines ---------------------------------------------------------------------------------------------------------


@cache
def gpus() -> dict[str, Gpu]:
    drivers = wheels()
    return {
        row["name"]: _record(
            Gpu,
            row,
            peak_tflops={kind: _usd(row[kind]) for kind in ("bf16", "fp16", "tf32", "fp32")},
            min_driver=drivers[row["wheel"]],
            notes=_notes(row["note"]),
            vm_notes=_notes(row["vm_note"]),
            quota_names={name: row[name] or None for name in _QUOTA_COLUMNS},
        )
        for row in rows("gpus")
    }


_QUOTA_COLUMNS = (
    *("vertex_quota_metric", "vertex_quota_id", "compute_quota", "compute_spot_quota", "compute_spot_quota_id"),
    "compute_family",
)


def _notes(cell: str) -> tuple[str, ...]:
    return tuple(cell.split("|")) if cell else ()


@cache
def machines() -> dict[str, tuple[MachineType, ...]]:
    """Machine type -> its shapes: one for most types; for N1 one per GPU kind and count."""
    families = {row["family"]: row for row in rows("families")}
    shapes: dict[str, list[MachineType]] = {}
    for row in rows("machines"):
        family = families[row["family"]]
        auto = row["local_ssd_gib"] != "0" and family["local_ssd_auto"] == "yes"
        shapes.setdefault(row["name"], []).append(_machine(family, row, local_ssd_auto=auto))
    for row in rows("n1"):
        on_vertex, default = row["vertex_counts"].split(), row["default_counts"].split()
        for count in row["counts"].split():
            cells = {**row, "zones": row["gpu"], "gpus": count, "on_vertex": "yes" if count in on_vertex else "no"}
            cells |= {"local_ssd_gib": "0", "note": row["note"] if count == "4" else ""}
            empty = dict.fromkeys(("share", "local_ssd_max_gib", "nics"), "")
            shape = _machine(families["n1"], {**cells, **empty}, default=count in default)
            shapes.setdefault(row["name"], []).append(shape)
    return {name: tuple(shapes) for name, shapes in shapes.items()}


def shapes() -> Iterator[MachineType]:
    return chain.from_iterable(machines().values())


def _machine(family: Row, row: Row, **others: object) -> MachineType:
    """Return a machine of a family; without provisioning models on Vertex AI if it is not offered there."""
    if row["on_vertex"] == "yes":
        others["vertex_warn"] = dict.fromkeys(family["vertex_warn"].split(), family["vertex_why"])
    else:
        others |= {"vertex_provisioning": (), "vertex_default": (), "vertex_warn": {}}
    return _record(MachineType, {**family, **row}, notes=_notes(row.get("note", "") or family["note"]), **others)


@cache
def zones(machines: str) -> tuple[Zone, ...]:
    """Return the zones of a key of zones.csv, uncertain ones last. Only the key's own lines are parsed."""
    with _open("zones", DATA) as file:
        cells = [Zone(zone, region, doubt) for _, zone, region, doubt, *_ in csv.reader(_starting(file, machines))]
    return tuple(sorted(cells, key=lambda zone: bool(zone.doubt)))


@cache
def nccl() -> dict[tuple[str, str], Nccl]:
    """(machine type, service) -> its NCCL settings."""
    lines: dict[tuple[str, str], list[Row]] = {}
    for row in rows("nccl"):
        lines.setdefault((row["machine"], row["service"]), []).append(row)
    settings = {}
    for key, cells in lines.items():
        single = {row["kind"]: row["value"] for row in cells if row["kind"] != "env"}
        env = {row["key"]: row["value"] for row in cells if row["kind"] == "env"}
        settings[key] = Nccl(env, single.get("library_path"), single.get("script"), single["network"])
    return settings


@cache
def after_limit() -> dict[tuple[str, str], AfterLimit]:
    """(service, provisioning model) -> costs after a time limit."""
    return {(row["service"], row["provisioning"]): _record(AfterLimit, row) for row in rows("after_limit")}


@cache
def interruptions() -> dict[str, Interruptions]:
    """Provisioning model -> how often a node is interrupted."""
    return {row["provisioning"]: _record(Interruptions, row) for row in rows("interruptions")}


@cache
def throughput() -> dict[tuple[str, str], Throughput]:
    """Model and GPU -> measured speed per GPU."""
    return {(row["model"], row["gpu"]): _record(Throughput, row) for row in rows("throughput")}


# --- Images -----------------------------------------------------------------------------------------------------------


def wheels() -> dict[str, str | None]:
    """PyTorch's CUDA variant -> the oldest driver branch that supports it."""
    return {row["wheel"]: row["min_driver"] or None for row in rows("wheels")}


def torch_releases() -> tuple[TorchRelease, ...]:
    """The releases of PyTorch, oldest first."""
    return tuple(
        _record(
            TorchRelease,
            row,
            version=row["torch"],
            builds=dict(map(_build, row["builds"].split())),
            companions={name: tuple(row[name].split()) for name in COMPANIONS if row[name]},
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
    return tuple(_record(BaseImage, row) for row in rows("bases"))


def images() -> tuple[ImageFamily, ...]:
    """The Deep Learning VM image families, best first."""
    return tuple(_record(ImageFamily, row) for row in rows("images"))


def transformers_types() -> dict[str, tuple[str, ...]]:
    """A model type of transformers -> the trainer's tasks that it has a head for."""
    return {row["type"]: tuple(row["tasks"].split()) for row in rows("transformers_types")}


# --- Prices -----------------------------------------------------------------------------------------------------------


def price_table(folder: str = DATA) -> PriceTable:
    """Return the date and digest of a folder's prices. Raises OSError, ValueError, KeyError: it has no price table."""
    from hashlib import sha256

    [row] = rows("price_table", folder)
    texts = []
    for name in ("prices", "price_components"):
        with open(os.path.join(folder, f"{name}.csv"), "rb") as file:  # noqa: PTH118, PTH123 -- as DATA
            texts.append(file.read())
    return PriceTable(row["date"], sha256(b"\0".join(texts)).hexdigest()[:16], folder == DATA, folder)


@cache
def prices(machine: str, folder: str = DATA) -> dict[str, RegionPrices]:
    """Region -> prices of a machine. Only the machine's own lines are parsed."""
    with _open("prices", folder) as file:
        return {
            region: RegionPrices(
                region, _usd(listed), list_rule, _usd(flex), flex_rule, _usd(spot), spot_rule, float(disks or 0)
            )
            for _, region, listed, list_rule, flex, flex_rule, spot, spot_rule, disks, *_ in csv.reader(
                _starting(file, machine)
            )
        }


@cache
def components(name: str, folder: str = DATA) -> dict[str, Component]:
    """Region -> the price of a unit of a component."""
    with _open("price_components", folder) as file:
        return {
            region: Component(float(listed), _usd(spot))
            for _, region, listed, spot, *_ in csv.reader(_starting(file, name))
            if _usd(listed)
        }


@cache
def price_rules() -> dict[str, PriceRule]:
    """Key -> the derivation of a figure."""
    return {row["rule"]: _record(PriceRule, row) for row in rows("price_rules")}


@cache
def price_bounds() -> dict[str, PriceBound]:
    """Key -> the factor that bounds a price."""
    return {row["rule"]: _record(PriceBound, row) for row in rows("price_bounds")}


@cache
def rates() -> dict[str, float]:
    """Name -> USD per unit, or a share."""
    return {row["rate"]: float(row["usd"]) for row in rows("rates")}


@cache
def disk_prices() -> dict[tuple[str, str], float]:
    """(disk type, region) -> USD per GB and month."""
    return {
        (kind, row["region"]): float(row[kind])
        for row in rows("disk_prices")
        for kind in ("pd-standard", "pd-balanced", "pd-ssd")
        if row[kind]
    }
