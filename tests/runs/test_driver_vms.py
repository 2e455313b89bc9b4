"""A run on VMs from its plan to its end, whatever becomes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launcher.errors import JobFailed, LaunchError, NoCapacity
from launcher.services.compute.backend import Vms
from launcher.services.router import Services
from launcher.services.vertex import Vertex
from launcher.testing.googlecloud import FakeClock, Fault, GoogleCloud, Reset, Status
from tests.runs.vm_runs import ZONES, VmSite, breaks, exits, is_lost, is_preempted, plan_of

INSERT, GET = "compute.instances.insert", "compute.instances.get"


@pytest.fixture
def site(cloud: GoogleCloud, clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> VmSite:
    for name, value in cloud.environ().items():
        monkeypatch.setenv(name, value)
    return VmSite(cloud, clock, [exits(0)])


def test_a_run_that_ends_well_leaves_nothing(site: VmSite) -> None:
    job = site.drive()
    assert (job.state, job.zone, site.zones) == ("SUCCEEDED", ZONES[0], ZONES[:1])
    assert site.states == ["PENDING", "RUNNING", "SUCCEEDED"]
    assert site.cloud.compute.names() == []
    (entry,) = site.ledger().entries()
    assert entry.end
    assert (entry.end.kind, entry.zone) == ("succeeded", ZONES[0])
    assert 60 <= entry.end.billed < 80


def test_a_stockout_in_the_first_five_zones(site: VmSite) -> None:
    site.plan = plan_of(zones=ZONES)
    for zone in ZONES[:5]:
        site.cloud.compute.capacity.out(zone)
    assert site.drive().zone == ZONES[5]
    assert site.zones == ZONES[:6]
    assert site.diagnoses == [(zone, "stockout") for zone in ZONES[:5]]


def test_the_zones_that_a_stockout_names_come_first(site: VmSite) -> None:
    site.plan = plan_of(zones=ZONES)
    for zone in ZONES[:5]:
        site.cloud.compute.capacity.out(zone, available=(ZONES[6], "europe-west1-b"))
    assert site.drive().zone == ZONES[6]
    assert site.zones == [ZONES[0], ZONES[6]]


@pytest.mark.parametrize("zones", [["us-central1-ai1a"], [ZONES[0], ZONES[1], "us-central1-ai1a"]])
def test_ai_zones_are_zones(site: VmSite, zones: list[str]) -> None:
    site.plan = plan_of(zones=zones)
    site.cloud.compute.capacity.out(ZONES[0], available=("us-central1-ai1a",))
    assert site.drive().zone == "us-central1-ai1a"
    assert site.zones in (zones, [ZONES[0], "us-central1-ai1a"])
    assert not [one for one in site.cloud.requests if "customJobs" in one.path], "a zone is no region of Vertex AI"


def test_no_quota_in_a_region_is_no_quota_in_its_zones(site: VmSite) -> None:
    site.plan = plan_of(zones=ZONES)
    site.cloud.compute.quotas.limit("PREEMPTIBLE_NVIDIA_L4_GPUS", 0, "us-central1")
    assert site.drive().zone == "us-east4-a"
    assert site.zones == ["us-central1-a", "us-east4-a"]


def test_no_quota_anywhere_ends_it_at_once(site: VmSite) -> None:
    site.plan = plan_of(zones=ZONES, provisioning=["standard"])
    site.cloud.compute.quotas.limit("GPUS_ALL_REGIONS", 0)
    with pytest.raises(NoCapacity, match="GPUS_ALL_REGIONS"):
        site.drive()
    assert site.zones == ZONES[:1]


def test_an_operation_that_fails_late(site: VmSite) -> None:
    site.cloud.compute.capacity.out(ZONES[0], after=90.0)
    began = site.clock()
    assert site.drive().zone == ZONES[1]
    assert site.clock() - began > 90
    assert site.diagnoses == [(ZONES[0], "stockout")]


def test_preempted_while_it_is_made(site: VmSite) -> None:
    def preempt() -> None:
        if site.cloud.compute.names() and len(site.zones) == 1:
            site.cloud.compute.preempt(site.plan.run)

    site.meanwhile = preempt
    assert site.drive().state == "SUCCEEDED"
    assert site.diagnoses == [(ZONES[0], "preempted")]


@pytest.mark.parametrize("away", [is_preempted, is_lost, breaks])
def test_a_running_vm_is_preempted(site: VmSite, away: object) -> None:
    site.does = [away, exits(0)]  # type: ignore[list-item]  # one of the three above
    assert site.drive().state == "SUCCEEDED"
    assert [kind for _, kind in site.diagnoses] == ["preempted"]
    assert len(site.ledger().entries()) == 2
    assert site.cloud.compute.names() == []


def test_after_a_preemption_another_zone_is_tried_first(site: VmSite) -> None:
    site.does = [is_preempted, is_preempted, is_preempted, exits(0)]
    assert site.drive().state == "SUCCEEDED"
    assert site.zones == [ZONES[0], ZONES[1], ZONES[0], ZONES[1]]


def test_a_failure_of_the_job_is_the_runs_end(site: VmSite) -> None:
    site.does = [exits(1)]
    with pytest.raises(JobFailed, match="exited with 1"):
        site.drive()
    with pytest.raises(LaunchError, match="has already ended"):
        site.drive()
    assert len(site.zones) == 1
    site.does = [exits(0)]
    assert site.drive(resume=True).state == "SUCCEEDED"


def test_what_the_vm_says_of_an_image_that_cant_be_pulled(site: VmSite) -> None:
    site.does = [
        exits(
            70,
            'the image can\'t be pulled: denied: Permission "artifactregistry.repositories.downloadArtifacts" denied',
        )
    ]
    with pytest.raises(LaunchError) as raised:
        site.drive()
    assert "artifactregistry.reader" in f"{raised.value}"
    assert len(site.zones) == 1


@pytest.mark.parametrize("stored", [True, False])
def test_killed_between_insert_and_answer(site: VmSite, stored: bool) -> None:
    class Killed(BaseException):
        pass

    class Dies(Vms):
        def create(self, *args: Any, **named: Any) -> Any:
            super().create(*args, **named)
            raise Killed

    driver = site.driver(None if stored else site.without())
    vms = Dies("my-project", site.cloud.environ(), site.time, site.said.append, site.folder)
    driver.service = Services(Vertex("my-project", site.cloud.environ(), site.time), vms)
    with pytest.raises(Killed):
        driver.drive(fresh=True)
    assert site.drive(ledger=None if stored else site.without()).state == "SUCCEEDED"
    assert len(site.zones) == 1


@pytest.mark.parametrize("effect", [Reset("after"), Reset("before"), Status(503)], ids=lambda one: type(one).__name__)
def test_a_lost_response_creates_no_second_vm(site: VmSite, effect: Reset | Status) -> None:
    site.cloud.faults.add(Fault(INSERT, effect))
    assert site.drive().state == "SUCCEEDED"
    assert len(site.cloud.compute.made()) == 1
    asked = [one for one in site.cloud.requests if one.path.endswith("/instances") and one.method == "POST"]
    assert len({one.query["requestId"] for one in asked}) == 1


def test_each_attempt_has_its_own_request_id(site: VmSite) -> None:
    site.does = [is_lost, is_lost, exits(0)]
    site.drive()
    asked = [one for one in site.cloud.requests if one.path.endswith("/instances") and one.method == "POST"]
    assert len({one.query["requestId"] for one in asked}) == len(site.ledger().entries()) == 3


def test_the_name_is_used_by_another_users_vm(site: VmSite) -> None:
    body = {**site.plan.attempts[0].request, "labels": {"team": "theirs"}}
    from launcher.services.compute.client import Compute

    Compute("my-project", site.cloud.environ(), site.time).insert(ZONES[0], body, "f" * 8)
    site.clock.advance(60)
    site.done.add(site.cloud.compute.vm(site.plan.run).number)
    with pytest.raises(LaunchError, match="already exists"):
        site.drive()
    assert site.cloud.compute.vm(site.plan.run).status == "RUNNING"


@pytest.mark.parametrize("off", [86_400.0, -86_400.0])
def test_a_clock_that_is_a_day_off(site: VmSite, off: float) -> None:
    site.off = off
    site.does = [is_preempted, exits(0)]
    assert site.drive().state == "SUCCEEDED"
    assert len(site.cloud.compute.made()) == 2


def test_an_outage_of_five_minutes_while_it_waits(site: VmSite) -> None:
    started = False

    def out() -> None:
        nonlocal started
        if site.cloud.compute.names() and not started:
            started = True
            site.cloud.faults.down(until=site.clock() + 300, effect=Status(503))

    site.meanwhile = out
    assert site.drive().state == "SUCCEEDED"
    assert [type(one).__name__ for one in site.events].count("OutageStarted") == 1
    assert len(site.cloud.compute.made()) == 1


def test_detached_once_the_vm_is_there(site: VmSite) -> None:
    site.cloud.compute.capacity.out(ZONES[0])
    job = site.drive(detach=True)
    assert (job.state, job.zone) == ("RUNNING", ZONES[1])
    assert site.drive(fresh=True).name == job.name  # typed again


def test_flex_start_is_there_while_it_queues(site: VmSite) -> None:
    site.plan = plan_of(provisioning=["flex-start"], machine={"type": "h100", "gpus": 2}, zones=ZONES[:1])
    site.cloud.compute.capacity.out("*")
    assert site.drive(detach=True).state == "PENDING"
    assert site.cloud.compute.vm(site.plan.run).status == "PENDING"


def test_flex_start_that_waits_in_vain(site: VmSite) -> None:
    site.plan = plan_of(
        provisioning=["flex-start"], machine={"type": "h100", "gpus": 2}, zones=ZONES[:1], limits={"wait": "10m"}
    )
    site.cloud.compute.capacity.out("*")
    with pytest.raises(NoCapacity):
        site.drive()
    assert site.diagnoses == [(ZONES[0], "stockout")]


def test_the_wait_for_machines_is_one_budget_over_all_vms(site: VmSite) -> None:
    site.plan = plan_of(
        provisioning=["flex-start"],
        machine={"type": "h100", "gpus": 2},
        zones=[ZONES[0], ZONES[3], "us-east5-a"],
        limits={"wait": "10m", "wait_total": "15m"},
    )
    site.cloud.compute.capacity.out("*")
    began = site.clock()
    with pytest.raises(NoCapacity, match=r"limits\.wait_total"):
        site.drive()
    asked = [one.body for one in site.cloud.requests if one.path.endswith("/instances") and one.method == "POST"]
    waits = [int(body["params"]["requestValidForDuration"]["seconds"]) for body in asked]
    assert (len(waits), waits[0], 240 <= waits[1] <= 300) == (2, 600, True)
    assert 14 * 60 < site.clock() - began < 18 * 60


def test_the_hours_are_one_budget_over_all_vms(site: VmSite) -> None:
    site.plan = plan_of(limits={"hours": 1})
    site.does = [is_preempted, exits(0)]
    site.drive()
    asked = [one.body for one in site.cloud.requests if one.path.endswith("/instances") and one.method == "POST"]
    limits = [int(body["scheduling"]["maxRunDuration"]["seconds"]) for body in asked]
    assert limits[0] == 3600
    assert 3460 < limits[1] <= 3480  # a minute of work, and the 60 s in which a Spot VM may shut down


def test_several_nodes_are_all_there_or_none(site: VmSite) -> None:
    site.plan = plan_of(machine={"type": "l4", "gpus": 2, "nodes": 3})
    site.cloud.compute.capacity.out(ZONES[0], left=2)
    site.does = [exits(0)]
    job = site.drive()
    assert (job.state, job.zone) == ("SUCCEEDED", ZONES[1])
    assert site.diagnoses == [(ZONES[0], "stockout")]
    assert site.cloud.compute.names() == []


def test_no_vm_is_left_of_a_set_when_one_is_taken_away(site: VmSite) -> None:
    site.plan = plan_of(machine={"type": "l4", "gpus": 2, "nodes": 2})
    site.does = [is_preempted, exits(75), exits(0)]  # the other node leaves too: launch_train.node sees to that
    assert site.drive().state == "SUCCEEDED"
    assert site.cloud.compute.names() == []


def test_a_cancelled_run_is_cancelled(site: VmSite) -> None:
    site.does = [lambda one, vm: one.service.cancel(f"projects/my-project/zones/{vm.zone}/instances/{vm.number}")]
    with pytest.raises(LaunchError, match="cancelled"):
        site.drive()
    assert len(site.zones) == 1
    assert site.cloud.compute.names() == []


def test_the_folder_is_the_plans(site: VmSite, tmp_path: Path) -> None:
    site.drive()
    assert site.ledger().stored() is not None
