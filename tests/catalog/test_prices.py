"""Prices: the worked figures, the traps in the sources, and the rules between Compute Engine and Vertex AI."""

from __future__ import annotations

import msgspec
import pytest

from launcher import catalog
from launcher.catalog import MachineType, Price, Service, derive, prices
from launcher.catalog.model import ZonePrices

CATALOG = catalog.load()
SCRAPED = derive.read(derive.HERE / "sources" / "gcp_gpu_prices_by_zone.csv")


def usd(name: str, service: Service, provisioning: str, place: str) -> float | None:
    return _price(name, service, provisioning, place).usd


@pytest.mark.parametrize(
    ("name", "service", "provisioning", "place", "expected"),
    [
        ("a3-highgpu-2g", "vertex", "flex-start", "us-central1", 12.87),
        ("a3-highgpu-2g", "vertex", "spot", "us-central1", 10.17),
        ("a2-ultragpu-2g", "vertex", "standard", "us-central1", 11.66),
        ("g2-standard-24", "vertex", "standard", "us-central1", 2.30),
        ("a3-highgpu-2g", "compute", "flex-start", "us-central1", 9.58),
        ("a3-highgpu-2g", "compute", "standard", "us-central1", 22.12),
        ("a3-highgpu-8g", "compute", "flex-start", "us-central1", 38.32),
        ("a3-highgpu-8g", "compute", "standard", "us-central1", 88.49),
        ("a2-ultragpu-2g", "compute", "standard", "us-central1", 10.14),
        ("g2-standard-24", "compute", "standard", "us-central1", 2.00),
        ("g2-standard-24", "compute", "spot", "us-central1", 0.80),
        ("a4-highgpu-8g", "compute", "flex-start", "us-east4-b", 64.44 + 12000 * 0.0001096),
        ("a3-ultragpu-8g", "compute", "spot", "us-east4", 31.46 + 12000 * 0.0001096),
    ],
)
def test_worked_figures(name: str, service: Service, provisioning: str, place: str, expected: float) -> None:
    assert usd(name, service, provisioning, place) == pytest.approx(expected, abs=0.006)


def test_the_fee_is_what_the_bills_show() -> None:
    """2 GPUs, 52 vCPUs and 468 GB at the management fee's SKUs."""
    fee = 2 * 1.4694826 + 52 * 0.0038247 + 468 * 0.0003331
    on_vertex = usd("a3-highgpu-2g", "vertex", "spot", "us-central1-a")
    on_compute = usd("a3-highgpu-2g", "compute", "spot", "us-central1-a")
    assert on_vertex is not None
    assert on_compute is not None
    assert on_vertex - on_compute == pytest.approx(fee, abs=0.001)


def test_a_flex_start_figure_is_never_taken_for_a_list_price() -> None:
    found = _price("a3-highgpu-2g", "compute", "standard", "us-west1")
    assert found.usd is None
    assert "no list price of a3-highgpu-2g in us-west1-a is known" in found.rule
    assert usd("a3-highgpu-2g", "compute", "flex-start", "us-west1") == pytest.approx(10.77 + 0.16, abs=0.01)


def test_no_flagged_row_gives_a_list_price() -> None:
    flagged = [row for row in SCRAPED if "is_DWS" in row["Flag"] and row["InstanceType"] != "a4-highgpu-8g"]
    assert len(flagged) > 40
    for row in flagged:
        assert usd(row["InstanceType"], "compute", "standard", row["Zone"]) is None


def test_without_a_list_price_vertex_is_unknown() -> None:
    found = _price("a3-highgpu-2g", "vertex", "spot", "us-west1")
    assert found.usd is None
    assert found.approx
    assert found.rule == "Vertex AI adds 15 % of the list price, and none is known in us-west1-a"


def test_an_unknown_flex_start_price_stays_unknown() -> None:
    assert usd("a3-highgpu-2g", "compute", "flex-start", "us-east4") is None


@pytest.mark.parametrize(("name", "place"), [("a2-highgpu-1g", "us-central1"), ("a3-highgpu-2g", "moon-base1")])
def test_a_place_without_prices(name: str, place: str) -> None:
    assert _price(name, "compute", "spot", place) == Price(
        usd=None, approx=True, rule=f"no price of {name} in {place} is known", source="", date="", excludes=()
    )


