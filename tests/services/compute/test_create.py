"""VMs that train, as jobs: made, found, cancelled and removed; names that are taken, zones that are down."""

from __future__ import annotations

import json

import pytest

from launch_train import runfolder
from launcher.diagnosis import diagnose_refusal
from launcher.errors import LaunchError, UnreachableError
from launcher.jobs.job import GONE
from launcher.runs.endings import cancel_and_confirm
from launcher.services import request
from launcher.services.base import CreateRefused, GoneError
from launcher.testing.googlecloud import Fault, Status
from tests.services.compute.vm_site import (
    AGGREGATED,
    DELETE,
    GET,
    UUID,
    ZONE,
    Site,
    attempt_of,
    plan_of,
    work_body,
)

RUN = plan_of().run
MINE = f'labels.launch-run="{RUN}"'


# --- Making it --------------------------------------------------------------------------------------------------------


def test_the_launch_is_killed_after_its_insert_and_the_next_finds_the_vm(site: Site) -> None:
    job = site.launch()
    again = site.launcher()
    assert [one.name for one in again.find(MINE, [ZONE]).jobs] == [job.name]
    attempt = attempt_of()
    assert again.create(attempt, attempt.request, f"{UUID}1").name == job.name
    assert len(site.cloud.compute.made()) == 1


def test_a_quota_that_refuses_at_once(site: Site) -> None:
    site.cloud.compute.quotas.limit("GPUS_ALL_REGIONS", 0)
    with pytest.raises(CreateRefused) as told:
        site.launch()
    found = diagnose_refusal(
        told.value.refusal, request.request_context("my-project", "us-central1", attempt_of().request, ZONE)
    )
    assert (found.scope, found.kind) == ("project", "quota")
    assert "--quota-id=GPUS-ALL-REGIONS-per-project --preferred-value=1;" in found.fix


def test_a_vm_of_another_user_with_the_name_is_never_changed(site: Site) -> None:
    theirs = {**work_body(RUN), "labels": {"team": "other"}}
    site.compute.wait(site.compute.insert(ZONE, theirs, f"{UUID}9"), 60)
    with pytest.raises(CreateRefused) as told:
        site.launch()
    assert (told.value.refusal.code, told.value.refusal.reason) == (409, "alreadyExists")
    assert site.sent("DELETE") == 0
    assert site.cloud.compute.vm(RUN).status == "RUNNING"
    assert site.vms.find(MINE, [ZONE]).jobs == ()


@pytest.mark.parametrize("way", ["deleting", "stopped", "ended"])
def test_the_name_is_still_used_by_an_earlier_attempt(site: Site, way: str) -> None:
    before = site.running()
    if way == "deleting":
        site.compute.delete(before.name)
    if way == "stopped":
        site.cloud.compute.power_off(RUN)
        site.clock.advance(60)
    if way == "ended":
        site.write(before.id, exit=75)
    with pytest.raises(CreateRefused) as told:
        site.launch(2)
    tried = request.request_context("my-project", "us-central1", attempt_of().request, ZONE)
    found = diagnose_refusal(told.value.refusal, tried)
    assert (found.scope, found.kind, found.retry_after) == ("transient", "busy", 15.0)
    assert site.sent("DELETE") == (0 if way == "ended" else 1)
    if way == "ended":
        site.compute.delete(before.name)
    site.clock.advance(60)
    assert site.launch(3).id != before.id


def test_the_name_is_used_by_the_runs_own_running_vm(site: Site) -> None:
    site.running()
    with pytest.raises(UnreachableError, match="of this run already exists"):
        site.launch(2)
    assert site.sent("DELETE") == 0


# --- Finding ----------------------------------------------------------------------------------------------------------


def test_jobs_of_all_zones_are_found_by_one_list(site: Site) -> None:
    first = site.launch()
    site.clock.advance(20)
    second = site.launch(2, "us-central1-b")
    site.write(first.id, exit=1)
    site.compute.insert(ZONE, work_body(), f"{UUID}5")
    found = site.vms.find("labels.launch-run:*", ["us-central1"])
    assert [(job.name, job.state) for job in found.jobs] == [(second.name, "PENDING"), (first.name, "FAILED")]
    assert found.unread == {}
    assert site.sent("GET", "/aggregated/instances") == 1
    assert [job.state for job in site.vms.find('labels.launch-run="dev"', [ZONE]).jobs] == ["PENDING"]


def test_an_unreachable_zone_is_reported_where_it_matters(site: Site) -> None:
    job = site.launch()
    site.cloud.compute.unreachable.add("us-central1-b")
    for place in ("us-central1", "us-central1-b"):
        with pytest.raises(UnreachableError, match="us-central1-b"):
            site.vms.find(MINE, [place])
        found = site.vms.find(MINE, [place], partly=True)
        assert ([one.name for one in found.jobs], list(found.unread)) == ([job.name], [place])
    assert site.vms.find(MINE, [ZONE, "us-east4"]).unread == {}
    site.cloud.faults.add(Fault(AGGREGATED, Status(403), times=9))
    assert list(site.vms.find(MINE, [ZONE], partly=True).unread) == [ZONE]


