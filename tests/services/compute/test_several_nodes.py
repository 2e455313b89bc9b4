"""Several VMs that train together: made all or none, ended and removed together."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from launcher.diagnosis import diagnose_end, diagnose_refusal
from launcher.errors import UnreachableError
from launcher.jobs.job import Job
from launcher.services import request
from launcher.services.base import CreateRefused
from launcher.services.compute.client import operation_of
from launcher.testing.googlecloud import Fault, Reset
from tests.services.compute.vm_site import UUID, ZONE, Site, attempt_of, plan_of, work_body

NODES = 3
RUN = plan_of(NODES).run
NAMES = [f"{RUN}-n{number}" for number in range(NODES)]
MINE = f'labels.launch-run="{RUN}"'


def launched(site: Site, number: int = 1) -> Job:
    attempt = attempt_of(NODES)
    return site.vms.create(attempt, attempt.request, f"{UUID}{number}")


@pytest.fixture
def site(site: Site) -> Site:
    """The folder of another run than usual: it is found by the VMs' own metadata."""
    site.vms = site.launcher(told=False)
    return site


def test_a_job_is_its_first_vm(site: Site) -> None:
    job = launched(site)
    assert job.id == site.cloud.compute.vm(NAMES[0]).number
    assert (job.state, job.run, request.read(job.request).nodes) == ("PENDING", RUN, NODES)
    site.clock.advance(20)
    [found] = site.vms.find(MINE, [ZONE]).jobs
    assert (found.name, found.state, request.read(found.request).nodes) == (job.name, "RUNNING", NODES)


def test_a_lost_response_creates_no_second_set(site: Site) -> None:
    site.cloud.faults.add(Fault("compute.instances.bulkInsert", Reset("after")))
    job = launched(site)
    assert sorted(site.cloud.compute.names()) == NAMES
    assert job.id == site.cloud.compute.vm(NAMES[0]).number


@pytest.mark.parametrize("left", [0, 2])
def test_all_or_none(site: Site, left: int) -> None:
    site.cloud.compute.capacity.out(ZONE, left=left, after=90.0)
    job = launched(site)
    site.clock.advance(200)
    for vms in (site.vms, site.launcher(told=False)):
        ended = vms.get(job.name)
        told = diagnose_end(ended, request.context_of_job(ended, "my-project"))
        assert (ended.state, told.scope, told.kind) == ("FAILED", "zone", "stockout")
    assert site.cloud.compute.names() == []


def test_a_used_name_refuses_the_whole_set(site: Site) -> None:
    site.compute.insert(ZONE, {**work_body(NAMES[0]), "labels": {}}, f"{UUID}9")
    with pytest.raises(CreateRefused) as told:
        launched(site)
    assert told.value.refusal.reason == "alreadyExists"
    assert site.cloud.compute.names() == [NAMES[0]]


def test_the_first_vm_of_an_attempt_before_is_not_taken_for_it(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    launched(site)
    site.clock.advance(60)
    old = site.compute.instance(ZONE, NAMES[0])
    begun = operation_of({"zone": f"x/projects/my-project/zones/{ZONE}", "status": "RUNNING", "name": "operation-2"})
    begun = replace(begun, inserted=site.clock())
    monkeypatch.setattr(site.compute, "bulk_insert", lambda *_: begun)
    monkeypatch.setattr(site.compute, "operation", lambda *_: begun)
    with pytest.raises(UnreachableError, match="has not appeared"):
        launched(site, 2)
    assert old.created < begun.inserted


def test_the_first_vm_does_not_show_itself(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    from launcher.services.compute import create

    monkeypatch.setattr(create, "head_name", lambda _body: "another")
    with pytest.raises(UnreachableError, match="has not appeared"):
        launched(site)


def test_all_of_them_are_cancelled(site: Site) -> None:
    job = launched(site)
    site.clock.advance(20)
    other = site.compute.wait(site.compute.insert(ZONE, work_body(), f"{UUID}9"), 60)
    site.vms.cancel(job.name)
    assert site.vms.get(job.name).state == "CANCELLED"
    site.vms.release(site.vms.get(job.name))
    assert site.cloud.compute.names() == ["dev"]
    assert site.cloud.compute.vm("dev").number == other.target
    assert site.sent("DELETE") == NODES


def test_leftovers_of_the_first_vm_are_removed(site: Site) -> None:
    job = launched(site)
    site.clock.advance(20)
    site.write(job.id, NODES, exit=1)
    site.compute.delete(job.name)
    ended = site.vms.get(job.name)
    site.vms.release(ended)
    assert site.cloud.compute.names() == []


def test_the_next_attempt_in_the_same_zone_is_not_removed(site: Site) -> None:
    job = launched(site)
    for name in NAMES:
        site.compute.delete(f"projects/my-project/zones/{ZONE}/instances/{name}")
    site.clock.advance(20)
    launched(site, 2)
    before = site.sent("DELETE")
    site.vms.release(job)
    assert (site.sent("DELETE"), sorted(site.cloud.compute.names())) == (before, NAMES)


def test_a_peer_whose_container_never_started_ends_the_job(site: Site) -> None:
    job = launched(site)
    site.clock.advance(20)
    peer = site.cloud.compute.vm(NAMES[1])
    site.write(peer.number, NODES, exit=70, reason="docker pull: manifest unknown", name=NAMES[1])
    ended = site.vms.get(job.name)
    told = diagnose_end(ended, request.context_of_job(ended, "my-project"))
    assert (ended.state, told.kind) == ("FAILED", "image")


def test_a_failed_peer_does_not_end_the_job_by_itself(site: Site) -> None:
    job = launched(site)
    site.clock.advance(20)
    site.write(site.cloud.compute.vm(NAMES[1]).number, NODES, exit=1, name=NAMES[1])
    assert site.vms.get(job.name).state == "RUNNING"


def test_the_records_of_an_attempt_before_do_not_count(site: Site) -> None:
    site.write("41", NODES, exit=70, reason="no driver", name=NAMES[1])
    site.clock.advance(600)
    job = launched(site)
    site.clock.advance(20)
    assert site.vms.get(job.name).state == "RUNNING"


def test_a_quota_for_all_of_them(site: Site) -> None:
    site.cloud.compute.quotas.limit("PREEMPTIBLE_NVIDIA_L4_GPUS", 2, "us-central1")
    with pytest.raises(CreateRefused) as told:
        launched(site)
    tried = request.request_context("my-project", "us-central1", attempt_of(NODES).request, ZONE)
    found = diagnose_refusal(told.value.refusal, tried)
    assert (found.scope, found.kind) == ("region+provisioning", "quota")
    assert "--preferred-value=5 " in found.fix
