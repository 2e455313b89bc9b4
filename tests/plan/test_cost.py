"""What a run may cost at most, and its cap."""

from __future__ import annotations

import math
from typing import Any

import pytest
from msgspec.structs import replace

from launcher.catalog import prices
from launcher.catalog.model import RegionPrices
from launcher.errors import PlanRefused
from launcher.plan import cost
from tests.plan.planning import CATALOG, planned, spec


def test_the_sum_is_the_dearest_attempt_times_nodes_times_hours() -> None:
    plan = planned(machine={"type": "h100", "gpus": 8, "nodes": 2}, limits={"hours": 3})
    disk = 200 * 0.17 / 730 * 1.15
    for total, rates, hours in (
        (plan.limits.usd_at_most, [one.usd_ceiling for one in plan.attempts], 3 + 150 / 3600),
        (plan.limits.usd_hard_bound, [one.usd_hard_bound for one in plan.attempts], 4 * (3 + 150 / 3600)),
    ):
        assert total == pytest.approx((max(rate or 0 for rate in rates) + disk) * 2 * hours)


MIXED: dict[str, Any] = {"regions": ["us-central1", "asia-northeast1"], "provisioning": ["standard", "spot"]}
"""Four attempts on two H100s with four prices: the dearest hour is the second, the dearest with Vertex AI's restarts
(6 for Spot, 3 for standard) the last."""


def test_of_attempts_with_different_prices_the_dearest_counts() -> None:
    plan = planned(**MIXED, limits={"hours": 10})
    _, dearest, _, most_restarts = plan.attempts
    disk = dearest.usd_extras["boot disk"]
    assert len({(one.usd_per_hour, one.usd_ceiling, one.usd_hard_bound) for one in plan.attempts}) == 4
    assert dearest.usd_ceiling == pytest.approx(1.15 * 31.660848)
    assert plan.limits.usd_at_most == pytest.approx((1.15 * 31.660848 + disk) * (10 + 150 / 3600))
    restarted = ((most_restarts.usd_hard_bound or 0) + disk) * (10 + 60 / 3600) * 7
    assert restarted > ((dearest.usd_hard_bound or 0) + disk) * (10 + 150 / 3600) * 4
    assert plan.limits.usd_hard_bound == pytest.approx(restarted)


GPT2: dict[str, Any] = {"run": {"config": {"model": "gpt2-124m", "steps": 2000, "batch_size": 256}}}


def test_the_expected_cost_is_that_of_the_estimated_time_in_the_first_attempt() -> None:
    plan = planned(**MIXED, **GPT2)
    first, limits = plan.attempts[0], plan.limits
    hours = 2000 * 256 * 1024 / (2 * 463_000) / 3600
    assert limits.hours_expected == pytest.approx(hours)
    assert "llm.c on 8 H100" in limits.hours_basis
    lost = hours / 3692 * 0.25
    rate = (first.usd_per_hour or 0) + first.usd_extras["boot disk"]
    assert limits.usd_expected == pytest.approx(rate * (1 / 6 + hours + lost))


def test_no_duration_and_no_cost_is_expected_of_an_unknown_program() -> None:
    limits = planned(**MIXED).limits
    assert (limits.hours_expected, limits.usd_expected) == (None, None)
    assert limits.hours_basis == "the program is not the built-in trainer"


def test_a_step_of_a_small_model_takes_no_longer_than_that_of_a_measured_one() -> None:
    small = {"model": "gpt", "steps": 1000}
    h100 = planned(run={"config": small}).limits.hours_expected or 0
    l4 = planned(machine={"type": "l4", "gpus": 2}, run={"config": small}).limits.hours_expected or 0
    assert h100 == pytest.approx(1000 * 16_384 / 455_000 / 3600)
    assert l4 == pytest.approx(h100 * 312 / 121)
    deeper = planned(run={"config": {**small, "model": {"name": "gpt", "n_layer": 12}}}).limits.hours_expected
    assert deeper == pytest.approx(2 * h100)
    eager = planned(run={"config": {**small, "compile": False}}).limits
    assert eager.hours_expected is None