def test_a_vm_to_work_on_that_is_stopped_has_not_ended(site: Site) -> None:
    site.compute.insert(ZONE, work_body(), f"{UUID}1")
    site.clock.advance(20)
    site.cloud.compute.power_off("dev")
    site.clock.advance(60)
    [job] = site.vms.find('labels.launch-run="dev"', [ZONE]).jobs
    assert (job.state, job.has_ended, job.is_waiting) == ("STOPPED", False, False)


# --- Ending it --------------------------------------------------------------------------------------------------------


def test_a_cancelled_run_says_so(site: Site) -> None:
    job = site.running()
    site.vms.cancel(job.name)
    record = json.loads(site.folder().read(runfolder.machine_end(job.id)))
    assert (record["exit"], record["cancelled"], record["name"], record["zone"]) == (75, True, RUN, ZONE)
    assert site.vms.get(job.name).state == "CANCELLED"
    site.clock.advance(60)
    assert site.cloud.compute.names() == []
    assert site.launcher().get(job.name).state == "CANCELLED"
    site.vms.cancel(job.name)
    assert site.sent("DELETE") == 1


def test_a_run_that_has_ended_by_itself_was_not_cancelled(site: Site) -> None:
    job = site.running()
    site.write(job.id, exit=0)
    site.vms.cancel(job.name)
    assert site.vms.get(job.name).state == "SUCCEEDED"
    assert site.sent("DELETE") == 1


def test_a_cancel_works_even_if_it_cannot_be_recorded(site: Site) -> None:
    job = site.running()
    site.cloud.faults.add(Fault("storage.objects.insert", Status(403), times=99))
    site.vms.cancel(job.name)
    site.clock.advance(60)
    assert (site.cloud.compute.names(), site.vms.get(job.name).state) == ([], GONE)
    assert any("could not record" in line for line in site.said)


def test_one_that_does_not_show_itself_yet_is_not_cancelled_and_says_so(site: Site) -> None:
    """A second after its insert: the operation is all that there is of it."""
    job = site.launch()
    site.cloud.faults.add(Fault(GET, Status(404)))
    with pytest.raises(UnreachableError, match="being created"):
        site.vms.cancel(job.name)
    ended = cancel_and_confirm(site.vms, job, site.time, site.said.append)
    site.clock.advance(60)
    assert (ended.state, site.cloud.compute.names()) == ("CANCELLED", [])


def test_there_is_nothing_to_cancel(site: Site) -> None:
    with pytest.raises(GoneError):
        site.vms.cancel(f"projects/my-project/zones/{ZONE}/instances/42")
    job = site.running()
    site.compute.delete(job.name)
    site.vms.cancel(job.name)  # it is on its way out
    site.clock.advance(60)
    site.vms.cancel(job.name)  # and somebody has deleted it


def test_a_vm_that_deletes_itself_is_waited_for(site: Site) -> None:
    job = site.running()
    site.write(job.id, exit=0)
    site.compute.delete(job.name)
    began = site.clock()
    site.vms.release(job)
    assert site.clock() - began < 20
    assert (site.cloud.compute.names(), site.sent("DELETE")) == ([], 1)


@pytest.mark.parametrize("off", [False, True])
def test_a_vm_that_could_not_delete_itself_is_deleted_with_the_reason(site: Site, off: bool) -> None:
    job = site.running()
    site.write(job.id, exit=0, cleanup="trainer lacks compute.instances.delete: gcloud projects add-iam…")
    if off:
        site.cloud.compute.power_off(RUN)
        site.clock.advance(30)
    began = site.clock()
    site.vms.release(job)
    assert site.clock() - began < (20 if off else 50)
    assert (site.cloud.compute.names(), site.sent("DELETE")) == ([], 1)
    [line] = [line for line in site.said if "could not delete itself" in line]
    assert "gcloud projects add-iam" in line


def test_a_failed_removal_is_reported_with_the_command(site: Site) -> None:
    job = site.running()
    site.cloud.compute.pace.delete = 900.0
    with pytest.raises(LaunchError, match="still exists and is billed, 3 minutes") as told:
        site.vms.release(job)
    assert told.value.hint == f"gcloud compute instances delete {RUN} --zone={ZONE} --project=my-project"


def test_release_leaves_the_next_attempt_and_other_zones_alone(site: Site) -> None:
    job = site.running()
    site.compute.wait(site.compute.delete(job.name), 60)
    following = site.launch(2)
    site.launch(3, "us-central1-b")
    site.vms.release(job)
    assert site.sent("DELETE") == 1
    assert site.cloud.compute.vm(following.id).status == "PROVISIONING"


def test_release_never_touches_a_vm_to_work_on(site: Site) -> None:
    begun = site.compute.insert(ZONE, work_body(), f"{UUID}1")
    job = site.vms.get(f"projects/my-project/zones/{ZONE}/instances/{begun.target}")
    site.vms.release(job)
    assert (site.cloud.compute.names(), site.sent("DELETE")) == (["dev"], 0)


def test_a_refused_delete_is_reported(site: Site) -> None:
    job = site.running()
    site.cloud.faults.add(Fault(DELETE, Status(403, message="Required 'compute.instances.delete' permission")))
    with pytest.raises(LaunchError, match=r"compute\.instances\.delete"):
        site.vms.cancel(job.name)


def test_an_outage_of_get_is_reported_as_an_outage(site: Site) -> None:
    job = site.running()
    site.cloud.faults.add(Fault(GET, Status(503), times=99))
    with pytest.raises(UnreachableError):
        site.vms.get(job.name)
