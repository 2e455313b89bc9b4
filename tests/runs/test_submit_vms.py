"""Runs on VMs, from the plan to the run's VM, whatever dies or is refused on the way."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from launcher.diagnosis import Diagnosis, diagnose_end
from launcher.errors import LaunchError, NoCapacity, UsageError
from launcher.jobs.job import Job
from launcher.plan.build import with_digest
from launcher.plan.model import Plan
from launcher.runs.driver import AttemptStarted
from launcher.runs.endings import settle
from launcher.runs.ledger import Ledger
from launcher.services import request
from launcher.services.compute.backend import Vms
from launcher.testing.googlecloud import Fault, Meanwhile, Status
from tests.plan.planning import planned
from tests.runs.submitting import DIGEST, submit
from tests.services.compute.vm_site import DELETE, INSERT, UUID, ZONE, Site, plan_of, work_body

PLAN = plan_of()
WORKPLACE = planned(
    "vm", world={"training": False}, name="dev", regions=["us-central1"], machine={"type": "l4", "gpus": 1}
)
ZONES = [str(attempt.zone) for attempt in PLAN.attempts]


class Killed(BaseException):
    """The command is gone, whatever it was about to do."""


def ledger_of(site: Site) -> Ledger:
    return Ledger(site.folder(), site.time, site.said.append, project="my-project", region="us-central1")


def ready(plan: Plan) -> Plan:
    """Its image is in the registry."""
    return with_digest(plan, DIGEST)


def launch(
    site: Site, vms: Vms | None = None, *, fresh: bool = True, plan: Plan = PLAN, ledger: Ledger | None = None
) -> AttemptStarted:
    """`launch vm SPEC --run`, until there is a VM."""
    return submit(
        plan,
        vms or site.launcher(),
        ledger or ledger_of(site),
        site.time,
        site.said.append,
        fresh=fresh,
        ready=ready,
        extra_regions=(),
        wall_clock=site.time.now,
        jitter=lambda: 0.5,
    )


def ended(site: Site, got: AttemptStarted) -> tuple[Job, Diagnosis]:
    """The attempt, watched to its end, which is noted; what it has left is removed."""
    vms = site.launcher()
    while not (job := vms.get(got.job.name)).is_over:
        site.clock.advance(5)
    diagnosis = diagnose_end(job, request.context_of_job(job, "my-project"))
    vms.release(job)
    return job, settle(ledger_of(site), got.number, job, diagnosis)


def test_zone_after_zone(site: Site) -> None:
    site.cloud.compute.capacity.out(ZONES[0])
    site.cloud.compute.capacity.out(ZONES[1], after=90.0)
    for number, zone in enumerate(ZONES[:2], 1):
        got = launch(site, fresh=number == 1)
        assert (got.number, got.job.zone, got.created) == (number, zone, True)
        assert ended(site, got)[1].kind == "stockout"
    got = launch(site, fresh=False)
    site.clock.advance(10)
    assert (got.job.zone, site.launcher().get(got.job.name).state) == (ZONES[2], "RUNNING")
    assert site.cloud.compute.names() == [PLAN.run]


def test_the_zone_that_the_stockout_names_comes_next(site: Site) -> None:
    site.cloud.compute.capacity.out(ZONES[0], available=(ZONES[2],))
    ended(site, launch(site))
    assert launch(site, fresh=False).job.zone == ZONES[2]


def test_no_zone_has_any(site: Site) -> None:
    site.cloud.compute.capacity.out("us-central1-*")
    for _ in ZONES:
        ended(site, launch(site, fresh=False))
    with pytest.raises(NoCapacity) as told:
        launch(site, fresh=False)
    assert all(f"{zone}, spot: no capacity for g2-standard-12" in told.value.problem for zone in ZONES)
    assert len(site.cloud.compute.made()) == len(ZONES)


def test_a_quota_of_a_region_skips_all_its_zones(site: Site) -> None:
    site.cloud.compute.quotas.limit("PREEMPTIBLE_NVIDIA_L4_GPUS", 0, "us-central1")
    with pytest.raises(NoCapacity, match="PREEMPTIBLE_NVIDIA_L4_GPUS in us-central1") as told:
        launch(site)
    assert site.sent("POST", "/instances") == 1
    assert "gcloud beta quotas preferences create" in told.value.hint


def test_a_run_ends_with_its_calendar_reservation(site: Site) -> None:
    name, end = f"projects/my-project/zones/{ZONE}/reservations/mine", site.time.now() + 3600
    stamp = datetime.fromtimestamp(end, UTC).isoformat()
    known = {"status": "READY", "deploymentType": "DENSE", "deleteAtTime": stamp}
    site.cloud.compute.zones.reservations[ZONE, "mine"] = known
    spec: dict[str, Any] = {"vm": {"dense_reservation": True}, "regions": None, "provisioning": [f"reservation:{name}"]}
    plan = planned("vm", machine={"type": "l4", "gpus": 2}, output="gs://my-bucket/runs", limits={"hours": 12}, **spec)
    [attempt] = plan.attempts
    assert attempt.request["scheduling"]["maxRunDuration"]["seconds"] == str(12 * 3600)
    launch(site, plan=msgspec.structs.replace(plan, attempts=(msgspec.structs.replace(attempt, ends=stamp),)))
    [vm] = site.cloud.compute.park.vms.values()
    assert 3500 < int(vm.body["scheduling"]["maxRunDuration"]["seconds"]) <= 3600


def test_killed_between_the_insert_and_its_answer(site: Site) -> None:
    def killed() -> None:
        raise Killed

    vms = site.launcher()
    send = vms.compute.insert
    vms.compute.insert = lambda *given: (send(*given), killed())[0]  # type: ignore[method-assign, func-returns-value]
    with pytest.raises(Killed):
        launch(site, vms)
    assert site.cloud.compute.names() == [PLAN.run]
    site.clock.advance(5)
    got = launch(site)
    assert (got.job.id, got.number, got.created) == (site.cloud.compute.vm(PLAN.run).number, 1, False)
    assert len(site.cloud.compute.made()) == 1


def test_two_launches_at_once_make_one_vm(site: Site) -> None:
    others: list[AttemptStarted] = []
    site.cloud.faults.add(Fault(INSERT, Meanwhile(lambda: others.append(launch(site)))))
    got = launch(site)
    assert {got.job.id, *(one.job.id for one in others)} == {site.cloud.compute.vm(PLAN.run).number}
    assert len(site.cloud.compute.made()) == 1


def test_no_answer_for_a_minute_and_then_there_is_one_vm(site: Site) -> None:
    site.cloud.faults.add(Fault(INSERT, Status(503), times=20))
    began = site.clock()
    got = launch(site)
    assert site.clock() - began > 60
    assert (got.created, site.cloud.compute.names(), len(site.cloud.compute.made())) == (True, [PLAN.run], 1)


def test_somebody_elses_vm_has_the_name(site: Site) -> None:
    site.compute.wait(site.compute.insert(ZONE, {**work_body(PLAN.run), "labels": {}}, "x"), 60)
    with pytest.raises(LaunchError, match="already exists"):
        launch(site)
    assert (site.sent("DELETE"), site.cloud.compute.vm(PLAN.run).status) == (0, "RUNNING")


def test_preempted_and_resumed_elsewhere_in_the_same_folder(site: Site) -> None:
    got = launch(site)
    site.clock.advance(60)
    site.cloud.compute.preempt(PLAN.run)
    site.write(got.job.id, exit=75)
    site.cloud.compute.capacity.out(ZONES[0])
    assert ended(site, got)[1].kind == "preempted"
    again = launch(site, fresh=False)
    if again.job.zone == ZONES[0]:
        assert ended(site, again)[1].kind == "stockout"
        again = launch(site, fresh=False)
    assert again.job.zone == ZONES[1]
    assert request.run_folder(again.job.request) == PLAN.run_folder
    assert again.job.id != got.job.id


def test_what_an_attempt_has_left_goes_before_the_next_is_made(site: Site) -> None:
    """Nobody watched: its container has ended, and its account may not delete it."""
    got = launch(site)
    site.clock.advance(60)
    site.write(got.job.id, exit=75)
    site.cloud.compute.capacity.out(ZONES[0])
    again = launch(site, fresh=False)
    assert again.job.id != got.job.id
    assert got.job.id not in [site.cloud.compute.vm(name).number for name in site.cloud.compute.names()]


def test_one_that_can_not_be_removed_is_told(site: Site) -> None:
    got = launch(site)
    site.clock.advance(60)
    site.write(got.job.id, exit=75)
    site.cloud.faults.add(Fault(DELETE, Status(403), times=99))
    site.cloud.compute.capacity.out(ZONES[0])
    with suppress(NoCapacity):
        launch(site, fresh=False)
    assert any(f"could not remove the resources of {got.job.name}" in line for line in site.said)


def test_two_vms_to_work_on_of_one_name_are_both_left_alone(site: Site) -> None:
    """The zone of the first could not be seen when somebody made the second: their disks hold work."""
    site.compute.insert(ZONE, work_body(), f"{UUID}1")
    site.clock.advance(3600)
    site.compute.insert(ZONES[1], work_body("dev", ZONES[1]), f"{UUID}2")
    site.clock.advance(60)
    with pytest.raises(UsageError, match=f"two VMs are named dev.*{ZONE}.*{ZONES[1]}") as told:
        launch(site, site.launcher(told=False), plan=WORKPLACE, ledger=Ledger(None, site.time))
    assert "launch vm delete dev --zone" in told.value.hint
    assert site.sent("DELETE") == 0


def test_a_vm_that_trains_is_no_vm_to_work_on(site: Site) -> None:
    launch(site)
    site.clock.advance(60)
    named = planned("vm", world={"training": False}, name=PLAN.run, machine={"type": "l4", "gpus": 1})
    with pytest.raises(UsageError, match=f"{PLAN.run} in {ZONE} is a training job"):
        launch(site, site.launcher(told=False), plan=named, ledger=Ledger(None, site.time))


def test_the_same_name_in_the_same_zone_once_the_first_is_gone(site: Site) -> None:
    alone = msgspec.structs.replace(PLAN, attempts=PLAN.attempts[:1])
    got = launch(site, plan=alone)
    site.clock.advance(60)
    site.write(got.job.id, exit=75)  # it deletes itself later
    job = site.launcher().get(got.job.name)
    settle(ledger_of(site), got.number, job, diagnose_end(job, request.context_of_job(job, "my-project")))
    site.compute.delete(got.job.name)
    again = launch(site, fresh=False, plan=alone)
    assert (again.job.zone, again.job.id == got.job.id, again.created) == (ZONES[0], False, True)
    assert len(site.cloud.compute.made()) == 2
