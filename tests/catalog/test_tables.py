"""The tables against their sources, and against each other."""

from __future__ import annotations

import csv
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher import catalog
from launcher.catalog import tables
from launcher.spec.kinds import ZONE

DATA = Path(tables.DATA)
SOURCES = Path(__file__).parents[2] / "tools" / "catalog" / "sources"
LISTED = list(tables.rows("gcp_gpu_machine_regions", str(SOURCES)))
CATALOG = catalog.load()


@pytest.mark.parametrize(
    ("name", "digest"),
    [
        ("gcp_gpu_machine_regions.csv", "858d997c789f515786620bc3e14e5c9c7968c04eb57ee8d7af3245c4c7e63ee9"),
        ("gpu_prices.csv", "96922c61634984a9e31262363b9822d5ae2aff8f18317c2a3ca8d44b0085afca"),
        ("gpu_price_components.csv", "da21dfa679d00b381eed19a0ae90230ecb54f91a9c11b4a7645f283e4b4e2ba8"),
    ],
)
def test_sources_are_unchanged(name: str, digest: str) -> None:
    assert hashlib.sha256((SOURCES / name).read_bytes()).hexdigest() == digest


@pytest.mark.parametrize("kind", ["list", "spot", "flex_start"])
def test_prices_are_those_of_the_source(kind: str) -> None:
    """But for parts of a G4 GPU, whose own SKUs were read later."""
    shipped = {(row["machine"], row["region"]): row[f"{kind}_usd"] for row in tables.rows("prices")}
    different = [
        (row["machine"], row["zone_or_region"], usd)
        for row in tables.rows("gpu_prices", str(SOURCES))
        if (usd := row[f"{kind}_usd"]) and not CATALOG.machines[row["machine"]][0].share
        if abs(float(usd) - float(shipped[row["machine"], row["zone_or_region"]])) > 1e-6
    ]
    assert different == []


def test_components_are_those_of_the_source() -> None:
    source = {(row["component"], row["region"]): row for row in tables.rows("gpu_price_components", str(SOURCES))}
    for row in tables.rows("price_components"):
        listed = source[row["component"], row["region"]]
        assert (row["list_usd"], row["spot_usd"] or listed["spot_usd"]) == (listed["usd_per_hour"], listed["spot_usd"])


def test_every_row_says_where_it_comes_from_and_how_certain_that_is() -> None:
    bare = [
        f"{path.name}: {row}" for path, row in _rows() if not row["source"] or row["certainty"][:1] not in tuple("ABCD")
    ]
    assert bare == []


def test_every_source_key_is_explained() -> None:
    readme = (SOURCES / "README.md").read_text(encoding="utf-8")
    keys = {
        part.split()[0]
        for _, row in _rows()
        for cell in (row["source"], row.get("peak_source", ""))
        for part in cell.split("; ")
        if part
    }
    sections = {key for key in keys if key.startswith("FACTS-")}
    assert {key for key in keys - sections if f"| {key} |" not in readme} == set()
    assert {key for key in sections if f"-{key[6:]}" not in readme} == set()


def test_every_machine_of_the_sources_is_in_the_catalog() -> None:
    assert {row["InstanceType"] for row in LISTED} <= set(CATALOG.machines)


def test_vcpus_and_memory_are_the_sources() -> None:
    listed = {(row["InstanceType"], int(row["vCPUs"]), float(row["MemoryGB"])) for row in LISTED}
    assert listed <= {(shape.name, shape.vcpus, shape.memory_gb) for shape in CATALOG.shapes}


def test_bundled_local_ssds_are_a_multiple_of_375_gib() -> None:
    for shape in CATALOG.shapes:
        assert shape.local_ssd_auto == (shape.local_ssd_gib > 0), shape.name
        assert shape.local_ssd_gib % 375 == 0, shape.name


def test_every_shape_has_a_known_gpu_and_is_available_somewhere() -> None:
    for shape in CATALOG.shapes:
        assert shape.gpu in CATALOG.gpus, shape.name
        assert shape.compute_provisioning, shape.name
        assert shape.on_vertex == bool(shape.vertex_provisioning), shape.name


def test_default_provisioning_models_are_allowed() -> None:
    for shape in CATALOG.shapes:
        assert set(shape.compute_default) <= set(shape.compute_provisioning), shape.name
        assert set(shape.vertex_default) <= set(shape.vertex_provisioning), shape.name
        assert set(shape.vertex_warn) <= set(shape.vertex_provisioning), shape.name
        assert shape.boot_disk_default in shape.boot_disk_types, shape.name
        assert not shape.on_vertex or shape.vertex_boot_disk_default in shape.vertex_boot_disk_types, shape.name


def test_a_gpu_and_a_count_mean_one_shape() -> None:
    defaults = [(shape.gpu, shape.gpus) for shape in CATALOG.shapes if shape.default]
    assert len(defaults) == len(set(defaults))
    assert {gpu for gpu, _ in defaults} == {gpu.name for gpu in CATALOG.gpus.values() if not gpu.shut_down}


def test_prices_know_only_rules_that_are_written_down() -> None:
    rules = tables.price_rules()
    used = {
        rule
        for machine in CATALOG.machines
        for known in tables.prices(machine).values()
        for usd, rule in (
            (known.listed, known.list_rule),
            (known.flex_start, known.flex_rule),
            (known.spot, known.spot_rule),
        )
        if usd is not None
    }
    assert used | {"n1-list", "n1-spot"} == set(rules)
    assert {rule.kind for rule in rules.values()} == {"exact", "derived", "bound", "estimate"}


def test_every_machine_has_zones_or_regions() -> None:
    for shape in CATALOG.shapes:
        assert CATALOG.regions(shape), shape.name
        assert all(re.fullmatch(ZONE, zone) for zone in CATALOG.zones(shape)), shape.name
        assert CATALOG.vertex_regions(shape) or not shape.on_vertex, shape.name
    for row in tables.rows("zones"):
        assert not row["zone"] or catalog.region_of(row["zone"]) == row["region"]
        assert bool(row["doubt"]) == (row["certainty"] == "C")


def _rows() -> Iterator[tuple[Path, dict[str, str]]]:
    """All rows of all tables that hold facts; price_rules.csv explains ours."""
    for path in sorted(DATA.glob("*.csv")):
        if path.name != "price_rules.csv":
            with path.open(encoding="utf-8", newline="") as file:
                yield from ((path, row) for row in csv.DictReader(file))
