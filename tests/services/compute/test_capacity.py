"""The order of Spot zones by Google's advice."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from launcher.plan.model import Attempt
from launcher.services.compute.capacity import order_by_capacity, order_by_score, score_of
from launcher.testing.googlecloud import Fault, Reset, Status
from tests.services.compute.vm_site import Site, plan_of

ADVICE = "compute.*advice.capacity"
FIRST = plan_of().attempts[0]


def one(zone: str, price: float | None = 1.0, model: str = "spot") -> Attempt:
    return replace(FIRST, zone=f"us-central1-{zone}", usd_per_hour=price, provisioning=model)


def test_the_likeliest_zone_comes_first(site: Site) -> None:
    plan = plan_of()
    zones = [str(attempt.zone) for attempt in plan.attempts]
    assert len({attempt.usd_per_hour for attempt in plan.attempts}) == 1
    site.cloud.compute.zones.scores.update(zip(zones, (0.2, 0.9, 0.6), strict=True))
    found, lines = order_by_capacity(plan, site.compute)
    assert [attempt.zone for attempt in found.attempts] == [zones[1], zones[2], zones[0]]
    assert lines == (
        f"Spot capacity now, according to Google (1 = best): {zones[1]} 0.9, {zones[2]} 0.6, {zones[0]} 0.2",
    )
    assert replace(found, attempts=plan.attempts) == plan
    [asked, *_] = [request.body for request in site.cloud.requests]
    assert asked["instanceFlexibilityPolicy"] == {
        "instanceSelections": {"launch": {"machineTypes": ["g2-standard-12"]}}
    }


@pytest.mark.parametrize("effect", [Status(403, message="Required 'compute.advice.capacity'"), Status(404), Reset()])
def test_what_can_not_be_read_changes_nothing(site: Site, effect: Status | Reset) -> None:
    site.cloud.faults.add(Fault(ADVICE, effect, times=99))
    found, [line] = order_by_capacity(plan_of(), site.compute)
    assert found == plan_of()
    assert line.startswith("no advice on Spot capacity: Compute Engine")


def test_one_zone_without_an_answer_stays_behind(site: Site) -> None:
    site.cloud.faults.add(Fault(ADVICE, Status(500)))
    found, _ = order_by_capacity(plan_of(), site.compute)
    assert {attempt.zone for attempt in found.attempts} == {attempt.zone for attempt in plan_of().attempts}


def test_on_demand_is_not_asked_about(site: Site) -> None:
    plan = plan_of(1, "standard")
    assert order_by_capacity(plan, site.compute) == (plan, ())
    assert site.cloud.requests == []


@pytest.mark.parametrize(
    ("attempts", "expected"),
    [
        ([one("a"), one("b")], "ba"),
        ([one("a", 1.0), one("b", 2.0)], "ab"),
        ([one("a"), one("c", 1.5), one("b")], "acb"),
        ([one("a", None), one("b", None)], "ab"),
        ([one("a", model="standard"), one("b", model="standard")], "ab"),
        ([one("x"), one("a"), one("y"), one("b")], "baxy"),
        ([one("a", model="standard"), one("a"), one("b"), one("b", 3.0)], "abab"),
    ],
)
def test_never_across_prices_or_models(attempts: list[Attempt], expected: str) -> None:
    found = order_by_score(attempts, {"us-central1-a": 0.1, "us-central1-b": 0.9})
    assert "".join(str(each.zone)[-1] for each in found) == expected
    assert [(each.usd_per_hour, each.provisioning) for each in found] == [
        (each.usd_per_hour, each.provisioning) for each in attempts
    ]


def test_the_score_of_another_zone_is_none() -> None:
    advice = {"recommendations": [{"scores": {"obtainability": 0.7}, "shards": [{"zone": "x/zones/us-central1-a"}]}]}
    assert score_of(advice, "us-central1-a") == 0.7
    assert score_of(advice, "us-central1-b") is None
    assert score_of({}, "us-central1-a") is None