@pytest.mark.parametrize("row", SCRAPED[::7], ids=lambda row: f"{row['InstanceType']}-{row['Zone']}")
def test_spot_is_the_scraped_price_and_the_disks(row: dict[str, str]) -> None:
    disks = int(row["BundledLocalSsdGiB(not_in_price)"]) * 0.0001096
    found = _price(row["InstanceType"], "compute", "spot", row["Zone"])
    assert found.usd == pytest.approx(float(row["SpotPriceUSDh"]) + disks)
    assert found.approx == (disks > 0)


@pytest.mark.parametrize(
    ("service", "provisioning", "place", "approx"),
    [
        ("compute", "standard", "us-central1", False),
        ("compute", "flex-start", "us-central1", False),
        ("compute", "flex-start", "us-west1", True),
        ("compute", "spot", "us-central1", True),
        ("compute", "reservation", "us-central1", True),
        ("vertex", "standard", "us-central1", True),
        ("vertex", "flex-start", "us-central1", True),
    ],
)
def test_what_a_rule_derived_is_marked(service: Service, provisioning: str, place: str, approx: bool) -> None:
    assert _price("a3-highgpu-8g", service, provisioning, place).approx is approx


def test_a_reservation_costs_the_list_price_however_it_is_written() -> None:
    named = "reservation:projects/p/zones/us-central1-a/reservations/r"
    assert usd("a3-highgpu-8g", "compute", named, "us-central1-a") == pytest.approx(88.49, abs=0.01)
    assert usd("a3-highgpu-8g", "vertex", named, "us-central1-a") == pytest.approx(88.49 + 0.15 * 87.83, abs=0.01)


def test_l4_has_no_flex_start_price_of_its_own() -> None:
    found = _price("g2-standard-24", "compute", "flex-start", "us-central1")
    assert (found.usd, found.approx) == (2.00082, True)
    assert "list price" in found.rule


def test_a_third_partys_figure_is_marked() -> None:
    found = _price("a4-highgpu-8g", "compute", "standard", "us-central1")
    assert found.usd == pytest.approx(128.88 + 12000 * 0.0001096)
    assert found.approx
    assert "third party" in found.rule


def test_where_a_figure_comes_from_and_what_it_leaves_out() -> None:
    found = _price("a3-highgpu-2g", "vertex", "flex-start", "us-central1")
    assert found.source == "SKYCAT 006059e0; ZENN"
    assert found.date == "2026"
    assert found.excludes == ("boot disk", "network traffic")
    assert _price("g2-standard-8", "compute", "spot", "us-central1").excludes == (
        "boot disk",
        "local SSD",
        "network traffic",
    )


def test_a_region_takes_its_dearest_known_zone() -> None:
    zones = [_zone("us-east9-a", 3.0), _zone("us-east9-b", 5.0), _zone("us-east9-c", None), _zone("us-east99-a", 9.0)]
    found = _made("us-east9", zones)
    assert (found.usd, found.zone) == (5.0, "us-east9-b")
    assert found.rule == "list price; of us-east9's zones the dearest, us-east9-b"
    assert _made("us-east9-a", zones).usd == 3.0
    assert _made("us-east9-c", zones).usd is None


def test_what_a_disk_costs_a_month() -> None:
    found = CATALOG.disk_price("pd-balanced", "us-central1")
    assert found is not None
    assert (found.usd, found.unit, found.date) == (0.1, "GB and month", "2025-03-06")
    assert CATALOG.disk_price("pd-ssd", "europe-west10") == catalog.Rate(0.2618, *msgspec.structs.astuple(found)[1:])
    assert CATALOG.disk_price("hyperdisk-balanced", "us-central1") is None
    assert CATALOG.disk_price("pd-balanced", "us-nowhere1") is None


def _zone(name: str, listed: float | None) -> ZonePrices:
    return ZonePrices(name, listed, "list", None, "", None, "", "SKYCAT", "2026")


def _made(place: str, zones: list[ZonePrices]) -> Price:
    order = prices.Order(_shape("g2-standard-24"), "compute", "standard")
    return prices.price(order, place, zones, prices.Tariff({"list": ("list price", False)}, CATALOG.rates))


def _price(name: str, service: Service, provisioning: str, place: str) -> Price:
    return CATALOG.price(_shape(name), service, provisioning, place)


def _shape(name: str) -> MachineType:
    return CATALOG.machines[name][0]
