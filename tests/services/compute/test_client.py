"""Compute Engine on loopback, by Google's own clients."""

from __future__ import annotations

import json
from typing import Any

import pytest

from launcher.clock import Clock
from launcher.errors import LaunchError, NotAuthorised, StillRunning, UnreachableError
from launcher.gcp.api import REQUEST_SECONDS, Api
from launcher.jobs.vm import LEASE
from launcher.runs.driver import CURRENT_SECONDS, LOCK_SECONDS
from launcher.services.base import CreateRefused, GoneError
from launcher.services.compute.client import Compute
from launcher.testing.googlecloud import FakeClock, Fault, GoogleCloud, Meanwhile, Reset, Status, Torn, Truncated
from tests.plan.planning import request
from tests.services.compute.vm_site import (
    AGGREGATED,
    DELETE,
    GET,
    INSERT,
    OPERATION,
    UUID,
    ZONE,
    Site,
    attempt_of,
    work_body,
)

BODY = attempt_of().request


@pytest.fixture
def compute(site: Site) -> Compute:
    return site.compute


def canonical(body: Any) -> str:
    return json.dumps(body, sort_keys=True)


# --- What goes over the wire ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "gpus", "kind"), [("spot", 1, "l4"), ("standard", 2, "l4"), ("spot", 2, "h100"), ("standard", 2, "t4")]
)
def test_the_request_is_the_plans(cloud: GoogleCloud, compute: Compute, model: str, gpus: int, kind: str) -> None:
    machine = {"type": kind, "gpus": gpus, "local_ssds": 1 if kind == "t4" else None}
    zones: dict[str, Any] = {"zones": [ZONE]} if kind == "t4" else {}
    body = request("vm", regions=["us-central1"], provisioning=[model], machine=machine, **zones)
    zone = body["machineType"].split("/")[1]
    compute.insert(zone, body, UUID + "1")
    [arrived] = cloud.requests
    assert arrived.path == f"/compute/v1/projects/my-project/zones/{zone}/instances"
    assert arrived.query == {"requestId": UUID + "1"}
    assert canonical(arrived.body) == canonical(body)


def test_the_request_for_several_vms_is_the_plans(cloud: GoogleCloud, compute: Compute) -> None:
    body = attempt_of(2).request
    compute.bulk_insert(ZONE, body, UUID + "1")
    [arrived] = cloud.requests
    assert arrived.path == f"/compute/v1/projects/my-project/zones/{ZONE}/instances/bulkInsert"
    assert canonical(arrived.body) == canonical(body)


def test_a_request_with_an_unknown_field_is_not_sent(cloud: GoogleCloud, compute: Compute) -> None:
    with pytest.raises(LaunchError, match="nonsense") as told:
        compute.insert(ZONE, {**BODY, "nonsense": 1}, UUID + "1")
    assert (told.value.hint, "\n" in told.value.problem) == ("pip install --upgrade google-cloud-compute", False)
    assert not cloud.requests


# --- A VM's way -------------------------------------------------------------------------------------------------------


def test_a_vm_from_its_insert_to_its_delete(site: Site, compute: Compute) -> None:
    begun = compute.insert(ZONE, BODY, UUID + "1")
    assert (begun.kind, begun.target_name, begun.zone, begun.done) == ("insert", BODY["name"], ZONE, False)
    assert compute.instance(ZONE, begun.target).status == "PROVISIONING"
    made = compute.wait(begun, 60)
    assert (made.done, made.refusal, made.target) == (True, None, begun.target)
    machine = compute.instance(ZONE, BODY["name"])
    assert (machine.id, machine.status, machine.provisioning) == (begun.target, "RUNNING", "spot")
    assert machine.parameters["run"] == machine.run == BODY["name"]
    compute.wait(compute.stop(machine, discard_local_ssd=False), 60)
    assert compute.instance(ZONE, machine.id).status == "TERMINATED"
    compute.wait(compute.start(machine), 60)
    compute.wait(compute.delete(machine.resource), 60)
    with pytest.raises(GoneError):
        compute.instance(ZONE, machine.id)
    kinds = [one.kind for one in compute.operations_of(ZONE, machine.id)]
    assert kinds == ["delete", "start", "stop", "insert"]


def test_every_call_reports_a_deleted_vm(site: Site, compute: Compute) -> None:
    machine = compute.instance(ZONE, compute.insert(ZONE, BODY, UUID + "1").target)
    compute.wait(compute.delete(machine), 60)
    verbs: list[Any] = [
        lambda: compute.delete(machine),
        lambda: compute.stop(machine, discard_local_ssd=True),
        lambda: compute.start(machine),
        lambda: compute.set_metadata(machine, LEASE, "1"),
        lambda: compute.guest_attributes(machine),
        lambda: compute.serial(machine),
        lambda: compute.operation(ZONE, "operation-1"),
    ]
    for verb in verbs:
        with pytest.raises(GoneError):
            verb()


