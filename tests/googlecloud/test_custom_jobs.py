"""CustomJobs on loopback, through Google's own client."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from google.api_core.exceptions import (
    BadRequest,
)
from google.cloud import aiplatform_v1

from launcher.testing.googlecloud import (
    ApiError,
    parse_custom_job,
)

PARENT = "projects/my-project/locations/us-central1"
State = aiplatform_v1.JobState
GOOD: dict[str, Any] = {
    "displayName": "a",
    "labels": {"launch-run": "a-1"},
    "jobSpec": {
        "workerPoolSpecs": [
            {
                "machineSpec": {
                    "machineType": "a3-highgpu-2g",
                    "acceleratorType": "NVIDIA_H100_80GB",
                    "acceleratorCount": 2,
                },
                "replicaCount": "1",
                "containerSpec": {"imageUri": "x:y", "env": [{"name": "A", "value": "1"}]},
            }
        ],
        "scheduling": {"strategy": "SPOT", "timeout": "3600s"},
    },
}


def test_list_has_pages_and_filters(client: aiplatform_v1.JobServiceClient) -> None:
    for n in range(5):
        body = {**GOOD, "displayName": f"job-{n}", "labels": {"launch-run": f"r-{n % 2}"}}
        client.create_custom_job(parent=PARENT, custom_job=parse_custom_job(body))

    def names(text: str) -> list[str]:
        request = aiplatform_v1.ListCustomJobsRequest(parent=PARENT, filter=text, page_size=2)
        return [job.display_name for job in client.list_custom_jobs(request)]

    assert names("") == ["job-4", "job-3", "job-2", "job-1", "job-0"]
    assert names('labels.launch-run="r-1"') == ["job-3", "job-1"]
    assert len(names("labels.launch-run:*")) == 5
    with pytest.raises(BadRequest, match="filter"):
        names("colour=red")


def test_the_client_sees_googles_violations(client: aiplatform_v1.JobServiceClient) -> None:
    job = parse_custom_job(GOOD)
    job.job_spec.worker_pool_specs[0].machine_spec.accelerator_count = 0
    with pytest.raises(BadRequest) as caught:
        client.create_custom_job(parent=PARENT, custom_job=job)
    [violation] = caught.value.details[0]["fieldViolations"]
    assert violation["field"] == "job_spec.worker_pool_specs[0].machine_spec.accelerator_type"
    assert violation["description"] == "Both `accelerator_type` and `accelerator_count` should be specified or none."


def pool(body: dict[str, Any]) -> dict[str, Any]:
    first: dict[str, Any] = body["jobSpec"]["workerPoolSpecs"][0]
    return first


def env(body: dict[str, Any]) -> list[dict[str, str]]:
    variables: list[dict[str, str]] = pool(body)["containerSpec"]["env"]
    return variables


def machine(body: dict[str, Any], **given: Any) -> dict[str, Any]:
    pool(body)["machineSpec"] = given
    return body


Change = Callable[[dict[str, Any]], Any]
REFUSED: list[tuple[str, Change, str]] = [
    ("unknown field", lambda b: b.update(foo=1), "Unknown name \"foo\" at 'custom_job': Cannot find field."),
    ("deep", lambda b: pool(b).update(gpu=1), "at 'custom_job.job_spec.worker_pool_specs[0]': Cannot find field."),
    ("enum", lambda b: b["jobSpec"]["scheduling"].update(strategy="CHEAP"), 'Scheduling.Strategy), "CHEAP"'),
    ("enum number", lambda b: b["jobSpec"]["scheduling"].update(strategy=99), "Scheduling.Strategy), 99"),
    ("list for a message", lambda b: b.update(jobSpec=[]), "Invalid value at 'custom_job.job_spec'"),
    (
        "number for text",
        lambda b: b["labels"].update(a=1),
        'labels["a"]\' (TYPE_STRING), 1',
    ),
    ("text for bool", lambda b: b["jobSpec"].update(enableWebAccess="yes"), '(TYPE_BOOL), "yes"'),
    ("bool for text", lambda b: b.update(displayName=False), "(TYPE_STRING), false"),
    ("duration", lambda b: b["jobSpec"]["scheduling"].update(timeout="1h"), 'Duration must end with letter "s"'),
    ("not a number", lambda b: pool(b).update(replicaCount="one"), "invalid literal"),
    ("two tasks", lambda b: pool(b).update(pythonPackageSpec={}), "oneof"),
    ("no name", lambda b: b.update(displayName=""), "Field: display_name; Message: Required field is not set."),
    ("long name", lambda b: b.update(displayName="a" * 129), "128"),
    ("no pool", lambda b: b["jobSpec"].update(workerPoolSpecs=[]), "job_spec.worker_pool_specs; Message: Required"),
    (
        "no image",
        lambda b: pool(b).update(containerSpec={"args": ["a"]}),
        "container_spec.image_uri; Message: Required",
    ),
    ("no container", lambda b: pool(b).pop("containerSpec"), "worker_pool_specs[0].container_spec; Message: Required"),
    ("no replicas", lambda b: pool(b).pop("replicaCount"), "replica_count; Message: Required"),
    ("two primaries", lambda b: pool(b).update(replicaCount=2), "exactly one replica"),
    ("empty value", lambda b: env(b).append({"name": "B"}), "env[1].value; Message: Required"),
    (
        "twice",
        lambda b: env(b).append({"name": "A", "value": "2"}),
        "EnvVar names must be unique.",
    ),
    ("capital label", lambda b: b.update(labels={"a": "B"}), "lowercase letters, numbers, dashes and underscores"),
    ("dotted label", lambda b: b.update(labels={"a": "0.1"}), "lowercase letters, numbers, dashes and underscores"),
    ("small disk", lambda b: pool(b).update(diskSpec={"bootDiskSizeGb": 10}), "boot_disk_size_gb"),
    ("disk", lambda b: pool(b).update(diskSpec={"bootDiskType": "floppy"}), "boot_disk_type"),
    ("machine", lambda b: machine(b, machineType="a3-highgpu-3g"), 'Machine type "a3-highgpu-3g" is not supported.'),
    (
        "pair",
        lambda b: machine(b, machineType="n1-standard-4", acceleratorType="NVIDIA_TESLA_K80", acceleratorCount=1),
        'Accelerator "NVIDIA_TESLA_K80" is not supported for machine type "n1-standard-4".',
    ),
    ("count", lambda b: pool(b)["machineSpec"].update(acceleratorCount=4), '"4" of accelerator "NVIDIA_H100_80GB"'),
    ("bare", lambda b: machine(b, machineType="a3-highgpu-2g"), "is not supported for machine type"),
    ("half", lambda b: pool(b)["machineSpec"].pop("acceleratorCount"), "should be specified or none."),
    (
        "flex-start GPU",
        lambda b: (
            b["jobSpec"]["scheduling"].update(strategy="FLEX_START"),
            machine(b, machineType="n1-standard-8", acceleratorType="NVIDIA_TESLA_T4", acceleratorCount=1),
        ),
        "FLEX_START is not supported",
    ),
    (
        "flex-start, two machines",
        lambda b: (
            b["jobSpec"]["scheduling"].update(strategy="FLEX_START"),
            b["jobSpec"]["workerPoolSpecs"].append({**pool(b), "machineSpec": {"machineType": "n1-standard-8"}}),
        ),
        "FLEX_START needs the same machine",
    ),
    (
        "flex-start, 8 days",
        lambda b: b["jobSpec"]["scheduling"].update(strategy="FLEX_START", timeout="691200s"),
        "at most 7 days",
    ),
    ("mount", lambda b: pool(b).update(nfsMounts=[{"server": "1.2.3.4"}]), "nfs_mounts[0].path; Message: Required"),
]


@pytest.mark.parametrize(("change", "message"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_what_vertex_refuses(change: Change, message: str) -> None:
    body = copy.deepcopy(GOOD)
    change(body)
    with pytest.raises(ApiError) as caught:
        parse_custom_job(body)
    assert caught.value.code == 400
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("machine_type", "gpu", "count"),
    [
        ("a3-highgpu-1g", "NVIDIA_H100_80GB", 1),
        ("a3-ultragpu-8g", "NVIDIA_H200_141GB", 8),
        ("a4-highgpu-8g", "NVIDIA_B200", 8),
        ("a4x-highgpu-4g", "NVIDIA_GB200", 4),
        ("a2-ultragpu-2g", "NVIDIA_A100_80GB", 2),
        ("g2-standard-24", "NVIDIA_L4", 2),
        ("g4-standard-48", "NVIDIA_RTX_PRO_6000", 1),
        ("n1-standard-16", "NVIDIA_TESLA_V100", 8),
        ("n1-highcpu-16", None, None),
        ("e2-standard-4", None, None),
    ],
)
def test_what_vertex_takes(machine_type: str, gpu: str | None, count: int | None) -> None:
    body = copy.deepcopy(GOOD)
    given = {"machineType": machine_type, "acceleratorType": gpu, "acceleratorCount": count}
    pool(body)["machineSpec"] = {name: value for name, value in given.items() if value}
    assert parse_custom_job(body).job_spec.worker_pool_specs[0].machine_spec.machine_type == machine_type
