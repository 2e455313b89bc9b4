"""Which places exist (zone × GPU × provisioning model), which of them a plan tries, and how many have a price."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import prices
from launcher import catalog
from launcher.catalog import tables
from launcher.errors import PlanRefused
from launcher.testing.googlecloud.compute.capacity import shape
from tests.plan.planning import planned

CATALOG = catalog.load()


@pytest.mark.parametrize(
    ("gpu", "zones"), [("t4", 51), ("v100", 12), ("p4", 17), ("a100-40gb", 19), ("rtx-pro-6000", 42)]
)
def test_a_vm_in_any_region_is_tried_in_every_zone_that_has_its_gpu(gpu: str, zones: int) -> None:
    plan = planned("vm", machine={"type": gpu, "gpus": 1}, regions="any", provisioning=["spot"])
    assert len({attempt.zone for attempt in plan.attempts}) == zones


def test_n1_machines_are_in_the_regions_of_their_gpu_alone() -> None:
    t4 = CATALOG.find("t4", 1, None, "compute")
    assert "us-east5" not in CATALOG.regions(t4)  # no N1 there
    assert {zone.name for zone in tables.zones(t4.zones)} <= {zone.name for zone in tables.zones("n1")}
    with pytest.raises(PlanRefused, match="n1-standard-8 is not available in us-east5"):
        planned("vm", machine={"type": "t4", "gpus": 1}, regions=["us-east5"])


def test_reduction_servers_need_a_region_with_n1() -> None:
    servers: dict[str, Any] = {
        "vertex": {"reduction_server": {"replicas": 2}},
        "machine": {"type": "h100", "gpus": 8, "nodes": 2},
        "image": {"uri": f"us-docker.pkg.dev/my-project/launch/nccl@sha256:{'0' * 64}"},
    }
    tried = {attempt.region for attempt in planned(regions="any", **servers).attempts}
    assert "us-central1" in tried
    assert "us-east5" not in tried
    with pytest.raises(PlanRefused, match="n1-highcpu-16 is not available in us-east5"):
        planned(regions=["us-east5"], **servers)


@pytest.mark.parametrize(
    ("gpu", "regions"),
    [
        ("rtx-pro-6000", "asia-southeast1 europe-west4 us-central1 us-east1 us-east4"),
        ("v100", "asia-east1 europe-west4 us-central1 us-east1 us-west1"),
        (
            "b200",
            "asia-northeast1 asia-southeast1 europe-west4 us-central1 us-east1 us-east4 us-south1 us-west2 us-west3",
        ),
    ],
)
def test_vertex_ai_is_tried_only_where_its_page_lists_the_gpu(gpu: str, regions: str) -> None:
    plan = planned(machine={"type": gpu}, regions="any", provisioning=["spot"])
    assert {attempt.region for attempt in plan.attempts} == set(regions.split())


@pytest.mark.parametrize("machine", [{"type": "p100"}, {"type": "n1-standard-8", "accelerator": "p100", "gpus": 1}])
@pytest.mark.parametrize("target", ["vertex", "vm"])
def test_a_gpu_that_google_has_shut_down_is_refused(machine: dict[str, object], target: str) -> None:
    with pytest.raises(PlanRefused, match="Google shut down NVIDIA P100 on 2026-09-15"):
        planned(target, machine=machine)


@pytest.mark.parametrize("gpu", ["t4", "p4"])
def test_the_end_of_a_gpu_is_a_note_of_the_plan(gpu: str) -> None:
    plan = planned(machine={"type": gpu, "gpus": 1})
    assert any("2027-08-01" in warning for warning in plan.warnings)


def test_uncertain_zones_come_last_and_are_named() -> None:
    plan = planned("vm", machine={"type": "h100", "gpus": 8}, regions="any", provisioning=["spot", "standard"])
    doubtful = [
        bool(CATALOG.doubt(CATALOG.machines["a3-highgpu-8g"][0], attempt.zone or "")) for attempt in plan.attempts
    ]
    assert doubtful == sorted(doubtful)
    assert sum(doubtful) == 2 * 6
    notes = [warning for warning in plan.warnings if warning.endswith("tried last.")]
    assert len(notes) == 2
    assert any("asia-northeast1-b" in note and "Google's page of 2026-10" in note for note in notes)
    assert CATALOG.zones(CATALOG.find("t4", 1, None, "compute"), "us-east1")[-1] == "us-east1-d"


def test_the_loopback_cloud_has_the_certain_zones() -> None:
    machines = [machine for machine, *_ in CATALOG.machines.values()]
    assert not [
        (machine.name, zone)
        for machine in machines
        for zone in CATALOG.zones(machine)
        if not CATALOG.doubt(machine, zone) and shape(machine.name, zone) is None
    ]


def test_a_certain_zone_is_not_called_uncertain() -> None:
    plan = planned("vm", machine={"type": "h100", "gpus": 8}, zones=["us-central1-a"], regions=None)
    assert not [warning for warning in plan.warnings if "may lack" in warning]


def test_almost_all_places_have_a_price_or_a_near_bound(capsys: pytest.CaptureFixture[str]) -> None:
    assert prices.main() == 0, capsys.readouterr().out
    every = prices.places(CATALOG, "compute")
    assert sum(place.kind == 2 for place in every) <= 0.05 * len(every)
    assert sum(place.kind == 0 for place in every) >= 0.80 * len(every)
    assert list(prices.distant_bounds(CATALOG)) == []