def test_one_metadata_item_changes_and_the_others_stay(site: Site, compute: Compute) -> None:
    machine = compute.instance(ZONE, compute.insert(ZONE, BODY, UUID + "1").target)
    compute.set_metadata(machine, LEASE, "1700000000")
    compute.set_metadata(machine, "mine", "x")
    compute.set_metadata(machine, LEASE, "1800000000")
    now = compute.instance(ZONE, machine.id)
    assert (now.lease_moved_to, now.parameters) == (1_800_000_000, machine.parameters)
    compute.set_metadata(machine, "mine", None)
    keys = [item["key"] for item in compute.instance(ZONE, machine.id).request["metadata"]["items"]]
    assert sorted(keys) == sorted([*(item["key"] for item in BODY["metadata"]["items"]), LEASE])


def test_a_concurrent_metadata_change_is_kept(site: Site, compute: Compute) -> None:
    machine = compute.instance(ZONE, compute.insert(ZONE, BODY, UUID + "1").target)
    theirs = Site(site.cloud, site.clock).compute
    meanwhile = Meanwhile(lambda: theirs.set_metadata(machine, "theirs", "1"))
    site.cloud.faults.add(Fault(GET, meanwhile))  # after we have read it
    compute.set_metadata(machine, LEASE, "1700000000")
    assert site.sent("POST", "/setMetadata") == 3
    items = {item["key"] for item in compute.instance(ZONE, machine.id).request["metadata"]["items"]}
    assert {"theirs", LEASE} <= items


def test_guest_attributes_and_serial_output_of_a_vm(site: Site, compute: Compute) -> None:
    machine = compute.wait(compute.insert(ZONE, BODY, UUID + "1"), 60)
    there = compute.instance(ZONE, machine.target)
    assert compute.guest_attributes(there) == {}
    site.cloud.compute.set_guest(there.name, "launch/state", "driver")
    site.cloud.compute.set_guest(there.name, "launch/reason", "")
    assert compute.guest_attributes(there) == {"state": "driver", "reason": ""}
    text, end = compute.serial(there)
    assert "boots" in text
    site.cloud.compute.write_serial(there.name, "more\n")
    assert compute.serial(there, end) == ("more\n", end + 5)


# --- Lists ------------------------------------------------------------------------------------------------------------


