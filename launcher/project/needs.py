"""Derive the requirements of a plan for its project. Pure."""

from __future__ import annotations

import json
import re

from msgspec.structs import replace

from launch_train.common import contract
from launcher import catalog
from launcher.images.reference import artifact_repository, parse
from launcher.plan.model import Attempt, Plan
from launcher.plan.names import default_output, default_repository
from launcher.project.model import GpuNeed, Needs, ReservationNeed, SubnetworkNeed
from launcher.project.vm_checks import has_external_ip, network_of
from launcher.services import request
from launcher.services.request.vm import properties

BASIC_APIS = ("aiplatform.googleapis.com", "artifactregistry.googleapis.com", "logging.googleapis.com")
VM_API, IAP_API = "compute.googleapis.com", "iap.googleapis.com"
SECRETS_API = "secretmanager.googleapis.com"
METRIC_PREFIX = "custom_model_training_"


def needs_of(plan: Plan, *, creates_repository: bool = False) -> Needs:
    """Return the requirements of a plan's jobs."""
    first = request.read(plan.attempts[0].request)
    image = plan.image
    return replace(
        needs_on_vms(plan) if plan.target == "vm" else needs_on_vertex(plan),
        bucket=bucket_name(plan.run_folder or ""),
        regions=tuple(dict.fromkeys(attempt.region for attempt in plan.attempts)),
        account=first.account if "@" in first.account else "",
        image=image.uri if image and image.pinned else "",
        repository=repository_name(image.uri) if image else "",
        creates_repository=creates_repository,
        secrets=tuple(dict.fromkeys(secrets_of(plan))),
    )


def needs_on_vertex(plan: Plan) -> Needs:
    """Return the requirements of Vertex AI alone."""
    first = plan.attempts[0].request
    return Needs(
        project=plan.project,
        apis=(*BASIC_APIS, *secrets_api(plan)),
        gpus=tuple(need for attempt in plan.attempts if (need := gpu_need(plan, attempt))),
        reservations=tuple(reservation_need(plan, attempt) for attempt in plan.attempts if is_reserved(attempt)),
        key=first.get("encryptionSpec", {}).get("kmsKeyName", ""),
    )


def needs_on_vms(plan: Plan) -> Needs:
    """Return the requirements of VMs alone; `vm_checks` checks their quotas, network and image."""
    first = properties(plan.attempts[0].request)
    external = has_external_ip(first)
    nets = [
        network_of(first, region, plan.project) for region in dict.fromkeys(attempt.region for attempt in plan.attempts)
    ]
    boot = next(disk for disk in first["disks"] if disk.get("boot"))
    in_project = re.search(r"projects/([^/]+)/global/images/", boot.get("initializeParams", {}).get("sourceImage", ""))
    return Needs(
        project=plan.project,
        service="vm",
        apis=(
            VM_API,
            *((IAP_API,) if plan.image is None and not external else ()),
            *(BASIC_APIS[1:] if plan.image else ()),
            *secrets_api(plan),
        ),
        key=boot.get("diskEncryptionKey", {}).get("kmsKeyName", ""),
        subnetworks=tuple(
            SubnetworkNeed(project=net.project, region=net.region, name=net.subnetwork, external_ip=external)
            for net in nets
            if net.project != plan.project
        ),
        reservations=tuple(reservation_need(plan, attempt) for attempt in plan.attempts if is_reserved(attempt)),
        external_ip=external,
        image_project=in_project[1] if in_project else "",
    )


def secrets_api(plan: Plan) -> tuple[str, ...]:
    return (SECRETS_API,) if secrets_of(plan) else ()


def secrets_of(plan: Plan) -> list[str]:
    """Return the secrets that the jobs read: those of the environment, and a webhook's URL."""
    env = request.read(plan.attempts[0].request).env
    webhook = json.loads(env.get(contract.NOTIFY, "{}")).get("webhook", "")
    return [
        *json.loads(env.get(contract.SECRETS, "{}")).values(),
        *([webhook] if webhook.startswith("projects/") else []),
    ]


def project_needs(project: str, regions: tuple[str, ...]) -> Needs:
    """Return what launch's defaults need of a project: its bucket and repository; no GPUs."""
    return Needs(
        project=project,
        apis=BASIC_APIS,
        bucket=bucket_name(default_output(project)),
        regions=regions,
        repository=repository_name(default_repository(project)),
        lists_quotas=True,
    )


def bucket_name(output: str) -> str:
    """Return NAME of gs://NAME/…; empty for any other folder."""
    return output.split("/")[2] if output.startswith("gs://") else ""


def repository_name(reference: str) -> str:
    """Return the resource name of an image's Artifact Registry repository; empty if it is elsewhere."""
    parsed = parse(reference)
    artifact = artifact_repository(parsed.host, parsed.repository)
    return (
        f"projects/{artifact.project}/locations/{artifact.location}/repositories/{artifact.repository}"
        if artifact
        else ""
    )


def gpu_need(plan: Plan, attempt: Attempt) -> GpuNeed | None:
    """Return what an attempt uses of a GPU quota; None: no GPUs, machines of a persistent resource, or reserved."""
    read = request.read(attempt.request)
    if not read.gpus or is_reserved(attempt) or attempt.request["jobSpec"].get("persistentResourceId"):
        return None
    metric, known = quota_metric(plan, attempt)
    return GpuNeed(
        metric=metric,
        gpus=read.gpus * read.nodes,
        region=attempt.region,
        provisioning=attempt.provisioning,
        machine_type=attempt.machine_type,
        is_exact=known,
    )


def quota_metric(plan: Plan, attempt: Attempt) -> tuple[str, bool]:
    """Return the metric of an attempt's quota, and whether the catalog names it; else it is derived from the
    accelerator."""
    tables = catalog.load()
    shapes = tables.machines.get(attempt.machine_type, ())
    shape = next((each for each in shapes if tables.gpus[each.gpu].title == plan.machine_of(attempt).gpu), None)
    quota = tables.quota(shape, "vertex", attempt.provisioning) if shape else None
    if quota and quota.metric:
        return quota.metric.rpartition("/")[2], True
    accelerator = attempt.request["jobSpec"]["workerPoolSpecs"][0]["machineSpec"].get("acceleratorType", "")
    kind = "preemptible_" if attempt.provisioning in catalog.quotas.PREEMPTIBLE else ""
    return f"{METRIC_PREFIX}{kind}{accelerator.lower()}", False


def is_reserved(attempt: Attempt) -> bool:
    return attempt.provisioning.startswith("reservation:")


def reservation_need(plan: Plan, attempt: Attempt) -> ReservationNeed:
    name = attempt.provisioning.partition(":")[2]
    nodes = plan.machine.nodes
    need = ReservationNeed(name=name, machine_type=attempt.machine_type, nodes=nodes, region=attempt.region)
    model = properties(attempt.request).get("scheduling", {}).get("provisioningModel")
    dense = plan.spec.get("vm", {}).get("dense_reservation", False)
    return replace(need, dense=dense if dense or model == "STANDARD" else None) if attempt.zone else need
