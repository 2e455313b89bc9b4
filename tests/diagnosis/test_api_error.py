"""What each of Google's wordings means."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from launcher.diagnosis import Refusal, RequestContext, diagnose_refusal
from tests.diagnosis.wordings import (
    ABSENT,
    ACT_AS,
    AGENT_READS,
    CPU_AND_GPU,
    DISABLED,
    FAMILY,
    FIELDS,
    KMS,
    MODEL,
    PLAIN,
    POOL,
    PULL,
    QUOTA_PROJECT,
    RATE,
    SPOT,
    T4,
    VM,
    told,
    vm,
)

REFUSALS: list[tuple[Refusal, RequestContext, str, str, str, str]] = [
    # --- quotas: the metric, the region, what is needed and what there is, and how it is read
    (
        *(told(429, T4), replace(PLAIN, gpus=8), "region+provisioning", "quota"),
        "quota aiplatform.googleapis.com/custom_model_training_nvidia_t4_gpus in us-central1 is too low for standard: "
        "8 are needed",
        "Request 8 or more: https://console.cloud.google.com/iam-admin/quotas?project=my-project; current quota: "
        "gcloud beta quotas info describe CustomModelTrainingT4GPUsPerProjectPerRegion "
        "--service=aiplatform.googleapis.com --project=my-project",
    ),
    (
        *(told(429, T4.replace("nvidia_t4", "preemptible_nvidia_h100")), SPOT, "region+provisioning", "quota"),
        "preemptible_nvidia_h100_gpus in us-central1 is too low for spot: 4 are needed",
        "describe CustomModelTrainingPreemptibleH100GPUsPerProjectPerRegion ",
    ),
    (
        *(told(429, CPU_AND_GPU), SPOT, "region+provisioning", "quota"),
        "custom_model_training_preemptible_cpus and aiplatform.googleapis.com/custom_model_training_preemptible_nvidia",
        "gcloud beta quotas info list --service=aiplatform.googleapis.com --project=my-project --filter=metric=",
    ),
    (
        told(429, "The following quotas are exceeded: CustomModelTrainingT4GPUsPerProjectPerRegion"),
        *(SPOT, "region+provisioning", "quota", "CustomModelTrainingT4GPUsPerProjectPerRegion in us-central1"),
        "describe CustomModelTrainingT4GPUsPerProjectPerRegion ",
    ),
    (
        told(
            429,
            "Quota exceeded.",
            reason="RESOURCE_QUOTA_EXCEEDED",
            metadata={"quota_metric": "aiplatform.googleapis.com/custom_model_training_gpus", "quota_limit_value": "2"},
        ),
        *(SPOT, "region+provisioning", "quota", "is too low for spot: 4 are needed, the limit is 2", "Request 4"),
    ),
    (
        vm(403, "Quota 'NVIDIA_H100_GPUS' exceeded.  Limit: 0.0 in region us-central1.", "quotaExceeded"),
        *(VM, "region+provisioning", "quota"),
        "quota NVIDIA_H100_GPUS in us-central1 is too low for standard: 4 are needed, the limit is 0",
        'gcloud compute regions describe us-central1 --project=my-project --flatten="quotas[]"',
    ),
    (
        vm(403, "Quota 'PREEMPTIBLE_NVIDIA_H100_GPUS' exceeded.  Limit: 16.0 in region us-central1.", "QUOTA_EXCEEDED"),
        *(replace(VM, provisioning="spot"), "region+provisioning", "quota"),
        "PREEMPTIBLE_NVIDIA_H100_GPUS in us-central1 is too low for spot: 4 are needed, the limit is 16",
        "regions describe",
    ),
    (
        vm(403, "Quota 'GPUS_ALL_REGIONS' exceeded.  Limit: 0.0 globally.", "quotaExceeded"),
        *(VM, "project", "quota"),
        "quota GPUS_ALL_REGIONS in all regions together is too low for standard: 4 are needed, the limit is 0",
        "gcloud compute project-info describe --project=my-project",
    ),
    (
        *(vm(403, FAMILY, "QUOTA_EXCEEDED"), VM, "region+provisioning", "quota", "4 are needed, the limit is 0"),
        "gcloud beta quotas info describe GPUS-PER-GPU-FAMILY-per-project-region --service=compute.googleapis.com",
    ),
    # --- no machines just now
    (
        told(429, "Resources are insufficient in region: us-central1. Please try a different region."),
        *(
            SPOT,
            "region+provisioning",
            "stockout",
            "no capacity for a3-highgpu-2g in us-central1 as spot",
            "--flex-start",
        ),
    ),
    (vm(503, POOL, "ZONE_RESOURCE_POOL_EXHAUSTED"), VM, "zone", "stockout", "in us-central1-a as standard", "regions"),
    (
        vm(
            503,
            POOL.split("  Try", maxsplit=1)[0] + "  '(resource type:compute)'.",
            "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS",
        ),
        *(VM, "zone", "stockout", "in us-central1-a as standard at the moment", "Try more regions"),
    ),
    (vm(400, "?", "resource_availability"), VM, "zone", "stockout", "no capacity for a3-highgpu-2g", "Try more"),
    (
        vm(0, "Waiting for resources. Currently there are not enough resources available to fulfill the request."),
        *(replace(VM, provisioning="flex-start"), "zone", "stockout", "as flex-start", "limits.wait=24h"),
    ),
    (
        vm(400, "Requested minimum count of 2 VMs could not be created"),
        VM,
        "zone",
        "stockout",
        "no capacity for a3",
        "regions",
    ),
    (vm(400, "?", "UNSUPPORTED_OPERATION"), VM, "zone", "preempted", "preempted while it was being created", "--zone"),
    (vm(400, "?", "RESOURCE_NOT_READY"), VM, "zone", "busy", "was not ready", "--zone"),
    (vm(400, "?", "RESOURCE_OPERATION_RATE_EXCEEDED"), VM, "zone", "busy", "too many operations", "--zone"),
    (vm(404, "?", "RESOURCE_NOT_FOUND"), VM, "zone", "machine", "does not exist (us-central1-a)", "--zone"),
    # --- never such a machine
    (
        told(400, 'Machine type "a3-highgpu-1g" is not supported.'),
        *(SPOT, "region", "machine", "a3-highgpu-1g is not available on Vertex AI in us-central1", "--region REGION"),
    ),
    (
        told(400, 'Accelerator "NVIDIA_TESLA_K80" is not supported for machine type "n1-standard-4".'),
        *(SPOT, "permanent", "machine", "n1-standard-4 does not support NVIDIA_TESLA_K80", "--type h100 --gpus 2"),
    ),
    (
        told(400, '"3" of accelerator "NVIDIA_L4" is not supported for machine type "g2-standard-48": 4.'),
        *(SPOT, "permanent", "machine", "g2-standard-48 does not support 3 x NVIDIA_L4: 4.", "--gpus"),
    ),
    (
        vm(400, "[nvidia-tesla-a100, n1-highmem-8] features are not compatible for creating instance.", "invalid"),
        *(VM, "permanent", "machine", "nvidia-tesla-a100, n1-highmem-8 cannot be combined", "--type"),
    ),
    (
        vm(400, "Disk type pd-standard is not supported for machine type a3-highgpu-2g.", "invalid"),
        *(VM, "permanent", "machine", "a3-highgpu-2g cannot boot from pd-standard", "boot_disk_type"),
    ),
    (
        vm(400, ABSENT, "invalid"),
        VM,
        "zone",
        "machine",
        "a3-highgpu-2g is not available on Compute Engine in europe-west8-a",
        "--zone ZONE",
    ),
    (
        vm(404, "The resource 'projects/p/zones/us-x1-a/acceleratorTypes/nvidia-l4' was not found", "notFound"),
        *(VM, "zone", "machine", "nvidia-l4 is not available on Compute Engine in us-central1-a", "--zone"),
    ),
    (
        vm(403, "Location us-east1-d is not found or access is unauthorized.", "forbidden"),
        *(VM, "zone", "machine", "us-east1-d is not available to project my-project", "--zone"),
    ),
    # --- what is wrong with the request
    (
        *(told(400, FIELDS), SPOT, "permanent", "invalid"),
        "Vertex AI refuses the request: job_spec.worker_pool_specs[0].machine_spec.accelerator_type: Both "
        "`accelerator_type` and "
        "`accelerator_count` should be specified or none.; display_name: Required field is not set.",
        "--dry-run",
    ),
    (
        vm(400, "Instances with guest accelerators do not support live migration.", "invalid"),
        *(VM, "permanent", "invalid", "Instances with guest accelerators do not support live migration.", ""),
    ),
    (vm(400, MODEL, "invalid"), VM, "permanent", "invalid", "only allowed provisioning_model value is SPOT", ""),
    (
        vm(409, "The resource 'projects/p/zones/z/instances/dev' already exists", "alreadyExists"),
        *(VM, "permanent", "invalid", "already exists", "--name"),
    ),
    (told(404, "The CustomJob does not exist."), SPOT, "permanent", "invalid", "The CustomJob does not exist.", ""),
    # --- who asks
    (
        told(401, "Request had invalid authentication credentials."),
        SPOT,
        "permanent",
        "credentials",
        "not acc",
        "login",
    ),
    (
        told(403, "Request had insufficient authentication scopes.", reason="ACCESS_TOKEN_SCOPE_INSUFFICIENT"),
        *(SPOT, "permanent", "credentials", "insufficient authentication scopes", "gcloud auth application-default"),
    ),
    (
        told(
            403,
            QUOTA_PROJECT,
            reason="SERVICE_DISABLED",
            metadata={"consumer": "projects/764086051850", "service": "aiplatform.googleapis.com"},
        ),
        *(SPOT, "project", "credentials", "your credentials have no quota project"),
        "gcloud auth application-default set-quota-project my-project",
    ),
    (
        told(400, ACT_AS),
        *(SPOT, "permanent", "permission", "you have no permission to act as sa@other.iam.gserviceaccount.com"),
        "gcloud iam service-accounts add-iam-policy-binding sa@other.iam.gserviceaccount.com --project=other "
        '--member="user:$(gcloud config get account)" --role=roles/iam.serviceAccountUser',
    ),
    (
        told(403, "caller does not have permission to act as service account", "cloudbuild"),
        *(
            SPOT,
            "permanent",
            "permission",
            "no permission to act as trainer@my-project.iam",
            "roles/iam.serviceAccountUser",
        ),
    ),
    (
        told(
            403,
            "Permission 'aiplatform.customJobs.create' denied on resource "
            "'//aiplatform.googleapis.com/projects/my-project/locations/us-central1' (or it may not exist).",
            reason="IAM_PERMISSION_DENIED",
        ),
        *(SPOT, "permanent", "permission", "your account lacks the permission aiplatform.customJobs.create"),
        'gcloud projects add-iam-policy-binding my-project --member="user:$(gcloud config get account)" '
        "--role=roles/aiplatform.user",
    ),
    (
        vm(403, "Required 'compute.instances.create' permission for 'projects/p/zones/z/instances/dev'", "forbidden"),
        *(VM, "permanent", "permission", "your account lacks the permission compute.instances.create"),
        "--role=roles/compute.instanceAdmin.v1",
    ),
    (
        *(told(403, PULL), SPOT, "permanent", "permission"),
        "Vertex AI's service agent (it pulls images, and is used by jobs without a service account) lacks",
        "gcloud artifacts repositories add-iam-policy-binding launch --location=us --project=my-project --member="
        'serviceAccount:service-$(gcloud projects describe my-project --format="value(projectNumber)")'
        "@gcp-sa-aiplatform-cc.iam.gserviceaccount.com --role=roles/artifactregistry.reader",
    ),
    (
        *(told(400, AGENT_READS), SPOT, "permanent", "permission"),
        "service-789@gcp-sa-aiplatform.iam.gserviceaccount.com lacks the permission storage.objects.get",
        "gcloud storage buckets add-iam-policy-binding gs://mco-mm --member=serviceAccount:service-789@gcp-sa-"
        "aiplatform.iam.gserviceaccount.com --role=roles/storage.objectUser",
    ),
    (
        *(told(400, KMS), SPOT, "permanent", "permission", "lacks the permission cloudkms.cryptoKeyVersions.useToEn"),
        "gcloud kms keys add-iam-policy-binding k --keyring=r --location=us-central1 --project=my-project "
        "--member=serviceAccount:service-123@gcp-sa-aiplatform.iam.gserviceaccount.com",
    ),
    (
        told(403, "Caller does not have required permission to use project p.", reason="USER_PROJECT_DENIED"),
        *(SPOT, "permanent", "permission", "serviceusage.services.use", "roles/serviceusage.serviceUsageConsumer"),
    ),
    (
        told(403, "?", metadata={"permission": "new.things.use"}),
        *(SPOT, "permanent", "permission", "lacks the permission new.things.use", "where ROLE contains new.things.use"),
    ),
    (told(403, "The caller does not have permission"), SPOT, "permanent", "permission", "The caller does not", ""),
    # --- the project
    (
        told(403, "Permission denied on resource project nope.", reason="CONSUMER_INVALID"),
        *(
            SPOT,
            "project",
            "project",
            "project my-project does not exist, or you have no access to it",
            "gcloud projects list; gcloud config set project PROJECT",
        ),
    ),
    (
        vm(404, "The resource 'projects/nope' was not found", "notFound"),
        VM,
        "project",
        "project",
        "does not exist",
        "gcloud",
    ),
    (
        told(
            403,
            DISABLED,
            reason="SERVICE_DISABLED",
            metadata={"service": "aiplatform.googleapis.com", "consumer": "projects/123456789"},
        ),
        *(SPOT, "project", "disabled", "the API aiplatform.googleapis.com is disabled in 123456789"),
        "gcloud services enable aiplatform.googleapis.com --project=123456789; then wait a minute",
    ),
    (  # another API than the one that was asked, which only the ErrorInfo says
        told(403, "It is off.", reason="SERVICE_DISABLED", metadata={"service": "compute.googleapis.com"}),
        *(SPOT, "project", "disabled", "compute.googleapis.com is disabled in my-project", "enable compute.google"),
    ),
    (
        vm(
            403, DISABLED.replace("Vertex AI", "Compute Engine").replace("aiplatform", "compute"), "accessNotConfigured"
        ),
        *(
            VM,
            "project",
            "disabled",
            "compute.googleapis.com is disabled in 123456789",
            "enable compute.googleapis.com",
        ),
    ),
    (
        told(
            403,
            "This API method requires billing to be enabled. Please enable billing on project #1.",
            reason="BILLING_DISABLED",
        ),
        *(SPOT, "project", "project", "my-project has no billing", "gcloud billing projects link my-project"),
    ),
    (
        vm(412, "Constraint constraints/compute.vmExternalIpAccess violated for project 1.", "conditionNotMet"),
        *(
            VM,
            "permanent",
            "permission",
            "an organization policy forbids",
            "org-policies describe compute.vmExternalIpAc",
        ),
    ),
    (
        vm(412, "Location violates constraint constraints/gcp.resourceLocations on the resource.", "conditionNotMet"),
        *(VM, "region", "permission", "forbids us-central1 for project my-project", "describe gcp.resourceLocations"),
    ),
    (
        told(
            403,
            "Request is prohibited by organization's policy. vpcServiceControlsUniqueIdentifier: x",
            reason="SECURITY_POLICY_VIOLATED",
        ),
        *(SPOT, "permanent", "permission", "prohibited by organization's policy", "administrator"),
    ),
    # --- image and output
    (
        told(400, "manifest unknown: Failed to fetch"),
        SPOT,
        "permanent",
        "image",
        SPOT.image,
        "images describe us-",
    ),
    (
        told(404, "The specified bucket does not exist."),
        *(SPOT, "project", "output", "the bucket my-bucket does not exist"),
        "gcloud storage buckets create gs://my-bucket --location=us-central1 --project=my-project",
    ),
    # --- nothing but this moment
    (vm(403, RATE, "rateLimitExceeded"), VM, "transient", "busy", "Queries per minute", "in a moment"),
    (told(429, "Too many requests."), SPOT, "transient", "busy", "Too many requests.", "in a moment"),
    (
        told(503, "The service is currently unavailable."),
        SPOT,
        "transient",
        "busy",
        "currently unavailable",
        "in a mom",
    ),
    (told(500, ""), SPOT, "transient", "busy", "HTTP 500 without a message", "in a moment"),
    (told(418, "I'm\x1b[31m a teapot"), SPOT, "permanent", "invalid", "I'm [31m a teapot", ""),
]


@pytest.mark.parametrize(("refusal", "tried", "scope", "kind", "cause", "fix"), REFUSALS)
def test_a_refusal(refusal: Refusal, tried: RequestContext, scope: str, kind: str, cause: str, fix: str) -> None:
    found = diagnose_refusal(refusal, tried)
    assert (found.scope, found.kind) == (scope, kind)
    assert cause in found.cause
    assert fix in found.fix
    assert bool(fix) == bool(found.fix)


def test_transient_refusals_have_a_retry_time() -> None:
    assert diagnose_refusal(told(429, "slow down", retry_after=7.0), SPOT).retry_after == 7.0
    assert diagnose_refusal(told(400, T4, retry_after=7.0), SPOT).retry_after == 0.0


@pytest.mark.parametrize(("refusal", "tried"), [one[:2] for one in REFUSALS])
def test_a_message_that_the_client_joined_into_one_line(refusal: Refusal, tried: RequestContext) -> None:
    on_one = replace(refusal, message=" ".join(refusal.message.split()))
    assert diagnose_refusal(on_one, tried) == diagnose_refusal(refusal, tried)


def test_control_characters_of_a_message_are_not_passed_on() -> None:
    words = 'Accelerator: "3" of accelerator "NVIDIA_L4" is not supported for machine type "g2-standard-24"\x1f\x1b[2J'
    found = diagnose_refusal(Refusal(code=400, message=words), SPOT)
    assert found.kind == "machine"
    assert found.cause.isprintable()