def test_an_estimate_beyond_the_limit_is_a_warning_that_names_the_hours() -> None:
    config = {"model": "gpt2-xl", "steps": 1_000_000}
    plan = planned(run={"config": config}, limits={"hours": 24})
    (warning,) = [text for text in plan.warnings if "limits.hours" in text]
    needed = 1 / 6 + (plan.limits.hours_expected or 0) * (1 + 0.25 / 3692)
    assert f"limits.hours is 24 h, but this run needs about {needed:,.0f} h" in warning
    assert f"--hours {math.ceil(1.1 * needed)}" in warning
    first = plan.attempts[0]
    assert plan.limits.usd_expected == pytest.approx(24 * ((first.usd_per_hour or 0) + first.usd_extras["boot disk"]))
    enough = planned(run={"config": config}, limits={"hours": math.ceil(1.1 * needed)})
    assert not any("limits.hours" in text for text in enough.warnings)


def test_the_cap_is_compared_with_the_dearest_attempt() -> None:
    at_most = planned(**MIXED, limits={"hours": 10}).limits.usd_at_most or 0
    planned(**MIXED, limits={"hours": 10, "usd": at_most + 0.01})
    with pytest.raises(PlanRefused, match="standard in asia-northeast1"):
        planned(**MIXED, limits={"hours": 10, "usd": at_most - 0.01})


def test_the_cap_counts_every_node() -> None:
    machine = {"type": "h100", "gpus": 8, "nodes": 2}
    at_most = planned(machine=machine, limits={"hours": 3}).limits.usd_at_most or 0
    planned(machine=machine, limits={"hours": 3, "usd": at_most + 0.01})
    with pytest.raises(PlanRefused, match="× 2 nodes"):
        planned(machine=machine, limits={"hours": 3, "usd": at_most - 0.01})


@pytest.mark.parametrize("unknown", [0, 2, 3])
def test_one_unknown_price_makes_the_sums_unknown(unknown: int) -> None:
    fields = {"usd_per_hour": None, "usd_ceiling": None, "usd_hard_bound": None}
    attempts = [
        replace(one, **fields) if number == unknown else one for number, one in enumerate(planned(**MIXED).attempts)
    ]
    assert set(cost.cost_bounds(tuple(attempts), nodes=1, hours=1).values()) == {None}
    with pytest.raises(PlanRefused, match="is unknown"):
        cost.check_usd_limit(tuple(attempts), spec(**MIXED, limits={"usd": 10_000}), hours=1)


def test_the_refusal_shows_the_sum_and_what_fits() -> None:
    with pytest.raises(PlanRefused) as refused:
        planned(limits={"hours": 10, "usd": 100})
    assert "$255.76" in refused.value.problem
    assert "× 1 node × 10.04 h" in refused.value.problem
    assert "--hours 3.88" in refused.value.hint
    planned(limits={"hours": 3.88, "usd": 100})
    with pytest.raises(PlanRefused):
        planned(limits={"hours": 3.9, "usd": 100})


UNPRICED: dict[str, Any] = {
    "machine": {"type": "a4x-highgpu-4g"},
    "provisioning": ["reservation:projects/p/zones/us-central1-a/reservations/r"],
}
"""No source has a price of it."""


def test_a_cap_needs_a_known_price_or_the_price_flag() -> None:
    with pytest.raises(PlanRefused, match="is unknown"):
        planned(**UNPRICED, limits={"usd": 100})
    plan = planned(**UNPRICED, limits={"usd": 100, "price": 0.6})
    assert plan.limits.usd_at_most == pytest.approx(
        (0.6 + 200 * 0.17 / 730 * 1.15) * (24 + 150 / 3600)
    )  # its hyperdisk at most
    assert plan.attempts[0].usd_rule == "set by --price"
    assert plan.attempts[0].usd_excludes[0] == "network traffic"


def test_without_a_cap_an_unknown_price_is_a_warning() -> None:
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
    assert with_two.limits.usd_at_most == pytest.approx((bare or 0) + 2 * 375 * 0.0001096 * (10 + 150 / 3600))
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


FEE = 0.15 * 21.958117
"""Vertex AI's on two H100s in us-central1: without the local SSDs."""


