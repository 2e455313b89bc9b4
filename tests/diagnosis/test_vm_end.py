"""What the end of a VM that trains means."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from launcher.diagnosis import diagnose_end
from launcher.jobs.job import GONE, Failure, Job
from tests.diagnosis.wordings import FAMILY, POOL, PULL, VM

SAID = "The replica gpt2-1234 exited with a non-zero status of {}."


def job(state: str, error: Failure | None = None) -> Job:
    return Job(
        name="projects/my-project/zones/us-central1-a/instances/42",
        region="us-central1",
        state=state,
        created=1000.0,
        started=1010.0,
        error=error,
        labels={"launch-run": "gpt2-1234"},
    )


def exited(status: int) -> Job:
    return job("FAILED", Failure(code=3, message=SAID.format(status)))


def unstarted(reason: str) -> Job:
    message = f"{SAID.format(70)} {reason}"
    return job("FAILED", Failure(code=3, message=message, reason="startup", metadata={"reason": reason}))


def taken(reason: str) -> Job:
    return job("FAILED", Failure(code=14, message="?", reason=reason))


def refused(code: int, reason: str, message: str) -> Job:
    return job("FAILED", Failure(code=code, message=message, reason=reason))


RESUME = "launch vm SPEC --run --resume gpt2-1234"
ENDS: list[tuple[Job, str, str, str, str]] = [
    (job("SUCCEEDED"), "permanent", "succeeded", "done", ""),
    (job("CANCELLED"), "permanent", "cancelled", "it was cancelled", RESUME),
    (job(GONE), "permanent", "cancelled", "the VM was deleted", RESUME),
    (job("EXPIRED"), "permanent", "expired", "the time limit (limits.hours)", RESUME),
    # --- the container's own end
    (exited(1), "permanent", "user", "gpt2-1234 exited with 1", "launch logs gpt2-1234"),
    (exited(75), "transient", "preempted", "the checkpoint was saved", "launch logs"),
    (exited(70), "region+provisioning", "unfit", "the machine was unfit", "launch logs"),
    (exited(78), "permanent", "user", "marked as permanently failed", RESUME),
    (exited(137), "permanent", "user", "killed", "launch logs"),
    # --- the VM went from under it
    (taken("preempted"), "transient", "preempted", "the VM was preempted", "launch logs"),
    (taken("hostError"), "transient", "preempted", "the VM's host failed", "launch logs"),
    (taken("maintenance"), "transient", "preempted", "host maintenance", "launch logs"),
    (taken("stopped"), "transient", "preempted", "was stopped before its container", "launch logs"),
    # --- the container was never started
    (
        unstarted(f"the image can't be pulled: Error response from daemon: {PULL}"),
        *(
            "permanent",
            "permission",
            "trainer@my-project.iam.gserviceaccount.com lacks the permission artifactregistry",
        ),
        "gcloud artifacts repositories add-iam-policy-binding launch --location=us --project=my-project "
        "--member=serviceAccount:trainer@my-project.iam.gserviceaccount.com --role=roles/artifactregistry.reader",
    ),
    (
        unstarted("the image can't be pulled: manifest unknown"),
        *("permanent", "image", "can't be pulled", "gcloud artifacts docker images describe us-docker.pkg.dev/"),
    ),
    (
        unstarted("the image can't be pulled: dial tcp 142.250.0.82:443: i/o timeout"),
        *("region", "image", "i/o timeout", "gcloud compute routers list --project=my-project"),
    ),
    (
        unstarted("nvidia-smi gives no answer: the image has no driver for this GPU, or installs it still"),
        *("zone", "unfit", "nvidia-smi gives no answer", "launch logs"),
    ),
    (unstarted("the image has no docker"), "permanent", "unfit", "could not run the job: the image has", "launch logs"),
    (
        unstarted(
            "gs://data-1 can't be mounted: the VM's account trainer@my-project.iam.gserviceaccount.com lacks "
            "storage.objects.list on this bucket: gcloud storage buckets add-iam-policy-binding gs://data-1 --role=x"
        ),
        *("permanent", "permission", "trainer@my-project.iam.gserviceaccount.com lacks the permission storage.objects"),
        "gcloud storage buckets add-iam-policy-binding gs://data-1 "
        "--member=serviceAccount:trainer@my-project.iam.gserviceaccount.com --role=roles/storage.objectUser",
    ),
    (
        unstarted("the bucket gs://data-1 does not exist"),
        *("permanent", "unfit", "could not run the job: the bucket gs://data-1 does not exist", "launch logs"),
    ),
    (
        unstarted("data-1 can't be mounted at /gcs/data-1: fuse: device not found"),
        *("permanent", "unfit", "data-1 can't be mounted at /gcs/data-1: fuse", "launch logs"),
    ),
    # --- it was never made
    (
        refused(14, "ZONE_RESOURCE_POOL_EXHAUSTED", POOL),
        *("zone", "stockout", "no capacity for a3-highgpu-2g in us-central1-a", "Try more regions"),
    ),
    (
        refused(7, "QUOTA_EXCEEDED", FAMILY),
        "region+provisioning",
        "quota",
        "GPUS_PER_GPU_FAMILY",
        "gpu_family=NVIDIA_H100",
    ),
    (
        refused(3, "UNSUPPORTED_OPERATION", "?"),
        "zone",
        "preempted",
        "preempted while it was being created",
        "--zone ZONE",
    ),
    (refused(13, "INTERNAL_ERROR", "Internal error."), "transient", "busy", "Internal error.", "in a moment"),
    (refused(3, "CONDITION_NOT_MET", "Odd."), "permanent", "invalid", "Odd.", ""),
    (
        job("FAILED", Failure(code=14, message="")),
        "transient",
        "busy",
        "Compute Engine failed to run the job",
        "launch logs",
    ),
]


@pytest.mark.parametrize(("ended", "scope", "kind", "cause", "fix"), ENDS)
def test_an_end(ended: Job, scope: str, kind: str, cause: str, fix: str) -> None:
    found = diagnose_end(ended, VM)
    assert (found.scope, found.kind) == (scope, kind)
    assert cause in found.cause
    assert fix in found.fix
    assert bool(fix) == bool(found.fix)


def test_the_account_of_a_vm_that_names_none_is_computes() -> None:
    found = diagnose_end(unstarted(PULL), replace(VM, account=""))
    assert (
        '--member=serviceAccount:$(gcloud projects describe my-project --format="value(projectNumber)")-compute@'
        in (found.fix)
    )
