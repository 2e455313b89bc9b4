"""What a run may cost at most, and its cap."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.errors import PlanRefused
from tests.plan.planning import planned


def test_the_sum_is_the_dearest_attempt_times_nodes_times_hours() -> None:
    plan = planned(machine={"type": "h100", "gpus": 8, "nodes": 2}, limits={"hours": 3})
    dearest = max(attempt.usd_per_hour or 0 for attempt in plan.attempts)
    assert plan.limits.usd_at_most == pytest.approx(dearest * 2 * 3)


def test_the_refusal_shows_the_sum_and_what_fits() -> None:
    with pytest.raises(PlanRefused) as refused:
        planned(limits={"hours": 10, "usd": 100})
    assert "$159.46" in refused.value.problem
    assert "x 1 node x 10 h" in refused.value.problem
    assert "--hours 6.27" in refused.value.hint
    planned(limits={"hours": 6.27, "usd": 100})


UNPRICED: dict[str, Any] = {
    "machine": {"type": "a4x-highgpu-4g"},
    "provisioning": ["reservation:projects/p/zones/us-central1-a/reservations/r"],
}
"""No source has a price of it."""


def test_an_unknown_price_under_a_cap_is_refused_unless_it_is_said() -> None:
    with pytest.raises(PlanRefused, match="is unknown"):
        planned(**UNPRICED, limits={"usd": 100})
    plan = planned(**UNPRICED, limits={"usd": 100, "price": 0.6})
    assert plan.limits.usd_at_most == pytest.approx(0.6 * 24)
    assert plan.attempts[0].usd_rule == "as --price says"


def test_without_a_cap_an_unknown_price_is_told() -> None:
    plan = planned(**UNPRICED)
    assert plan.limits.usd_at_most is None
    assert any("unknown" in warning for warning in plan.warnings)


def test_a_derived_price_is_marked() -> None:
    assert planned(provisioning=["spot"]).attempts[0].usd_approx
    vm = planned("vm", machine={"type": "l4", "gpus": 2}, provisioning=["standard"])
    assert not vm.attempts[0].usd_approx
    assert "local SSD" in vm.attempts[0].usd_excludes


def test_local_ssds_that_were_asked_for_are_in_the_sum() -> None:
    fields: dict[str, Any] = {"provisioning": ["standard"], "limits": {"hours": 10}}
    bare = planned("vm", machine={"type": "l4", "gpus": 2}, **fields).limits.usd_at_most
    with_two = planned("vm", machine={"type": "l4", "gpus": 2, "local_ssds": 2}, **fields)
    assert with_two.limits.usd_at_most == pytest.approx((bare or 0) + 2 * 375 * 0.0001096 * 10)
    assert "local SSD" not in with_two.attempts[0].usd_excludes


@pytest.mark.parametrize(("model", "rate"), [("standard", 0.0001425), ("spot", 0.0000855)])
def test_local_ssds_cost_what_their_region_takes(model: str, rate: float) -> None:
    fields: dict[str, Any] = {"provisioning": [model], "regions": ["asia-northeast1"], "limits": {"hours": 1}}
    bare, with_two = (
        planned("vm", machine={"type": "l4", "gpus": 2, "local_ssds": disks}, **fields).attempts[0].usd_per_hour
        for disks in (None, 2)
    )
    assert bare
    assert with_two == pytest.approx(bare + 2 * 375 * rate)


def test_an_upper_bound_is_marked() -> None:
    exact, bound = planned(provisioning=["flex-start"], regions=["us-central1", "us-east4"]).attempts
    assert (exact.usd_is_bound, bound.usd_is_bound) == (False, True)


def test_reduction_servers_have_no_known_price_and_so_no_cap() -> None:
    with pytest.raises(PlanRefused, match="reduction servers"):
        planned(
            machine={"type": "h100", "gpus": 2, "nodes": 2},
            provisioning=["spot"],
            image={"uri": "us-docker.pkg.dev/p/r/i@sha256:" + "0" * 64},
            vertex={"reduction_server": {"replicas": 900}},
            limits={"usd": 2000},
        )


def test_a_cap_that_pays_for_nothing_proposes_no_hours() -> None:
    with pytest.raises(PlanRefused) as refused:
        planned(limits={"usd": 0.001})
    assert "--hours" not in refused.value.hint
