"""What Compute Engine's refusals mean, at once or as the end of an operation."""

from __future__ import annotations

import pytest

from launcher.diagnosis import Refusal, RequestContext, diagnose_refusal
from tests.diagnosis.wordings import FAMILY, POOL, VM, told, vm

REFUSALS: list[tuple[Refusal, RequestContext, str, str, str, str]] = [
    (
        vm(403, "Quota 'NVIDIA_L4_GPUS' exceeded.  Limit: 2.0 in region us-central1.", "QUOTA_EXCEEDED"),
        *(VM, "region+provisioning", "quota", "4 are needed, the limit is 2"),
        "gcloud beta quotas preferences create --service=compute.googleapis.com --project=my-project "
        "--quota-id=NVIDIA-L4-GPUS-per-project-region --preferred-value=6 --dimensions=region=us-central1; ",
    ),
    (
        vm(403, "Quota 'GPUS_ALL_REGIONS' exceeded.  Limit: 0.0 globally.", "quotaExceeded"),
        *(VM, "project", "quota", "GPUS_ALL_REGIONS"),
        "--quota-id=GPUS-ALL-REGIONS-per-project --preferred-value=4; current quota",
    ),
    (
        *(vm(403, FAMILY, "QUOTA_EXCEEDED"), VM, "region+provisioning", "quota", "GPUS_PER_GPU_FAMILY"),
        "--quota-id=GPUS-PER-GPU-FAMILY-per-project-region --preferred-value=4 "
        "--dimensions=region=us-central1,gpu_family=NVIDIA_H100; ",
    ),
    (
        told(
            403,
            "Quota 'GPUS_PER_GPU_FAMILY' exceeded.  Limit: 0.0 in region us-central1.",
            service="compute",
            reason="QUOTA_EXCEEDED",
            metadata={"quota_limit": "GPUS-PER-GPU-FAMILY-per-project-region", "gpu_family": "NVIDIA_H200"},
        ),
        *(VM, "region+provisioning", "quota", "GPUS_PER_GPU_FAMILY", "gpu_family=NVIDIA_H200"),
    ),
    (
        vm(403, "Quota 'SSD_TOTAL_GB' exceeded.  Limit: 500.0 in region us-central1.", "QUOTA_EXCEEDED"),
        *(VM, "region", "quota", "SSD_TOTAL_GB in us-central1 is too low", "--preferred-value=N --dimensions=region="),
    ),
    (
        vm(403, "Quota 'PREEMPTIBLE_LOCAL_SSD_GB' exceeded.  Limit: 0.0 in region us-central1.", "QUOTA_EXCEEDED"),
        *(VM, "region+provisioning", "quota", "PREEMPTIBLE_LOCAL_SSD_GB", "regions describe us-central1"),
    ),
    (
        vm(
            400,
            "The user does not have access to service account 'trainer@my-project.iam.gserviceaccount.com'.  User: "
            "'me@example.com'.  Ask a project owner to grant you the iam.serviceAccountUser role on the account",
            "SERVICE_ACCOUNT_ACCESS_DENIED",
        ),
        *(VM, "permanent", "permission", "no permission to act as trainer@my-project.iam.gserviceaccount.com"),
        "gcloud iam service-accounts add-iam-policy-binding trainer@my-project.iam.gserviceaccount.com ",
    ),
    (
        vm(409, "The resource 'projects/my-project/zones/z/instances/a' already exists", "RESOURCE_ALREADY_EXISTS"),
        *(VM, "permanent", "invalid", "already exists", "Use another --name"),
    ),
    (
        vm(
            400,
            "The disk resource 'projects/p/zones/z/disks/d' is already being used by 'projects/p/zones/z/instances/a'",
            "RESOURCE_IN_USE_BY_ANOTHER_RESOURCE",
        ),
        *(VM, "transient", "busy", "disks/d' is already being used by", "gcloud compute instances list"),
    ),
]


@pytest.mark.parametrize(("refusal", "tried", "scope", "kind", "cause", "fix"), REFUSALS)
def test_a_refusal(refusal: Refusal, tried: RequestContext, scope: str, kind: str, cause: str, fix: str) -> None:
    found = diagnose_refusal(refusal, tried)
    assert (found.scope, found.kind) == (scope, kind)
    assert cause in found.cause
    assert fix in found.fix


@pytest.mark.parametrize(
    ("named", "zones"),
    [
        ("us-central1-b,us-central1-c", ("us-central1-b", "us-central1-c")),
        ("us-central1-a,us-east4-a", ("us-east4-a",)),
        ("us-central1-ai1a,us-south1-ai1b", ("us-central1-ai1a", "us-south1-ai1b")),
        ("", ()),
        ("anywhere $(id)", ()),
    ],
)
def test_a_stockout_may_name_zones_that_have_machines(named: str, zones: tuple[str, ...]) -> None:
    metadata = {"zonesAvailable": named, "vmType": "a3-highgpu-2g"}
    refusal = told(503, POOL, "compute", reason="ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS", metadata=metadata)
    found = diagnose_refusal(refusal, VM)
    assert (found.scope, found.kind, found.zones) == ("zone", "stockout", zones)


@pytest.mark.parametrize("limit", ["1.2.3", ".", "9" * 400, "many"])
def test_a_limit_that_is_no_number_is_none(limit: str) -> None:
    metadata = {"quota_metric": "compute.googleapis.com/nvidia_l4_gpus", "quota_limit_value": limit}
    found = diagnose_refusal(told(403, "Exceeded.", "compute", reason="QUOTA_EXCEEDED", metadata=metadata), VM)
    assert "--quota-id=NVIDIA-L4-GPUS-per-project-region --preferred-value=4 " in found.fix
