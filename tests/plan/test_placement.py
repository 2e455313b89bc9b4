"""Where a run is tried, and in which order."""

from __future__ import annotations

import pytest

from launcher.errors import PlanRefused
from tests.plan.planning import planned


def tried(**fields: object) -> list[tuple[str, str]]:
    return [(attempt.provisioning, attempt.region) for attempt in planned(**fields).attempts]  # type: ignore[arg-type]  # fields of a spec


def test_placements_follow_the_specs_provisioning_order() -> None:
    assert tried(provisioning=["spot", "flex-start"], regions=["us-east5", "us-central1"]) == [
        ("spot", "us-east5"),
        ("spot", "us-central1"),
        ("flex-start", "us-east5"),
        ("flex-start", "us-central1"),
    ]


def test_any_goes_cheapest_first_and_unknown_prices_last() -> None:
    prices = [attempt.usd_per_hour for attempt in planned(regions="any", provisioning=["spot"]).attempts]
    known = [price for price in prices if price is not None]
    assert len(known) > 3
    assert known == sorted(known)
    assert None not in prices[: len(known)]


def test_without_lists_the_lowest_expected_cost_comes_first_over_regions_and_models() -> None:
    attempts = planned(regions="any", provisioning=None).attempts
    spot = 1 + 0.25 / 160
    costs = [
        (attempt.usd_per_hour or 0) * (spot if attempt.provisioning == "spot" else 1 + 0.25 / 3692)
        for attempt in attempts
        if not attempt.usd_is_bound and attempt.usd_per_hour is not None
    ]
    assert costs == sorted(costs)
    kinds = [attempt.provisioning for attempt in attempts]
    assert kinds[0] == "spot"  # $6.18/h in europe-north1
    assert "spot" in kinds[kinds.index("flex-start") :]


def test_the_regions_of_the_spec_keep_their_order_with_the_cheaper_model_first() -> None:
    assert tried(regions=["us-east5", "us-central1"], provisioning=None) == [
        ("spot", "us-east5"),
        ("spot", "us-central1"),
        ("flex-start", "us-east5"),
        ("flex-start", "us-central1"),
    ]


def test_gclouds_region_is_used_when_the_spec_names_none() -> None:
    plan = planned(regions=None, world={"default_regions": ("us-east5",)})
    assert {attempt.region for attempt in plan.attempts} == {"us-east5"}


def test_without_any_region_the_candidates_are_named_with_prices() -> None:
    with pytest.raises(PlanRefused) as refused:
        planned(regions=None)
    assert "us-central1" in refused.value.hint
    assert "/h" in refused.value.hint


def test_zones_of_a_vm() -> None:
    plan = planned("vm", provisioning=["spot"], regions=["us-central1"])
    assert [attempt.zone for attempt in plan.attempts] == ["us-central1-a", "us-central1-b", "us-central1-c"]


def test_zones_narrow_a_vm() -> None:
    plan = planned("vm", provisioning=["spot"], regions=None, zones=["us-east5-a"])
    assert [(attempt.region, attempt.zone) for attempt in plan.attempts] == [("us-east5", "us-east5-a")]


def test_a_zone_without_the_machine() -> None:
    with pytest.raises(PlanRefused, match="not available in us-east5-b"):
        planned("vm", provisioning=["spot"], regions=None, zones=["us-east5-b"])


def test_an_ai_zone_that_is_named_is_tried() -> None:
    plan = planned("vm", provisioning=["spot"], regions=None, zones=["us-central1-ai1a"])
    assert [(attempt.region, attempt.zone) for attempt in plan.attempts] == [("us-central1", "us-central1-ai1a")]
    assert any("us-central1-ai1a" in warning for warning in plan.warnings)
    ordinary = planned("vm", provisioning=["spot"], regions=["us-central1"])
    assert not any("-ai" in str(attempt.zone) for attempt in ordinary.attempts)


def test_zones_only_narrow_the_regions_on_vertex() -> None:
    plan = planned(regions=None, zones=["us-central1-a"], provisioning=["spot"])
    assert [(attempt.region, attempt.zone) for attempt in plan.attempts] == [("us-central1", None)]
    assert any("chooses the zone" in warning for warning in plan.warnings)


def test_a_vm_where_zones_are_unknown_asks_for_one() -> None:
    with pytest.raises(PlanRefused, match=r"zones .*are unknown"):
        planned("vm", machine={"type": "a3-edgegpu-8g"})
    named = planned("vm", machine={"type": "a3-edgegpu-8g"}, zones=["us-central1-f"])
    assert named.attempts[0].zone == "us-central1-f"


def test_regions_any_without_known_zones_is_refused() -> None:
    with pytest.raises(PlanRefused, match=r"zones .*are unknown") as refused:
        planned("vm", machine={"type": "a3-edgegpu-8g"}, regions="any")
    assert "--zone" in refused.value.hint


def test_a3_high_on_demand_is_refused_on_compute_engine() -> None:
    with pytest.raises(PlanRefused, match="not available as standard on Compute Engine"):
        planned("vm", provisioning=["standard"])