@pytest.mark.parametrize(
    ("target", "fields", "ceiling", "hard"),
    [
        ("vm", {"provisioning": ["spot"]}, 0.60 * 22.1225, 22.1225),
        ("vm", {"provisioning": ["spot"], "regions": ["asia-northeast1"]}, 0.60 * 31.660848, 31.660848),
        ("vm", {"provisioning": ["flex-start"]}, 22.1225, 22.1225),
        ("vertex", {"provisioning": ["spot"]}, 0.60 * 22.1225 + FEE, 22.1225 + FEE),
        ("vertex", {"provisioning": ["flex-start"]}, 22.1225 + FEE, 22.1225 + FEE),
        ("vertex", {"provisioning": ["standard"]}, 1.15 * 22.1225, 1.15 * 22.1225),
        (
            "vm",
            {"provisioning": ["flex-start"], "machine": {"type": "l4", "gpus": 2}},
            1.05 * 2.000833,
            1.05 * 2.000833,
        ),
        ("vm", {"provisioning": ["standard"], "machine": {"type": "l4", "gpus": 2}}, 2.000833, 2.000833),
    ],
)
def test_each_price_has_an_expected_ceiling_and_a_hard_bound(
    target: str, fields: dict[str, Any], ceiling: float, hard: float
) -> None:
    first = planned(target, **fields).attempts[0]
    assert first.usd_ceiling == pytest.approx(ceiling, abs=1e-4)
    assert first.usd_hard_bound == pytest.approx(hard, abs=1e-4)
    assert (first.usd_per_hour or 0.0) <= (first.usd_ceiling or 0.0) <= (first.usd_hard_bound or 0.0)


def test_a_spot_price_above_the_usual_share_is_its_own_ceiling() -> None:
    """0.7064 of the list price was seen in 2024."""
    shape = next(iter(CATALOG.machines["a3-highgpu-8g"]))
    dear = RegionPrices("us-central1", 100.0, "list", None, "", 70.64, "spot", 0.0)
    order = prices.PriceQuery(shape, "compute", "spot", "us-central1")
    found = prices.price(order, dear, dear)
    assert (found.usd, found.ceiling, found.hard_bound) == (70.64, 70.64, 100.0)


@pytest.mark.parametrize(
    ("machine", "model", "place", "ceiling"),
    [
        ("a4-highgpu-8g", "standard", "europe-west1-b", 1.60 * 128.88),  # no list price
        ("a4-highgpu-8g", "spot", "europe-west1-b", 0.60 * 1.60 * 128.88),
        ("a4-highgpu-8g", "standard", "us-east4-b", 1.60 * 128.88),  # a third party's list price bounds nothing
        ("g4-standard-48", "standard", "asia-northeast1-a", 1.60 * 4.49993),
        ("a3-highgpu-8g", "standard", "me-central2-a", 1.60 * 88.49),
        ("a3-ultragpu-8g", "spot", "us-east5-a", 0.60 * 95.351927),  # no Spot price
    ],
)
def test_where_a_price_is_unknown_the_rules_bound_it(machine: str, model: str, place: str, ceiling: float) -> None:
    found = CATALOG.price(CATALOG.machines[machine][0], "compute", model, place)
    assert found.ceiling == pytest.approx(ceiling, abs=1e-4)


def test_a_cap_bounds_a_price_that_only_a_rule_knows() -> None:
    fields: dict[str, Any] = {
        "machine": {"type": "h100-mega", "gpus": 8},
        "zones": ["europe-north1-c"],
        "regions": None,
        "provisioning": ["spot"],
    }
    per_hour = 0.60 * 102.842784
    plan = planned("vm", **fields, limits={"hours": 10, "usd": per_hour * 10.1 + 1})
    assert plan.attempts[0].usd_per_hour is None
    assert plan.attempts[0].usd_ceiling == pytest.approx(per_hour)
    assert plan.limits.usd_expected is None
    with pytest.raises(PlanRefused, match="could cost"):
        planned("vm", **fields, limits={"hours": 10, "usd": per_hour * 10 - 1})


