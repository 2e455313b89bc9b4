"""`launch gpus`: the offers, their restrictions and orders, in 80 columns."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest

from launcher import catalog
from launcher.catalog.offers import MODELS, OfferQuery, offers
from tests.command import launch

CATALOG = catalog.load()
FOOTER = re.compile(r"(\d+) of (\d+) offers; prices of (\d{4}-\d\d-\d\d)")


def data(*argv: str) -> dict[str, Any]:
    ran = launch("gpus", *argv, "-o", "json")
    assert (ran.code, ran.err) == (0, "")
    found: dict[str, Any] = json.loads(ran.out)
    return found


def lowest(offer: dict[str, Any]) -> float:
    return min((one["low"] for one in offer["usd_per_gpu_hour"].values() if one["low"]), default=math.inf)


@pytest.mark.parametrize("more", [(), ("--region", "any"), ("--region", "us-central1"), ("--provisioning", "spot")])
def test_the_table_has_80_columns_and_a_footer(more: tuple[str, ...]) -> None:
    ran = launch("gpus", *more)
    assert ran.code == 0
    lines = ran.out.splitlines()
    assert max(map(len, lines)) <= 80
    footer = FOOTER.fullmatch(lines[-1])
    assert footer
    found = data(*more)
    assert (int(footer[1]), int(footer[2])) == (len(found["offers"]), found["total"])
    assert footer[3] == found["prices"]["date"]


def test_every_gpu_is_listed_with_all_of_its_machine_types() -> None:
    found = data()
    assert {one["gpu"] for one in found["offers"]} == set(CATALOG.gpus) - {"p100"}
    [h100] = [one for one in found["offers"] if one["gpu"] == "h100"]
    counts = {one["machine_type"]: one["gpus"] for one in h100["machines"]}
    assert (counts["a3-highgpu-1g"], counts["a3-highgpu-2g"], counts["a3-highgpu-8g"]) == (1, 2, 8)
    assert (h100["memory_gb"], h100["bf16_tflops"], len(h100["regions"])) == (80, 989.0, 20)
    shown = launch("gpus", "--type", "h100").out
    assert "a3-highgpu-8g ×8" in shown
    assert "20 regions" in shown


def test_the_cheapest_region_is_named() -> None:
    [a100] = data("--type", "a100-40gb")["offers"]
    for model, place in a100["cheapest_region"].items():
        [there] = data("--type", "a100-40gb", "--region", place)["offers"]
        assert there["usd_per_gpu_hour"][model]["low"] == a100["usd_per_gpu_hour"][model]["low"]
    shown = " ".join(launch("gpus", "--type", "a100-40gb").out.split())
    assert f"spot cheapest in {a100['cheapest_region']['spot']}" in shown
    assert "cheapest in" not in launch("gpus", "--type", "a100-40gb", "--region", "us-central1").out


def test_the_price_of_a_gpu_is_the_nodes_share() -> None:
    [found] = data("--type", "a3-highgpu-8g", "--region", "us-central1")["offers"]
    assert found["usd_per_gpu_hour"]["standard"]["low"] == pytest.approx(88.49 / 8)
    assert found["usd_per_gpu_hour"]["flex-start"] == pytest.approx(
        {"low": 38.320 / 8, "high": 38.320 / 8, "bound": False, "approx": False}, abs=1e-3
    )
    assert [one["machine_type"] for one in found["machines"]] == ["a3-highgpu-8g"]


def test_part_of_a_gpu_is_priced_per_whole_gpu() -> None:
    """0.64688 for an eighth (tools/catalog/sources): google's machineTypes.list calls it one GPU."""
    [found] = data("--type", "g4-standard-6")["offers"]
    assert found["usd_per_gpu_hour"]["standard"]["low"] == pytest.approx(8 * 0.64688)
    assert data("--type", "g4-standard-6", "--memory", "40GB")["offers"] == []


def test_the_cheapest_is_first() -> None:
    for more in ((), ("--region", "any"), ("--provisioning", "flex-start")):
        prices = [lowest(one) for one in data(*more)["offers"]]
        assert prices == sorted(prices)
        assert len(set(prices)) > 3


@pytest.mark.parametrize(("order", "field"), [("memory", "memory_gb"), ("flops", "bf16_tflops")])
def test_other_orders_have_the_largest_first(order: str, field: str) -> None:
    found = [one[field] or 0 for one in data("--sort", order)["offers"]]
    assert found == sorted(found, reverse=True)


def test_restrictions() -> None:
    assert {one["memory_gb"] >= 80 for one in data("--memory", "80 GB")["offers"]} == {True}
    spot = data("--provisioning", "spot", "--max-usd", "1")["offers"]
    assert 0 < len(spot) < len(data("--provisioning", "spot")["offers"])
    assert {(*one["usd_per_gpu_hour"],) for one in spot} == {("spot",)}
    assert {lowest(one) <= 1 for one in spot} == {True}
    regions = data("--region", "us-central1", "--region", "europe-west4")["offers"]
    assert {one["region"] for one in regions} == {"us-central1", "europe-west4"}


def test_the_table_has_only_the_columns_of_the_chosen_models() -> None:
    head = launch("gpus", "--provisioning", "spot", "--provisioning", "standard").out.splitlines()[0]
    assert head.split() == ["GPU", "GB", "bf16", "where", "standard", "spot"]


def test_any_region_has_an_offer_for_each_region_of_a_gpu() -> None:
    found = data("--type", "h200", "--region", "any")["offers"]
    assert sorted(one["region"] for one in found) == sorted(CATALOG.regions(CATALOG.machines["a3-ultragpu-8g"][0]))


def test_an_unknown_price_is_a_bound_or_unknown_and_never_zero() -> None:
    found, _ = offers(CATALOG, OfferQuery(regions=("any",)))
    every = [price for one in found for price in one.prices.values()]
    assert all(price.low is None or price.low > 0.05 for price in every)
    [mega] = [one for one in found if (one.gpu.name, one.region) == ("h100-mega", "europe-north1")]
    assert mega.prices["spot"].bound  # no Spot price there: at most 0.60 times the list price
    assert "$0" not in launch("gpus").out


def test_what_is_only_reserved_is_last_and_has_no_price() -> None:
    found = data()["offers"]
    assert {one["gpu"] for one in found[-2:]} == {"gb200", "gb300"}
    assert found[-1]["usd_per_gpu_hour"] == {}
    assert "gb200" not in {one["gpu"] for model in MODELS for one in data("--provisioning", model)["offers"]}


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--type", "h10"), "h100"),
        (("--type", "a100"), "a100-80gb"),
        (("--region", "us-centrall1"), "us-central1"),
        (("--region", "any", "--region", "us-central1"), "any"),
        (("--provisioning", "preemptible"), "spot"),
        (("--memory", "lots"), "40GB"),
        (("--max-usd", "0"), "--max-usd"),
        (("--max-usd", "nan"), "--max-usd"),
    ],
)
def test_a_wrong_value_is_refused(argv: tuple[str, ...], words: str) -> None:
    ran = launch("gpus", *argv)
    assert ran.code == 2
    assert ran.out == ""
    assert words in ran.err
    assert "Traceback" not in ran.err
