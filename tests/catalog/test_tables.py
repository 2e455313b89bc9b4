"""The tables against their sources, and against each other."""

from __future__ import annotations

import csv
import hashlib
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher import catalog
from launcher.catalog import tables
from launcher.spec.kinds import ZONE
from tools.catalog import derive

LISTED = derive.read(derive.SOURCES / "gcp_gpu_machine_regions.csv")
SCRAPED = derive.read(derive.SOURCES / "gcp_gpu_prices_by_zone.csv")
CATALOG = catalog.load()


@pytest.mark.parametrize(
    ("name", "digest"),
    [
        ("gcp_gpu_machine_regions.csv", "858d997c789f515786620bc3e14e5c9c7968c04eb57ee8d7af3245c4c7e63ee9"),
        ("gpu_prices.csv", "96922c61634984a9e31262363b9822d5ae2aff8f18317c2a3ca8d44b0085afca"),
        ("gpu_price_components.csv", "da21dfa679d00b381eed19a0ae90230ecb54f91a9c11b4a7645f283e4b4e2ba8"),
        ("gcp_gpu_prices_by_zone.csv", "0e777176c2ba31e021437ee79ed716cdb3ceaeaa3b2240ab26841fb2e0ddb838"),
    ],
)
def test_sources_are_unchanged(name: str, digest: str) -> None:
    assert hashlib.sha256((derive.SOURCES / name).read_bytes()).hexdigest() == digest


@pytest.mark.parametrize("name", ["regions.csv", "zones.csv", "prices.csv", "price_components.csv"])
def test_derived_tables_are_what_the_sources_give(name: str) -> None:
    assert (derive.DATA / name).read_text(encoding="utf-8") == derive.derive(derive.SOURCES, derive.DATA)[name]


def test_check_finds_a_price_changed_by_hand(tmp_path: Path) -> None:
    sources, data = tmp_path / "sources", tmp_path / "data"
    shutil.copytree(derive.SOURCES, sources)
    shutil.copytree(derive.DATA, data)
    assert derive.main(["--check"], sources, data) is None
    prices = data / "prices.csv"
    prices.write_text(prices.read_text(encoding="utf-8").replace("52.962297", "26.83"), encoding="utf-8")
    assert derive.main(["--check"], sources, data) == ("out of date: prices.csv; run python -m tools.catalog.derive")
    assert derive.main([], sources, data) is None
    assert derive.main(["--check"], sources, data) is None


def test_a_price_of_an_unknown_kind_or_source_is_not_taken() -> None:
    with pytest.raises(ValueError, match="a guess"):
        derive.figure("list", "1", derive.LIST_RULES, "list=a guess")
    with pytest.raises(ValueError, match="no key"):
        derive.source_keys("someone's blog")


def test_the_derivation_and_its_sources_are_not_shipped() -> None:
    assert not (derive.DATA.parent / "sources").exists()
    assert derive.SOURCES.is_relative_to(Path(__file__).parents[2] / "tools")


def test_every_row_says_where_it_comes_from_and_how_certain_that_is() -> None:
    bare = [
        f"{path.name}: {row}" for path, row in _rows() if not row["source"] or row["certainty"][:1] not in tuple("ABCD")
    ]
    assert bare == []


def test_every_source_key_is_explained() -> None:
    readme = (derive.SOURCES / "README.md").read_text(encoding="utf-8")
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
    assert {row["InstanceType"] for row in [*LISTED, *SCRAPED]} <= set(CATALOG.machines)


def test_every_accelerator_optimised_machine_has_regions() -> None:
    without = [name for name, shapes in CATALOG.machines.items() if not CATALOG.regions(shapes[0])]
    assert all(name.startswith("n1-") for name in without), without


@pytest.mark.parametrize("rows", [LISTED, SCRAPED], ids=["regions", "prices"])
def test_vcpus_and_memory_are_the_sources(rows: list[dict[str, str]]) -> None:
    seen = {
        (line["InstanceType"], int(line["vCPUs"]), float(line.get("MemoryGB") or line["MemoryGiB"])) for line in rows
    }
    ours = {(shape.name, shape.vcpus, shape.memory_gb) for shapes in CATALOG.machines.values() for shape in shapes}
    assert seen <= ours


def test_gpus_and_bundled_disks_are_the_sources() -> None:
    seen = {
        (line["InstanceType"], int(line["AcceleratorCount"]), int(line["BundledLocalSsdGiB(not_in_price)"]))
        for line in SCRAPED
    }
    ours = {(shape.name, shape.gpus, shape.local_ssd_gib) for shapes in CATALOG.machines.values() for shape in shapes}
    assert seen <= ours


def test_bundled_local_ssds_are_a_multiple_of_375_gib() -> None:
    for shape in _shapes():
        assert shape.local_ssd_auto == (shape.local_ssd_gib > 0), shape.name
        assert shape.local_ssd_gib % 375 == 0, shape.name


def test_every_shape_has_a_known_gpu_and_is_available_somewhere() -> None:
    for shape in _shapes():
        assert shape.gpu in CATALOG.gpus, shape.name
        assert shape.compute_provisioning, shape.name
        assert shape.on_vertex == bool(shape.vertex_provisioning), shape.name


def test_default_provisioning_models_are_allowed() -> None:
    for shape in _shapes():
        assert set(shape.compute_default) <= set(shape.compute_provisioning), shape.name
        assert set(shape.vertex_default) <= set(shape.vertex_provisioning), shape.name
        assert set(shape.vertex_warn) <= set(shape.vertex_provisioning), shape.name
        assert shape.boot_disk_default in shape.boot_disk_types, shape.name
        assert not shape.on_vertex or shape.vertex_boot_disk_default in shape.vertex_boot_disk_types, shape.name


def test_a_gpu_and_a_count_mean_one_shape() -> None:
    defaults = [(shape.gpu, shape.gpus) for shape in _shapes() if shape.default]
    assert len(defaults) == len(set(defaults))
    assert {gpu for gpu, _ in defaults} == set(CATALOG.gpus)


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
    assert {rule.kind for rule in rules.values()} == {"exact", "derived", "bound", "reported"}


def test_zones_lie_in_listed_regions() -> None:
    for shape in _shapes():
        assert all(re.fullmatch(ZONE, zone) for zone in CATALOG.zones(shape)), shape.name
        regions = {zone.rpartition("-")[0] for zone in CATALOG.zones(shape)}
        assert regions <= set(CATALOG.regions(shape)), shape.name


def _rows() -> Iterator[tuple[Path, dict[str, str]]]:
    """All rows of all tables that hold facts; price_rules.csv explains ours."""
    for path in sorted(derive.DATA.glob("*.csv")):
        if path.name != "price_rules.csv":
            with path.open(encoding="utf-8", newline="") as file:
                yield from ((path, row) for row in csv.DictReader(file))


def _shapes() -> list[catalog.MachineType]:
    return [shape for shapes in CATALOG.machines.values() for shape in shapes]
