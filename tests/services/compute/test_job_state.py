"""How a VM ended, by its operations and its record, in tables; which VMs belong together."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.diagnosis import Refusal
from launcher.jobs.job import GONE, Job
from launcher.jobs.vm import VmInstance
from launcher.services.compute.client import Operation, operation_of
from launcher.services.compute.job_state import (
    Record,
    end_of,
    job_of,
    job_of_deleted_vm,
    remaining_vms,
    run_of_vm,
)

ZONE = "https://www.googleapis.com/compute/v1/projects/my-project/zones/us-central1-a"
NAME = "projects/my-project/zones/us-central1-a/instances/42"
STOCKOUT = {
    "code": "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS",
    "message": "The zone does not have enough resources available.",
    "errorDetails": [
        {"help": {"links": []}},
        {"errorInfo": {"reason": "resource_availability", "metadatas": {"zonesAvailable": "us-central1-b"}}},
    ],
}
COUNT = {"code": "VM_MIN_COUNT_NOT_REACHED", "message": "Requested minimum count of 2 VMs could not be created."}
QUOTA = {
    "code": "QUOTA_EXCEEDED",
    "message": "Quota 'GPUS_PER_GPU_FAMILY' exceeded.",
    "errorDetails": [
        {
            "quotaInfo": {
                "metricName": "compute.googleapis.com/gpus_per_gpu_family",
                "limitName": "GPUS-PER-GPU-FAMILY-per-project-region",
                "limit": 0.0,
                "dimensions": {"region": "us-central1", "gpu_family": "NVIDIA_H100"},
            }
        }
    ],
}


def operation(kind: str, at: int = 0, *errors: dict[str, Any], done: bool = True, **more: Any) -> Operation:
    ended = {"endTime": f"2026-01-01T00:{at + 1:02}:00Z"} if done else {}
    known = {"name": f"operation-{at}", "zone": ZONE, "operationType": kind, "targetId": "42", "user": "me@example.com"}
    status = {"status": "DONE" if done else "RUNNING", "insertTime": f"2026-01-01T00:{at:02}:00Z"}
    failed = {"error": {"errors": list(errors)}, "httpErrorStatusCode": 503} if errors else {}
    return operation_of({**known, **status, **ended, **failed, **more})


def ago(minutes: int) -> float:
    """Unix seconds of a minute of that hour."""
    return operation("x", minutes).inserted


# --- Operations -------------------------------------------------------------------------------------------------------


def refusal_in(failed: Operation) -> Refusal:
    assert failed.refusal
    return failed.refusal


def test_the_first_error_with_details_is_reported() -> None:
    refusal = refusal_in(operation("bulkInsert", 0, COUNT, STOCKOUT))
    assert refusal.reason == "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS"
    assert dict(refusal.metadata) == {"zonesAvailable": "us-central1-b"}
    assert (refusal.code, refusal.service) == (503, "compute")
    assert refusal_in(operation("bulkInsert", 0, COUNT)).reason == "VM_MIN_COUNT_NOT_REACHED"
    assert refusal_in(operation("insert", httpErrorStatusCode=500)).message == "HTTP 500"
    assert operation("insert").refusal is None


def test_a_quotas_details() -> None:
    assert dict(refusal_in(operation("insert", 0, QUOTA)).metadata) == {
        "quota_metric": "compute.googleapis.com/gpus_per_gpu_family",
        "quota_limit": "GPUS-PER-GPU-FAMILY-per-project-region",
        "quota_limit_value": "0",
        "region": "us-central1",
        "gpu_family": "NVIDIA_H100",
    }


MADE = operation("insert", 0)
BROKEN_OFF = operation("insert", 0, {"code": "OPERATION_CANCELED_BY_USER", "message": "Operation was canceled."})


@pytest.mark.parametrize(
    ("operations", "ceiling", "state", "reason"),
    [
        ([], None, None, None),
        ([MADE], None, None, None),
        ([operation("insert", done=False)], None, "PENDING", None),
        ([operation("insert", 0, STOCKOUT)], None, "FAILED", STOCKOUT["code"]),
        ([operation("insert", 0, httpErrorStatusCode=500)], None, "FAILED", "UNKNOWN"),
        ([operation("delete", 9), BROKEN_OFF], None, GONE, None),
        ([operation("delete", 9), MADE], None, GONE, None),
        ([operation("delete", 9, done=False), operation("insert", done=False)], None, GONE, None),
        ([operation("delete", 9), MADE], 10, "EXPIRED", None),
        ([operation("delete", 9), MADE], 20, GONE, None),
        ([operation("delete", 9, user="system"), MADE], None, "EXPIRED", None),
        (
            [operation("delete", 9, user="system"), operation("compute.instances.preempted", 8), MADE],
            *(10, "FAILED", "preempted"),
        ),
        ([operation("stop", 9), operation("compute.instances.hostError", 8), MADE], None, "FAILED", "hostError"),
        (
            [operation("stop", 9), operation("compute.instances.terminateOnHostMaintenance", 8), MADE],
            *(None, "FAILED", "maintenance"),
        ),
    ],
)
def test_an_end_by_operations(
    operations: list[Operation], ceiling: int | None, state: str | None, reason: str | None
) -> None:
    found = end_of(operations, ago(ceiling) if ceiling else None)
    assert (found and found.state) == state
    assert (found and found.failure and found.failure.reason) == reason


def test_a_job_that_is_known_by_its_operations_alone() -> None:
    link = f"{ZONE}/instances/gpt2-1234-n0"
    found = job_of_deleted_vm(None, NAME, [operation("delete", 9), operation("insert", 0, targetLink=link)], None)
    assert found
    assert (found.name, found.region, found.zone, found.run) == (NAME, "us-central1", "us-central1-a", "gpt2-1234")
    assert (found.created, found.started, found.ended) == (ago(0), ago(1), ago(10))
    assert job_of_deleted_vm(None, NAME, [], None) is None


@pytest.mark.parametrize(
    ("name", "run"), [("gpt2-1234", "gpt2-1234"), ("gpt2-1234-n12", "gpt2-1234"), ("a-nb", "a-nb"), ("n1", "n1")]
)
def test_a_vms_name_tells_its_run(name: str, run: str) -> None:
    assert run_of_vm(name) == run


# --- VMs that are there -----------------------------------------------------------------------------------------------


def machine(number: int = 42, name: str = "r-n0", created: float = 1000.0, **more: Any) -> VmInstance:
    known: dict[str, Any] = {
        "labels": {"launch-run": "r", "launch-identity": "x"},
        "parameters": {"nodes": ["r-n0", "r-n1"]},
        "status": "RUNNING",
        "started": created + 5,
        "stopped": 2000.0,
    }
    known |= {
        "project": "my-project",
        "zone": "us-central1-a",
        "machine_type": "g2-standard-12",
        "provisioning": "spot",
    }
    return VmInstance(id=str(number), name=name, created=created, **{**known, **more})


@pytest.mark.parametrize(
    ("status", "state"),
    [
        ("PENDING", "PENDING"),
        ("PROVISIONING", "PENDING"),
        ("STAGING", "PENDING"),
        ("RUNNING", "RUNNING"),
        ("REPAIRING", "RUNNING"),
        ("PENDING_STOP", "CANCELLING"),
        ("STOPPING", "CANCELLING"),
        ("SUSPENDING", "CANCELLING"),
        ("DEPROVISIONING", "CANCELLING"),
        ("TERMINATED", "FAILED"),
        ("STOPPED", "FAILED"),
        ("SUSPENDED", "FAILED"),
    ],
)
def test_each_state_of_a_vm(status: str, state: str) -> None:
    job = job_of(machine(status=status))
    assert job.state == state
    assert job.started == (None if state == "PENDING" else 1005.0)
    works = job_of(machine(status=status, labels={"launch-run": "dev"}))
    assert works.state == ("STOPPED" if state == "FAILED" else state)
    assert job_of(machine(status=status), Record(exit=0)).state == "SUCCEEDED"


def test_a_vm_stopped_before_its_container_ran_was_preempted() -> None:
    record = Record(exit=75, reason="the VM was told to stop before its container ran")
    error = job_of(machine(), record).error
    assert error
    assert error.reason == "stopped"


# --- Sets -------------------------------------------------------------------------------------------------------------

HEAD, PEER = machine(), machine(43, "r-n1", 1003.0)
NEXT = machine(50, created=1040.0), machine(51, "r-n1", 1041.0)
JOB = Job(name=NAME, region="us-central1", state="FAILED", created=1000.0, labels={"launch-run": "r"})


@pytest.mark.parametrize(
    ("fleet", "left"),
    [
        ([HEAD, PEER], ["42", "43"]),
        ([PEER], ["43"]),
        ([PEER, *NEXT], []),
        ([*NEXT], []),
        ([HEAD, PEER, machine(60, created=9000.0, zone="us-central1-b")], ["42", "43"]),
        ([machine(43, "r-n1", 2000.0)], []),
        ([machine(43, "r-n1", labels={"launch-run": "r"})], []),
        ([machine(43, "r-n1", labels={"launch-run": "s", "launch-identity": "x"})], []),
    ],
)
def test_the_leftovers_of_a_job(fleet: list[VmInstance], left: list[str]) -> None:
    assert [one.id for one in remaining_vms(JOB, fleet)] == left