@pytest.mark.parametrize(
    ("target", "model", "restarts", "shutdown", "again"),
    [
        ("vm", "flex-start", 3, 150, 0),
        ("vm", "spot", 3, 60, 0),
        ("vertex", "standard", 3, 150, 3),
        ("vertex", "flex-start", 3, 150, 3),
        ("vertex", "spot", 3, 60, 6),
        ("vertex", "spot", 0, 60, 0),
    ],
)
def test_the_sums_cover_what_is_billed_after_the_limit(
    target: str, model: str, restarts: int, shutdown: int, again: int
) -> None:
    plan = planned(target, provisioning=[model], limits={"hours": 2, "restarts": restarts})
    (attempt, *_), limits = plan.attempts, plan.limits
    assert (attempt.shutdown_seconds, attempt.service_restarts) == (shutdown, again)
    hours, disk = 2 + shutdown / 3600, attempt.usd_extras["boot disk"]
    assert limits.usd_at_most == pytest.approx(((attempt.usd_ceiling or 0) + disk) * hours)
    assert limits.usd_hard_bound == pytest.approx(((attempt.usd_hard_bound or 0) + disk) * hours * (1 + again))


def test_a_cap_that_pays_for_the_hours_but_not_for_the_shutdown_is_refused() -> None:
    fields: dict[str, Any] = {"machine": {"type": "l4", "gpus": 2}, "provisioning": ["standard"]}
    hourly = 2.000833 + 200 * 0.1 / 730
    with pytest.raises(PlanRefused):
        planned("vm", **fields, limits={"hours": 10, "usd": hourly * 10.01})
    planned("vm", **fields, limits={"hours": 10, "usd": hourly * 10.05})


def test_the_boot_disk_and_an_external_address_are_in_the_sum() -> None:
    fields: dict[str, Any] = {"machine": {"type": "l4", "gpus": 2, "boot_disk_gb": 500}, "provisioning": ["standard"]}
    plan = planned("vm", **fields, vm={"external_ip": True}, limits={"hours": 10})
    disk = 500 * 0.1 / 730
    assert plan.attempts[0].usd_extras == pytest.approx({"boot disk": disk, "external address": 0.005})
    assert plan.limits.usd_at_most == pytest.approx((2.000833 + disk + 0.005) * (10 + 150 / 3600))
    assert "boot disk" not in plan.attempts[0].usd_excludes
    on_vertex = planned(**fields)
    assert on_vertex.attempts[0].usd_extras == pytest.approx({"boot disk": 500 * 0.17 / 730 * 1.15})


def test_unbounded_costs_are_named() -> None:
    (trains,) = {attempt.usd_excludes for attempt in planned().attempts}
    assert any("soft-deleted checkpoints" in item for item in trains)
    works = planned("vm", world={"training": False}, machine={"type": "l4", "gpus": 1}, provisioning=["standard"])
    assert not any("checkpoints" in item for item in works.attempts[0].usd_excludes)
    assert any("after a stop" in item for item in works.attempts[0].usd_excludes)


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


def test_a_cap_below_any_cost_suggests_no_hours() -> None:
    with pytest.raises(PlanRefused) as refused:
        planned(limits={"usd": 0.001})
    assert "--hours" not in refused.value.hint


def test_new_disks_are_part_of_the_bound_on_each_node() -> None:
    fields: dict[str, Any] = {
        "machine": {"type": "l4", "gpus": 2, "nodes": 2},
        "provisioning": ["spot"],
        "zones": ["us-central1-a"],
        "limits": {"hours": 10},
        "output": "gs://b-b/o",
    }
    ssd = {"new_disk_gb": 1000, "new_disk_type": "pd-ssd", "path": "/a"}
    without, with_disks = (
        planned("vm", **fields, mounts=mounts) for mounts in ([], [ssd, {**ssd, "path": "/b"}, {"bucket": "b-1"}])
    )
    (attempt,) = with_disks.attempts
    assert attempt.usd_extras["new disks"] == pytest.approx(2 * 1000 * 0.17 / 730)
    more = (with_disks.limits.usd_at_most or 0) - (without.limits.usd_at_most or 0)
    assert more == pytest.approx(2 * 2 * 1000 * 0.17 / 730 * (10 + attempt.shutdown_seconds / 3600))
    assert "mounted buckets, shares and disks" in attempt.usd_excludes
    assert "mounted buckets, shares and disks" not in without.attempts[0].usd_excludes


def test_a_new_disk_without_a_known_price_is_excluded_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(CATALOG), "disk_price_at_most", lambda *_: None)
    plan = planned("vm", machine={"type": "l4", "gpus": 2}, mounts=[{"new_disk_gb": 1000, "path": "/a"}])
    assert "new disks" not in plan.attempts[0].usd_extras
    assert "new disks" in plan.attempts[0].usd_excludes
