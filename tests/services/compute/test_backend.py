"""VMs that train, as jobs: one VM on loopback, from its request to its end, however that comes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from launch_train import runfolder
from launcher.diagnosis import diagnose_end, diagnose_refusal
from launcher.errors import LaunchError
from launcher.gcp.api import status_of
from launcher.jobs.job import GONE, Job
from launcher.services import request
from launcher.services.base import CreateRefused, GoneError
from launcher.testing.googlecloud import Fault, Status
from tests.services.compute.vm_site import ZONE, Site, attempt_of, plan_of

RUN = plan_of().run
MINE = f'labels.launch-run="{RUN}"'


def diagnosis(job: Job) -> tuple[str, str]:
    found = diagnose_end(job, request.context_of_job(job, "my-project"))
    return found.scope, found.kind


# --- Its way ----------------------------------------------------------------------------------------------------------


def test_a_job_is_there_at_once_and_waits_for_its_machine(site: Site) -> None:
    job = site.launch()
    number = site.cloud.compute.vm(RUN).number
    assert job.name == f"projects/my-project/zones/{ZONE}/instances/{number}"
    assert (job.state, job.region, job.zone, job.run, job.created) == (
        "PENDING",
        "us-central1",
        ZONE,
        RUN,
        site.clock(),
    )
    assert json.dumps(job.request, sort_keys=True) == json.dumps(attempt_of().request, sort_keys=True)
    assert (job.is_waiting, job.started) == (True, None)
    states = []
    for _ in range(3):
        states.append(site.vms.get(job.name).state)
        site.clock.advance(5)
    assert states == ["PENDING", "PENDING", "RUNNING"]
    now = site.vms.get(job.name)
    assert (now.run, now.started, request.read(now.request).image) == (
        RUN,
        job.created + 5,
        request.read(job.request).image,
    )


@pytest.mark.parametrize(
    ("record", "state", "means"),
    [
        ({"exit": 0}, "SUCCEEDED", ("permanent", "succeeded")),
        ({"exit": 1}, "FAILED", ("permanent", "user")),
        ({"exit": 75}, "FAILED", ("transient", "preempted")),
        ({"exit": 70}, "FAILED", ("region+provisioning", "unfit")),
        ({"exit": 70, "reason": "nvidia-smi has not answered for 10 minutes"}, "FAILED", ("zone", "unfit")),
        ({"exit": 70, "reason": "docker pull: manifest unknown"}, "FAILED", ("permanent", "image")),
    ],
)
@pytest.mark.parametrize("there", [True, False])
def test_the_end_record_counts_whatever_happens_to_the_vm(
    site: Site, record: dict[str, Any], state: str, means: tuple[str, str], there: bool
) -> None:
    job = site.running()
    site.write(job.id, **record)
    if not there:
        site.compute.wait(site.compute.delete(job.name), 60)
    for vms in (site.vms, site.launcher()):
        ended = vms.get(job.name)
        assert (ended.state, diagnosis(ended)) == (state, means)
        assert (ended.run, ended.ended) == (RUN, 1_700_000_010)
        assert (ended.error is None) == (state != "FAILED")


def test_a_recorded_cancel_is_not_an_end_while_the_vm_runs(site: Site) -> None:
    """Whoever cancelled it died before the delete: while the VM is up nothing may follow it, and a cancel ends it."""
    job = site.running()
    site.write(job.id, exit=75, cancelled=True)
    assert site.vms.get(job.name).state == "CANCELLING"
    site.launcher().cancel(job.name)
    ended = site.vms.get(job.name)
    assert (ended.state, diagnosis(ended), ended.ended) == ("CANCELLED", ("permanent", "cancelled"), 1_700_000_010)
    site.clock.advance(60)
    assert (site.cloud.compute.names(), site.launcher().get(job.name).state) == ([], "CANCELLED")


def test_an_unreadable_end_record_is_ignored(site: Site) -> None:
    job = site.running()
    site.folder().write(runfolder.machine_end(job.id), b'{"exit": "zero"}')
    assert site.vms.get(job.name).state == "RUNNING"


def test_a_run_folder_that_can_not_be_read_hides_no_vm_that_runs(site: Site) -> None:
    job = site.running()
    site.cloud.faults.add(Fault("storage.objects.get", Status(403), times=99))
    assert site.vms.get(job.name).state == "RUNNING"
    assert any("run folder" in line for line in site.said)
    site.compute.wait(site.compute.delete(job.name), 60)
    with pytest.raises(LaunchError, match="run folder can't be used"):
        site.vms.get(job.name)


# --- Ends without a record --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("known", [True, False])
def test_a_stockout_after_90_s(site: Site, known: bool) -> None:
    site.cloud.compute.capacity.out(ZONE, after=90.0, available=("us-central1-b",))
    job = site.launch()
    site.clock.advance(80)
    assert site.vms.get(job.name).state == "PENDING"
    site.clock.advance(20)
    ended = (site.vms if known else site.launcher()).get(job.name)
    assert (ended.state, ended.run, diagnosis(ended)) == ("FAILED", RUN, ("zone", "stockout"))
    assert ended.error
    assert ended.error.reason == "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS"
    assert diagnose_end(ended, request.context_of_job(ended, "my-project")).zones == ("us-central1-b",)
    assert (ended.started, ended.billed) == (None, 0.0)


def test_a_failed_creation_keeps_its_request_and_labels(site: Site) -> None:
    site.cloud.compute.capacity.out(ZONE)
    job = site.launch()
    site.clock.advance(60)
    ended = site.vms.get(job.name)
    assert (ended.request, ended.labels) == (job.request, job.labels)
    assert "no capacity for g2-standard-12" in diagnose_end(ended, request.context_of_job(ended, "my-project")).cause


def test_an_operation_that_has_failed_already_is_a_refusal(site: Site) -> None:
    site.cloud.compute.quotas.limit("PREEMPTIBLE_NVIDIA_L4_GPUS", 0, "us-central1", late=True)
    with pytest.raises(CreateRefused) as refused:
        site.launch()
    told = diagnose_refusal(
        refused.value.refusal, request.request_context("my-project", "us-central1", attempt_of().request, ZONE)
    )
    assert (told.scope, told.kind) == ("region+provisioning", "quota")
    assert "--quota-id=PREEMPTIBLE-NVIDIA-L4-GPUS-per-project-region --preferred-value=1 " in told.fix
    assert "--dimensions=region=us-central1" in told.fix


@pytest.mark.parametrize("seconds", [1, 7, 60])
def test_preempted_while_it_is_made_or_runs(site: Site, seconds: int) -> None:
    job = site.launch()
    site.clock.advance(seconds)
    site.cloud.compute.preempt(RUN)
    site.clock.advance(120)
    ended = site.launcher().get(job.name)
    assert (ended.state, diagnosis(ended)[1]) == ("FAILED", "preempted")


def test_a_host_error_ends_the_job(site: Site) -> None:
    job = site.running()
    site.cloud.compute.host_error(RUN)
    ended = site.vms.get(job.name)
    assert (ended.state, ended.error and ended.error.reason) == ("FAILED", "hostError")
    assert diagnosis(ended) == ("transient", "preempted")


def test_a_stopped_vm_ends_the_job(site: Site) -> None:
    job = site.running()
    site.cloud.compute.power_off(RUN)
    assert site.vms.get(job.name).state == "CANCELLING"
    site.clock.advance(30)
    ended = site.vms.get(job.name)
    assert (ended.state, ended.error and ended.error.reason) == ("FAILED", "stopped")
    assert ended.ended == 1_700_000_030


@pytest.mark.parametrize("known", [True, False])
def test_the_time_limit_ends_the_job(site: Site, known: bool) -> None:
    job = site.running()
    site.clock.advance(86_400 + 60)
    ended = (site.vms if known else site.launcher()).get(job.name)
    assert (ended.state, diagnosis(ended)) == ("EXPIRED", ("permanent", "expired"))


@pytest.mark.parametrize("after", [3, 30])
def test_a_deleted_vm_ends_the_job(site: Site, after: int) -> None:
    job = site.launch()
    site.clock.advance(after)
    site.compute.delete(job.name)
    site.clock.advance(60)
    ended = site.vms.get(job.name)
    assert (ended.state, diagnosis(ended)) == (GONE, ("permanent", "cancelled"))


def test_a_vm_without_operations_or_record_is_gone(site: Site) -> None:
    job = site.running()
    site.compute.wait(site.compute.delete(job.name), 60)
    site.cloud.compute.forget_operations()
    with pytest.raises(GoneError) as told:
        site.launcher().get(job.name)
    assert status_of(told.value) == 404  # by which a watch knows that it isn't there, rather than not to be asked about
    with pytest.raises(LaunchError, match="invalid name of a VM"):
        site.vms.get("projects/my-project/zones/us-central1-a/instances/by-name")
