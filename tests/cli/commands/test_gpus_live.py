"""`launch gpus --live`: quota, Spot capacity and its history from the project, beside the offers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launcher.testing.googlecloud import Fault, GoogleCloud, Status
from tests.command import Ran, launch

CAPACITY, BETA, HISTORY = "compute.advice.capacity", "compute.beta.advice.capacity", "compute.advice.capacityHistory"
QUOTAS = "compute.regions.get"
L4 = ("gpus", "--live", "--type", "l4", "--region", "us-central1")


class Site:
    """The project, and `launch gpus` for it."""

    def __init__(self, cloud: GoogleCloud, folder: Path) -> None:
        self.cloud, self.folder = cloud, folder

    def launch(self, *argv: str, code: int = 0, **env: str) -> Ran:
        ran = launch(*argv, env={**self.cloud.environ(), **env}, cwd=self.folder)
        assert ran.code == code, ran.shown
        return ran

    def live(self, *argv: str) -> dict[str, Any]:
        [offer] = json.loads(self.launch(*argv, "-o", "json").out)["offers"]
        found: dict[str, Any] = offer["live"]
        return found


@pytest.fixture
def site(cloud: GoogleCloud, tmp_path: Path) -> Site:
    cloud.compute.quotas.limit("NVIDIA_L4_GPUS", 8, "us-central1")
    cloud.compute.quotas.limit("PREEMPTIBLE_NVIDIA_L4_GPUS", 4, "us-central1")
    cloud.compute.zones.scores = {"us-central1-a": 0.2, "us-central1-b": 0.7}
    return Site(cloud, tmp_path)


def test_an_offer_has_quota_capacity_and_history(site: Site) -> None:
    found = site.live(*L4)
    assert found["quotas"]["standard"] == {"metric": "NVIDIA_L4_GPUS", "limit": 8.0, "used": 0.0}
    assert found["quotas"]["spot"] == {"metric": "PREEMPTIBLE_NVIDIA_L4_GPUS", "limit": 4.0, "used": 0.0}
    assert found["quotas"]["flex-start"]["metric"] == "PREEMPTIBLE_NVIDIA_L4_GPUS"
    assert found["capacity"] == {"obtainability": 0.7, "uptime_seconds": 604800.0, "api": "v1"}
    assert found["history"]["preemption_rate"] == pytest.approx(0.2)
    assert found["history"]["days"] == 2
    assert found["history"]["prices"] == [["2026-10-01", 0.28], ["2026-11-20", 0.31]]
    assert found["problems"] == []


def test_the_table_shows_it_in_80_columns(site: Site) -> None:
    text = site.launch(*L4).out
    assert max(map(len, text.splitlines())) <= 80
    for words in ("standard 0/8", "spot 0/4", "0.7 of 1", "20% in 2 days", "v1 API"):
        assert words in text


def test_beta_is_used_where_v1_lacks_it(site: Site) -> None:
    site.cloud.faults.add(Fault(CAPACITY, Status(404), times=99))
    site.cloud.compute.zones.versions = ["beta"]
    found = site.live(*L4)
    assert (found["capacity"]["api"], found["history"]["api"]) == ("beta", "beta")
    assert found["capacity"]["obtainability"] == 0.7
    assert "beta API" in site.launch(*L4).out


def test_a_permission_that_is_missing_is_not_asked_for_in_beta(site: Site) -> None:
    site.cloud.faults.add(Fault(CAPACITY, Status(403, message="Required 'compute.advice.capacity'"), times=99))
    found = site.live(*L4)
    assert found["capacity"] is None
    assert "compute.advice.capacity" in found["problems"][0]
    assert not [one for one in site.cloud.requests if "/beta/" in one.path]
    assert found["quotas"]["standard"]["limit"] == 8


@pytest.mark.parametrize("status", [403, 404, 500])
def test_what_can_not_be_read_is_unknown_and_no_error(site: Site, status: int) -> None:
    for operation in (CAPACITY, BETA, HISTORY, QUOTAS):
        site.cloud.faults.add(Fault(operation, Status(status), times=99))
    found = site.live(*L4)
    assert (found["capacity"], found["history"], found["quotas"]["spot"]) == (None, None, None)
    assert len(found["problems"]) == 3
    text = site.launch(*L4).out
    assert "unknown" in text
    assert max(map(len, text.splitlines())) <= 80


H100 = ("gpus", "--live", "--type", "h100", "--region", "us-central1")
FAMILY = "GPUS-PER-GPU-FAMILY-per-project-region"


def test_a_quota_that_only_cloud_quotas_shows(site: Site) -> None:
    """On demand, H100s count against the quota of their family."""
    site.cloud.compute.quotas.limit("GPUS_PER_GPU_FAMILY", 16, "us-central1")
    found = site.live(*H100)
    assert found["quotas"]["standard"] == {"metric": FAMILY, "limit": 16.0, "used": None}
    assert found["quotas"]["spot"]["metric"] == "PREEMPTIBLE_NVIDIA_H100_GPUS"
    assert "standard ?/16" in site.launch(*H100).out


def test_vertex_ais_quotas_are_shown_too(site: Site) -> None:
    spot = "custom_model_training_preemptible_nvidia_h100_gpus"
    site.cloud.quotas.limits[spot, "us-central1"] = 8
    site.cloud.quotas.usage[spot, "us-central1"] = 2
    found = site.live(*H100)["vertex_quotas"]
    preemptible = {"metric": "CustomModelTrainingPreemptibleH100GPUsPerProjectPerRegion", "limit": 8.0, "used": 2.0}
    assert (found["spot"], found["flex-start"], found["standard"]["limit"]) == (preemptible, preemptible, 1000.0)
    text = site.launch(*H100).out
    assert "spot 2/8" in text
    assert max(map(len, text.splitlines())) <= 80


def test_quotas_that_cloud_quotas_refuses_are_unknown(site: Site) -> None:
    for method in ("list", "get"):
        site.cloud.faults.add(
            Fault(f"cloudquotas.projects.locations.services.quotaInfos.{method}", Status(403), times=9)
        )
    found = site.live(*H100)
    assert (found["quotas"]["standard"], found["vertex_quotas"]["spot"]) == (None, None)
    assert [one.partition(":")[0] for one in found["problems"]] == [FAMILY, "quotas of Vertex AI"]


def test_n1_is_asked_about_with_its_gpus_and_has_no_history(site: Site) -> None:
    found = site.live("gpus", "--live", "--type", "t4", "--region", "us-central1")
    assert (found["machine_type"], found["history"], found["problems"]) == ("n1-standard-8", None, [])
    [asked] = [one.body for one in site.cloud.requests if one.path.endswith("/advice/capacity")]
    [selection] = asked["instanceFlexibilityPolicy"]["instanceSelections"].values()
    assert selection["guestAccelerators"] == [{"acceleratorType": "nvidia-tesla-t4", "acceleratorCount": 1}]
    assert not [one for one in site.cloud.requests if one.path.endswith("/capacityHistory")]


def test_only_the_first_offers_are_read(site: Site) -> None:
    ran = site.launch("gpus", "--live", "--region", "any", "-o", "json")
    offers = json.loads(ran.out)["offers"]
    assert ["live" in one for one in offers] == [True] * 12 + [False] * (len(offers) - 12)


def test_the_region_is_gclouds_by_default(site: Site) -> None:
    ran = site.launch("gpus", "--live", "--type", "l4", "-o", "json", CLOUDSDK_COMPUTE_REGION="us-central1")
    assert [one["region"] for one in json.loads(ran.out)["offers"]] == ["us-central1"]
    assert "--region" in site.launch("gpus", "--live", "--type", "l4", code=2).err


def test_without_live_nothing_is_sent(site: Site) -> None:
    site.launch("gpus", "--region", "us-central1")
    assert site.cloud.requests == []