def test_the_fleet_is_of_all_zones_and_pages(
    site: Site, compute: Compute, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.services.compute.client.PAGE_SIZE", 1)
    for number, zone in enumerate((ZONE, "us-central1-b", "us-central1-c")):
        compute.insert(zone, work_body(f"dev{number}", zone), UUID + str(number))
        clock.advance(1)
    fleet = compute.instances()
    assert [(one.name, one.zone) for one in fleet.machines] == [
        ("dev2", "us-central1-c"),
        ("dev1", "us-central1-b"),
        ("dev0", ZONE),
    ]
    assert fleet.unread == {}
    assert [one.name for one in compute.instances('labels.launch-run="dev1"').machines] == ["dev1"]
    assert len(compute.instances("labels.launch-run:*").machines) == 3


def test_an_unreachable_zone_hides_no_other(site: Site, compute: Compute) -> None:
    compute.insert(ZONE, work_body(), UUID + "1")
    site.cloud.compute.unreachable.add("us-central1-b")
    fleet = compute.instances()
    assert [one.name for one in fleet.machines] == ["dev"]
    assert list(fleet.unread) == ["us-central1-b"]


# --- What goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("effect", [Reset(), Reset("after"), Status(503), Truncated(), Torn(at=0, bits=0x80)])
def test_a_lost_insert_response_creates_one_vm(site: Site, compute: Compute, effect: Any) -> None:
    site.cloud.faults.add(Fault(INSERT, effect))
    operation = compute.wait(compute.insert(ZONE, BODY, UUID + "1"), 60)
    assert site.sent("POST", "/instances") == 2
    assert site.cloud.compute.names() == [BODY["name"]]
    assert operation.target == site.cloud.compute.vm(BODY["name"]).number


def test_the_same_id_later_is_the_same_vm_also_by_another_launch(site: Site, compute: Compute) -> None:
    first = compute.insert(ZONE, BODY, UUID + "1")
    second = Site(site.cloud, site.clock).compute.insert(ZONE, BODY, UUID + "1")
    assert (first.name, first.target) == (second.name, second.target)


@pytest.mark.parametrize("code", [400, 403, 404, 409])
def test_a_refusal_says_that_nothing_was_made(site: Site, compute: Compute, code: int) -> None:
    site.cloud.faults.add(Fault(INSERT, Status(code, message="Google's words", reason="why")))
    with pytest.raises(CreateRefused) as told:
        compute.insert(ZONE, BODY, UUID + "1")
    refusal = told.value.refusal
    assert (refusal.code, refusal.message, refusal.reason) == (code, "Google's words", "why")
    assert refusal.service == "compute"


@pytest.mark.parametrize("method", [INSERT, GET, AGGREGATED])
def test_too_many_requests_pass_though_their_status_is_403(site: Site, compute: Compute, method: str) -> None:
    rate = Status(403, message="Quota exceeded for quota group 'ReadGroup'.", reason="rateLimitExceeded")
    site.cloud.faults.add(Fault(method, rate, times=2))
    machine = compute.instance(ZONE, compute.insert(ZONE, BODY, UUID + "1").target)
    assert [one.id for one in compute.instances().machines] == [machine.id]


def test_no_answer_for_a_minute_is_no_refusal(site: Site, compute: Compute) -> None:
    site.cloud.faults.add(Fault(GET, Status(503), times=99))
    began = site.clock()
    with pytest.raises(UnreachableError):
        compute.instance(ZONE, "dev")
    assert 45 < site.clock() - began < 75
    assert any("retrying" in line for line in site.said)


@pytest.mark.parametrize("slept", [0.0, 3600.0])
def test_an_insert_is_not_sent_again_when_its_lock_may_be_given_up(
    site: Site, slept: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sent 20 s after its lock at the latest (submit.py), each attempt at it waits 30 s for an answer, and a lock is
    given up after 60 s. A machine that sleeps between two tries (its monotonic clock stands still) doesn't send again
    either."""
    sent: list[float] = []

    class Watched(Api):
        def wall(self) -> float:
            return site.clock() + slept * len(sent)

        def once(self, method: str, seconds: float | None = None, **request: Any) -> Any:
            if method == "insert_unary":
                sent.append(self.wall())
            return super().once(method, seconds, **request)

    monkeypatch.setattr("launcher.gcp.api.Api", Watched)
    site.cloud.faults.add(Fault(INSERT, Status(503), times=99))
    began = site.clock()
    with pytest.raises(UnreachableError):
        site.launch()
    assert len(sent) > 2 or slept
    assert sent[-1] - began + CURRENT_SECONDS + REQUEST_SECONDS < LOCK_SECONDS


def test_a_repeated_delete_is_the_same_delete(site: Site, compute: Compute) -> None:
    machine = compute.instance(ZONE, compute.insert(ZONE, BODY, UUID + "1").target)
    site.cloud.compute.pace.delete = 0.0
    site.cloud.faults.add(Fault(DELETE, Reset("after")))
    assert compute.delete(machine).kind == "delete"


def test_an_operation_that_fails_after_90_s_says_why(site: Site, compute: Compute) -> None:
    site.cloud.compute.capacity.out(ZONE, after=90.0, available=("us-central1-b", "us-central1-f"))
    refusal = compute.wait(compute.insert(ZONE, BODY, UUID + "1"), 300).refusal
    assert refusal
    assert (refusal.reason, refusal.code) == ("ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS", 503)
    assert refusal.metadata["zonesAvailable"] == "us-central1-b,us-central1-f"


def test_an_outage_during_a_wait_is_waited_out(site: Site, compute: Compute) -> None:
    begun = compute.insert(ZONE, BODY, UUID + "1")
    site.cloud.faults.add(Fault(OPERATION, Status(503), times=12))
    assert compute.wait(begun, 600).done


def test_a_wait_has_its_end(site: Site, compute: Compute) -> None:
    site.cloud.compute.pace.running = 900.0
    begun = compute.insert(ZONE, BODY, UUID + "1")
    began = site.clock()
    with pytest.raises(StillRunning, match=f"insert of {BODY['name']}"):
        compute.wait(begun, 30)
    assert 30 <= site.clock() - began < 32
    site.cloud.faults.add(Fault(OPERATION, Status(503), times=99))
    with pytest.raises(UnreachableError):
        compute.wait(begun, 30)


def test_a_clock_that_is_a_day_off_does_not_matter(site: Site) -> None:
    compute = Site(site.cloud, site.clock, off=86_400.0).compute
    operation = compute.wait(compute.insert(ZONE, BODY, UUID + "1"), 60)
    assert operation.inserted == 1_700_000_000
    assert compute.instance(ZONE, operation.target).created == 1_700_000_000


def test_a_missing_permission_names_the_grant(site: Site, compute: Compute) -> None:
    site.cloud.faults.add(Fault(GET, Status(403, message="Required 'compute.instances.get' permission for 'x'")))
    with pytest.raises(NotAuthorised) as told:
        compute.instance(ZONE, "dev")
    assert "roles/compute.instanceAdmin.v1" in told.value.hint


@pytest.mark.parametrize("effect", [Status(503), Reset(), Truncated()])
def test_a_list_that_can_not_be_read_is_read_again(site: Site, compute: Compute, effect: Any) -> None:
    compute.insert(ZONE, work_body(), UUID + "1")
    site.cloud.faults.add(Fault(AGGREGATED, effect))
    assert [one.name for one in compute.instances().machines] == ["dev"]


def test_the_endpoint_is_gclouds_without_its_path(site: Site) -> None:
    environ = site.cloud.environ()
    assert environ["CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE"].endswith("/compute/v1/")
    again = Compute("my-project", environ, Clock(site.clock, site.clock.advance))
    assert again.instances().machines == ()
