"""Build Vertex AI CustomJobs as canonical proto3 JSON (int64 as text, enums by name).

Fields and enums: google.cloud.aiplatform_v1.CustomJob of google-cloud-aiplatform 2.7.0.
"""

from __future__ import annotations

from math import ceil
from typing import Any

from launch_train.common import contract
from launcher.catalog import MachineType
from launcher.plan.container import escaped
from launcher.plan.model import Placement, Shared
from launcher.plan.mounts import vertex_lustre, vertex_nfs
from launcher.plan.placement import attempt_wait
from launcher.spec.models import JobSpec, Psc

STRATEGY = {"standard": "STANDARD", "spot": "SPOT", "flex-start": "FLEX_START"}
RESERVATION_KEY = "compute.googleapis.com/reservation-name"
BOOT_DISK_GB = 200
"""Vertex AI's default of 100 GB leaves little space beside a CUDA image; 100 GB more cost about $0.03 an hour."""


def custom_job(spec: JobSpec, shared: Shared, placement: Placement, *, project: str) -> dict[str, Any]:
    """Return the body of `projects.locations.customJobs.create` for one placement.

    What is known only later is added later: the plan's digest as a label (plan.binding), the image's digest
    (plan.build.with_digest), the hours and the wait that earlier attempts left (services.request).
    """
    chosen = placement.chosen
    pool = {
        # A rehearsal with a GPU count that Google does not offer has no machine type.
        "machineSpec": given(
            machineType=chosen.machine.name if chosen.machine else None,
            acceleratorType=chosen.gpu.vertex_accelerator,
            acceleratorCount=chosen.gpus,
            reservationAffinity=reservation_affinity(placement.provisioning),
        ),
        "diskSpec": disk_spec(spec, chosen.machine),
        **given(nfsMounts=vertex_nfs(spec), lustreMounts=vertex_lustre(spec)),
        "containerSpec": container_spec(shared),
    }
    identity, vertex = spec.identity, spec.vertex
    job_spec = {
        "workerPoolSpecs": worker_pools(spec, pool, placement.region),
        "scheduling": scheduling(spec, shared, placement.provisioning),
        **given(
            serviceAccount=identity.service_account,
            network=identity.network,
            reservedIpRanges=list(identity.reserved_ip_ranges),
            pscInterfaceConfig=psc_interface(identity.psc),
            baseOutputDirectory={"outputUriPrefix": shared.run_folder} if shared.run_folder else None,
            tensorboard=vertex.tensorboard,
            **experiment(spec, project, placement.region),
            enableWebAccess=vertex.web_access,
            enableDashboardAccess=vertex.dashboard_access,
            persistentResourceId=vertex.persistent_resource,
        ),
    }
    return {
        "displayName": shared.run,
        "jobSpec": job_spec,
        "labels": shared.labels,
        **given(encryptionSpec={"kmsKeyName": identity.kms_key} if identity.kms_key else None),
    }


def given(**fields: Any) -> dict[str, Any]:
    """Return the fields that are not empty, as proto3 JSON omits defaults."""
    return {name: value for name, value in fields.items() if value}


def reservation_affinity(provisioning: str) -> dict[str, Any] | None:
    """Return the ReservationAffinity; None unless `provisioning` names a reservation."""
    kind, _, name = provisioning.partition(":")
    if kind != "reservation":
        return None
    return {"reservationAffinityType": "SPECIFIC_RESERVATION", "key": RESERVATION_KEY, "values": [name]}


def disk_spec(spec: JobSpec, machine: MachineType | None) -> dict[str, Any]:
    """Return the DiskSpec. It is always explicit, so that the request shows what is billed."""
    default = machine.vertex_boot_disk_default if machine else "pd-ssd"
    return {
        "bootDiskType": spec.machine.boot_disk_type or default,
        "bootDiskSizeGb": spec.machine.boot_disk_gb or BOOT_DISK_GB,
    }


