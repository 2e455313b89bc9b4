"""What Google says, and to whom: refusals to the letter, and what was tried when they came."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from launcher.diagnosis import Refusal, RequestContext

SPOT = RequestContext(
    project="my-project",
    region="us-central1",
    provisioning="spot",
    machine_type="a3-highgpu-2g",
    gpus=4,
    account="trainer@my-project.iam.gserviceaccount.com",
    image="us-docker.pkg.dev/my-project/launch/gpt2@sha256:0123",
    output="gs://my-bucket/runs/gpt2-1234",
)
PLAIN = RequestContext(project="my-project", region="us-central1", provisioning="standard")
VM = replace(SPOT, zone="us-central1-a", provisioning="standard")
FLEX = replace(SPOT, provisioning="flex-start")

ACT_AS = (
    "You do not have permission to act as service_account: sa@other.iam.gserviceaccount.com. (or it may not exist)."
)
T4 = "The following quota metrics exceed quota limits: aiplatform.googleapis.com/custom_model_training_nvidia_t4_gpus"
PULL = (
    'denied: Permission "artifactregistry.repositories.downloadArtifacts" denied on resource '
    '"projects/my-project/locations/us/repositories/launch" (or it may not exist)'
)
CPU_AND_GPU = (
    "The following quota metrics exceed quota limits: aiplatform.googleapis.com/custom_model_training_preemptible_cpus,"
    "aiplatform.googleapis.com/custom_model_training_preemptible_nvidia_h100_gpus"
)
FIELDS = (
    "List of found errors:\t1.Field: job_spec.worker_pool_specs[0].machine_spec.accelerator_type; Message: Both "
    "`accelerator_type` and `accelerator_count` should be specified or none.\t2.Field: display_name; Message: Required "
    "field is not set.\t"
)
DISABLED = (
    "Vertex AI API has not been used in project 123456789 before or it is disabled. Enable it by visiting "
    "https://console.developers.google.com/apis/api/aiplatform.googleapis.com/overview?project=123456789 then retry."
)
QUOTA_PROJECT = (
    "Your application is authenticating by using local Application Default Credentials. The aiplatform.googleapis.com "
    "API requires a quota project, which is not set by default. To learn how to set your quota project, see "
    "https://cloud.google.com/docs/authentication/adc-troubleshooting/user-creds ."
)
FAMILY = (
    "Quota 'GPUS_PER_GPU_FAMILY' exceeded.  Limit: 0.0 in region us-central1.\n"
    "\tmetric name = compute.googleapis.com/gpus_per_gpu_family\n"
    "\tlimit name = GPUS-PER-GPU-FAMILY-per-project-region\n\tlimit = 0\n"
    "\tdimensions = region: us-central1 gpu_family: NVIDIA_H100"
)
KMS = (
    "Permission 'cloudkms.cryptoKeyVersions.useToEncrypt' denied on resource "
    "'projects/my-project/locations/us-central1/keyRings/r/cryptoKeys/k' (or it may not exist). "
    "service-123@gcp-sa-aiplatform.iam.gserviceaccount.com needs it."
)
AGENT_READS = (
    "Service account `service-789@gcp-sa-aiplatform.iam.gserviceaccount.com` does not have `[storage.objects.get]` IAM "
    'permission(s) to the directory "gs://mco-mm/churn".'
)
POOL = (
    "The zone 'projects/my-project/zones/us-central1-a' does not have enough resources available to fulfill the "
    "request.  Try a different zone, or try again later."
)
POOL_DETAILS = POOL.partition("  Try")[0] + "  '(resource type:compute)'."
ABSENT = (
    "Invalid value for field 'resource.machineType': 'https://compute.googleapis.com/compute/v1/projects/p/zones/"
    "europe-west8-a/machineTypes/a3-highgpu-2g'. Machine type with name 'a3-highgpu-2g' does not exist in zone "
    "'europe-west8-a'."
)
RATE = (
    "Quota exceeded for quota metric 'Queries' and limit 'Queries per minute' of service 'compute.googleapis.com' for "
    "consumer 'project_number:123'."
)
MODEL = (
    "Invalid value for field 'resource.scheduling.provisioningModel': 'STANDARD'. For preemptible, only allowed "
    "provisioning_model value is SPOT"
)


def told(code: int, message: str, service: str = "aiplatform", **more: Any) -> Refusal:
    return Refusal(code=code, message=message, service=service, **more)


def vm(code: int, message: str, reason: str = "") -> Refusal:
    return told(code, message, "compute", reason=reason)
