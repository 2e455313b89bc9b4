"""What the end of a job means."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from launcher.diagnosis import RequestContext, diagnose_end
from launcher.jobs.job import GONE, Failure, Job
from tests.diagnosis.wordings import FLEX, PULL, SPOT, T4

NODE_0 = "The replica workerpool0-0 exited with a non-zero status of {}."
LOGS = "To find out more about why your job exited please check the logs: https://console.cloud.google.com/logs/viewer"
GRANT = (
    "gcloud secrets add-iam-policy-binding hf --project=my-project "
    "--member=serviceAccount:trainer@my-project.iam.gserviceaccount.com --role=roles/secretmanager.secretAccessor"
)


def job(state: str, code: int = 0, message: str = "", started: float | None = 1010.0) -> Job:
    return Job(
        name="projects/4242/locations/us-central1/customJobs/1",
        region="us-central1",
        state=state,
        created=1000.0,
        started=started,
        error=Failure(code=code, message=message) if code else None,
        labels={"launch-run": "gpt2-1234"},
    )


def failed(status: int, more: str = "") -> Job:
    return job("FAILED", 3, f"{NODE_0.format(status)} {more}".strip())


ENDS: list[tuple[Job, RequestContext, str, str, str, str]] = [
    (job("SUCCEEDED"), SPOT, "permanent", "succeeded", "done", ""),
    (job("CANCELLED", 1, "CANCELED"), SPOT, "permanent", "cancelled", "it was cancelled", "--resume gpt2-1234"),
    (
        job("CANCELLED", 3, "The replica workerpool0-0 exited with a non-zero status of 143."),
        *(SPOT, "permanent", "cancelled", "it was cancelled", "--resume gpt2-1234"),
    ),
    (job("CANCELLED"), SPOT, "permanent", "cancelled", "it was cancelled", "--resume gpt2-1234"),
    (job(GONE), SPOT, "permanent", "cancelled", "the job was deleted", "--resume gpt2-1234"),
    (job("EXPIRED"), SPOT, "permanent", "expired", "the time limit (limits.hours)", "--hours"),
    (job("FAILED", 4, "?"), SPOT, "permanent", "expired", "the time limit (limits.hours)", "--hours"),
    (job("EXPIRED", started=None), FLEX, "region+provisioning", "stockout", "as flex-start", "limits.wait=24h"),
    (job("EXPIRED"), FLEX, "permanent", "expired", "the time limit (limits.hours)", "--hours"),
    (
        job("PARTIALLY_SUCCEEDED", 3, "Half."),
        SPOT,
        "permanent",
        "unknown",
        "only part of the job succeeded: Half.",
        "logs",
    ),
    (job("MELTED"), SPOT, "permanent", "unknown", "it ended as MELTED", "launch logs gpt2-1234"),
    (job("FAILED"), SPOT, "permanent", "unknown", "it failed", "launch logs gpt2-1234"),
    (job("FAILED", 9, "Odd."), SPOT, "permanent", "unknown", "it failed: Odd.", "launch logs"),
    # --- by the job's own error
    (
        *(job("FAILED", 8, T4), replace(SPOT, provisioning="standard"), "region+provisioning", "quota"),
        *("nvidia_t4_gpus in us-central1 is too low for standard: 4 are needed", "CustomModelTrainingT4GPUs"),
    ),
    (
        job("FAILED", 8, "Resources are insufficient in region: us-central1. Please try a different region or wait."),
        *(SPOT, "region+provisioning", "stockout", "no capacity for a3-highgpu-2g in us-central1", "--flex-start"),
    ),
    (job("FAILED", 8, "?"), SPOT, "region+provisioning", "stockout", "no capacity for a3-highgpu-2g", "--flex-start"),
    (
        job("FAILED", 3, "STOCKOUT"),
        SPOT,
        "region+provisioning",
        "stockout",
        "no capacity for a3-highgpu-2g",
        "--flex-start",
    ),
    (
        job("CANCELLED", 8, "Resources are insufficient in region: us-central1"),
        *(FLEX, "region+provisioning", "stockout", "as flex-start", "limits.wait"),
    ),
    (
        job("FAILED", 13, "Internal error."),
        SPOT,
        "transient",
        "busy",
        "failed to run the job: Internal error.",
        "launch logs",
    ),
    (job("FAILED", 14, "?"), SPOT, "transient", "busy", "Vertex AI failed to run the job", "launch logs"),
    (
        *(job("FAILED", 7, PULL), SPOT, "permanent", "permission", "Vertex AI's service agent"),
        "--member=serviceAccount:service-4242@gcp-sa-aiplatform-cc.iam.gserviceaccount.com",
    ),
    (
        job("FAILED", 7, "Permission 'storage.objects.create' denied on resource gs://my-bucket (or it may not exist)"),
        *(
            SPOT,
            "permanent",
            "permission",
            "trainer@my-project.iam.gserviceaccount.com lacks the permission stor",
        ),
        "gcloud storage buckets add-iam-policy-binding gs://my-bucket --member=serviceAccount:trainer@my-project.iam",
    ),
    # --- by what the replicas exited with
    (
        failed(1),
        SPOT,
        "permanent",
        "user",
        "workerpool0-0 exited with 1: it failed more often",
        "launch logs gpt2-1234",
    ),
    (failed(2), SPOT, "permanent", "user", "invalid config or code", "launch logs"),
    (failed(3, f"Termination reason: Error. {LOGS}"), SPOT, "permanent", "user", "the program failed", "launch logs"),
    (failed(70), SPOT, "region+provisioning", "unfit", "the machine was unfit", "launch logs"),
    (failed(75), SPOT, "transient", "preempted", "the checkpoint was saved", "launch logs"),
    (failed(76), SPOT, "permanent", "user", "do not trust", "launch logs"),
    (failed(77), SPOT, "permanent", "lost", "taken over", "launch logs"),
    (failed(78), SPOT, "permanent", "user", "marked as permanently failed", "launch vertex SPEC --resume gpt2-1234"),
    (failed(137), SPOT, "permanent", "user", "most likely because the machine ran out of memory", "launch logs"),
    (failed(139), SPOT, "permanent", "user", "killed by SIGSEGV", "launch logs"),
    (failed(143), SPOT, "transient", "preempted", "interrupted before it could save", "launch logs"),
    (failed(1, "Termination reason: OOMKilled."), SPOT, "permanent", "user", "ran out of host memory", "logs"),
    (
        job("FAILED", 3, "The replica worker 0 ran out-of-memory and exited with a non-zero status of 9(SIGKILL)."),
        *(SPOT, "permanent", "user", "worker 0 exited with 9: it ran out of host memory", "launch logs"),
    ),
    (job("FAILED", 3, "Replica exited with a non-zero status code 1"), SPOT, "permanent", "user", "a replica", "logs"),
    (  # of several, the one that was not just stopped with the others
        job("FAILED", 3, f"{NODE_0.format(143)} The replica workerpool1-0 exited with a non-zero status of 1."),
        *(SPOT, "permanent", "user", "workerpool1-0 exited with 1", "launch logs"),
    ),
    (  # a traceback that speaks of a permission is the user's
        failed(1, f"Termination reason: Error. Traceback (most recent call last): [...] {PULL}"),
        *(SPOT, "permanent", "user", "workerpool0-0 exited with 1", "launch logs"),
    ),
]


@pytest.mark.parametrize(("ended", "tried", "scope", "kind", "cause", "fix"), ENDS)
def test_an_end(ended: Job, tried: RequestContext, scope: str, kind: str, cause: str, fix: str) -> None:
    found = diagnose_end(ended, tried)
    assert (found.scope, found.kind) == (scope, kind)
    assert cause in found.cause
    assert fix in found.fix
    assert bool(fix) == bool(found.fix)


def test_the_last_error_in_the_logs_is_reported() -> None:
    assert diagnose_end(failed(1), SPOT, "ValueError: no").cause.endswith("; its last error: ValueError: no")
    assert (
        diagnose_end(job("FAILED", 9, "Odd."), SPOT, "why\x1b not").cause == "it failed: Odd.; its last error: why not"
    )


def test_a_grant_named_by_a_node_is_the_fix() -> None:
    """Another place wouldn't help: the node says itself what is missing."""
    said = f"launch: node 0: secret HF_TOKEN can't be read: trainer may not: {GRANT} (exit code 70)"
    found = diagnose_end(failed(70), SPOT, said)
    assert (found.scope, found.kind, found.fix) == ("permanent", "permission", GRANT)
    assert found.cause == "launch: node 0: secret HF_TOKEN can't be read: trainer may not"


def test_a_job_without_a_run_is_named_itself() -> None:
    bare = replace(failed(1), labels={})
    assert diagnose_end(bare, SPOT).fix == "launch logs projects/4242/locations/us-central1/customJobs/1"


def test_a_secret_that_is_not_there_is_not_looked_for_elsewhere() -> None:
    said = "node 0: secret HF_TOKEN (projects/p/secrets/s/versions/latest) does not exist"
    found = diagnose_end(failed(70), SPOT, said)
    assert (found.scope, found.kind, found.cause) == ("permanent", "unfit", said)
    assert diagnose_end(failed(70), SPOT, "node 0: found 1 of 2 GPUs (l4)").scope == "region+provisioning"