def container_spec(shared: Shared) -> dict[str, Any]:
    """Return the ContainerSpec. Vertex AI expands `$(NAME)` in values: `env` may use it, so only texts that are not
    written for the platform are escaped."""
    image, container = shared.image, shared.container
    if image is None or container is None:
        raise ValueError("a CustomJob needs an image and a container")
    env = {**container.env}
    env |= {name: escaped(env[name]) for name in contract.VERBATIM if name in env}
    return {
        "imageUri": image.uri,
        "command": list(container.command),
        "args": list(container.args),
        "env": [{"name": name, "value": value} for name, value in env.items()],
    }


def worker_pools(spec: JobSpec, pool: dict[str, Any], region: str) -> list[dict[str, Any]]:
    """Return the worker pools: 0 the primary node, 1 the other nodes, 2 the reduction servers (Vertex AI, distributed
    training)."""
    pools = [{**pool, "replicaCount": "1"}]
    if spec.machine.nodes > 1:
        pools.append({**pool, "replicaCount": str(spec.machine.nodes - 1)})
    reduction = spec.vertex.reduction_server
    if reduction:
        continent = {"europe": "europe", "asia": "asia"}.get(region.partition("-")[0], "us")
        image = f"{continent}-docker.pkg.dev/vertex-ai-restricted/training/reductionserver:latest"
        pools.append(
            {
                "machineSpec": {"machineType": reduction.machine_type},
                "containerSpec": {"imageUri": image},
                "replicaCount": str(reduction.replicas),
            }
        )
    return pools


def scheduling(spec: JobSpec, shared: Shared, provisioning: str) -> dict[str, Any]:
    """Return time limits and restart policy (docs/reliability.md).

    launch_train.node restarts failed processes, so Vertex AI must not restart the whole job for one worker. It may
    restart the job after losing a machine, unless limits.restarts is 0.
    """
    wait = attempt_wait(spec.limits, "vertex", provisioning) if provisioning == "flex-start" else None
    return {
        "timeout": f"{ceil(shared.hours * 3600)}s",
        **({} if spec.vertex.persistent_resource else {"strategy": STRATEGY.get(provisioning, "STANDARD")}),
        "restartJobOnWorkerRestart": False,
        "disableRetries": spec.limits.restarts == 0,
        **given(maxWaitDuration=wait and f"{wait}s"),
    }


def experiment(spec: JobSpec, project: str, region: str) -> dict[str, str | None]:
    """Return the experiment and its run as Vertex AI context names (CustomJobSpec's documentation)."""
    name, run = spec.vertex.experiment, spec.vertex.experiment_run
    if not name:
        return {}
    store = f"projects/{project}/locations/{region}/metadataStores/default/contexts"
    context = name if name.startswith("projects/") else f"{store}/{name}"
    return {"experiment": context, "experimentRun": f"{context}-{run}" if run else None}


def psc_interface(psc: Psc | None) -> dict[str, Any] | None:
    """Return the PscInterfaceConfig, or None."""
    if psc is None:
        return None
    peering = [
        {"domain": peering.domain, "targetProject": peering.target_project, "targetNetwork": peering.target_network}
        for peering in psc.dns_peering
    ]
    return {"networkAttachment": psc.network_attachment, **given(dnsPeeringConfigs=peering)}


def gcloud_command(request: dict[str, Any], *, project: str, region: str, config: str) -> tuple[str, ...]:
    """Return the gcloud command that sends the same request; fields outside the CustomJobSpec become flags."""
    labels = ",".join(f"{key}={value}" for key, value in sorted(request["labels"].items()))
    kms = request.get("encryptionSpec", {}).get("kmsKeyName")
    return (
        *("gcloud", "ai", "custom-jobs", "create", f"--project={project}", f"--region={region}"),
        f"--display-name={request['displayName']}",
        f"--labels={labels}",
        *((f"--kms-key={kms}",) if kms else ()),
        f"--config={config}",
    )
