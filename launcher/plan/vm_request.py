"""Build Compute Engine instances: the JSON body of `instances.insert`, or of `bulkInsert` for several VMs.

The required fields follow Google's documentation and gcloud's own requests; differences between machine types are in
the catalog.
"""

from __future__ import annotations

from math import ceil
from typing import Any

from launcher.catalog import Gpu, MachineType
from launcher.jobs.vm import last_url_part
from launcher.plan import mounts, vm_metadata, waiting
from launcher.plan.model import Context, Placement, Shared
from launcher.plan.vertex_request import RESERVATION_KEY, given
from launcher.spec.models import JobSpec

IMAGE_PROJECT = "deeplearning-platform-release"
BOOT_DISK_GB = 200
MODEL = {"standard": "STANDARD", "reservation": "STANDARD", "spot": "SPOT", "flex-start": "FLEX_START"}
SCOPE = "https://www.googleapis.com/auth/cloud-platform"


def request(spec: JobSpec, context: Context, shared: Shared, placement: Placement, *, family: str) -> dict[str, Any]:
    """Return the body of `instances.insert`; for several VMs, of `instances.bulkInsert`, which creates all or none.

    `family` is the image family to boot, unless the spec names an image.
    """
    names = vm_metadata.nodes(spec, shared)
    body = instance(spec, context, shared, placement, family)
    if len(names) == 1:
        return {"name": names[0], **body}
    return {
        "count": str(len(names)),
        "minCount": str(len(names)),
        "perInstanceProperties": {name: {} for name in names},
        "instanceProperties": instance_properties(body),
    }


def instance_properties(body: dict[str, Any]) -> dict[str, Any]:
    """Convert an Instance to compute_v1.InstanceProperties, which name machine, GPU and disk types without a zone."""
    disks = [without_zone(disk) for disk in body["disks"]]
    gpus = [
        {**gpu, "acceleratorType": last_url_part(gpu["acceleratorType"])} for gpu in body.get("guestAccelerators", ())
    ]
    return {**body, "machineType": last_url_part(body["machineType"]), "disks": disks, **given(guestAccelerators=gpus)}


def without_zone(disk: dict[str, Any]) -> dict[str, Any]:
    """Return a disk of InstanceProperties: an existing disk or a disk type by its name alone."""
    if "source" in disk:
        return {**disk, "source": last_url_part(disk["source"])}
    params = disk["initializeParams"]
    return {**disk, "initializeParams": {**params, "diskType": last_url_part(params["diskType"])}}


def instance(spec: JobSpec, context: Context, shared: Shared, placement: Placement, family: str) -> dict[str, Any]:
    """Return the Instance of one VM, without its name."""
    machine, zone = placement.chosen.machine, placement.zone
    if machine is None or zone is None:
        raise ValueError("an Instance needs a machine type and a zone")
    kind = placement.provisioning.partition(":")[0]
    data_disks = mounts.attached_disks(spec, machine, zone, shared.labels) if shared.container else []
    return {
        "machineType": f"zones/{zone}/machineTypes/{machine.name}",
        "labels": shared.labels,
        **given(guestAccelerators=guest_accelerators(machine, placement.chosen.gpu, zone)),
        "disks": [
            boot_disk(spec, machine, zone, family, shared.labels),
            *local_ssds(spec, machine, zone),
            *data_disks,
        ],
        "networkInterfaces": [network_interface(spec, placement.region)],
        "scheduling": scheduling(spec, machine, kind, shared),
        **given(reservationAffinity=reservation_affinity(placement.provisioning, context.project)),
        "serviceAccounts": [{"email": vm_metadata.account_of(spec, context), "scopes": [SCOPE]}],
        "metadata": {"items": vm_metadata.metadata(spec, context, shared, placement, family)},
        # Secure Boot must be off: it refuses NVIDIA's kernel module unless a key that the image trusts has signed it.
        "shieldedInstanceConfig": {
            "enableSecureBoot": False,
            "enableVtpm": True,
            "enableIntegrityMonitoring": True,
        },
        **given(params=params(spec, kind)),
    }


def guest_accelerators(machine: MachineType, gpu: Gpu, zone: str) -> list[dict[str, Any]]:
    """Return the GPUs of an N1 machine; A and G machine types include theirs (Compute Engine, GPU machine types)."""
    if not machine.guest_accelerator:
        return []
    kind = f"zones/{zone}/acceleratorTypes/{gpu.accelerator}"
    return [{"acceleratorType": kind, "acceleratorCount": machine.gpus}]


def boot_disk_of(spec: JobSpec, machine: MachineType) -> dict[str, Any]:
    """Return type and size of the boot disk, with the keys of Vertex AI's DiskSpec."""
    return {
        "bootDiskType": spec.machine.boot_disk_type or machine.boot_disk_default,
        "bootDiskSizeGb": spec.machine.boot_disk_gb or BOOT_DISK_GB,
    }


def boot_disk(
    spec: JobSpec, machine: MachineType, zone: str, image_family: str, labels: dict[str, str]
) -> dict[str, Any]:
    """Return the boot disk. It is deleted with its VM, and labelled so that its cost can be attributed."""
    family = f"projects/{IMAGE_PROJECT}/global/images/family/{image_family}"
    kms, disk = spec.identity.kms_key, boot_disk_of(spec, machine)
    return {
        "boot": True,
        "autoDelete": True,
        "type": "PERSISTENT",
        "mode": "READ_WRITE",
        "initializeParams": {
            "sourceImage": spec.vm.image or family,
            "diskType": f"zones/{zone}/diskTypes/{disk['bootDiskType']}",
            "diskSizeGb": str(disk["bootDiskSizeGb"]),
            "labels": labels,
        },
        **({"diskEncryptionKey": {"kmsKeyName": kms}} if kms else {}),
    }


def local_ssds(spec: JobSpec, machine: MachineType, zone: str) -> list[dict[str, Any]]:
    """Return the scratch disks that must be listed; A3, A4 and A2 Ultra include theirs."""
    if machine.local_ssd_auto:
        return []
    disk = {
        "type": "SCRATCH",
        "mode": "READ_WRITE",
        "autoDelete": True,
        "interface": "NVME",
        "initializeParams": {"diskType": f"zones/{zone}/diskTypes/local-ssd"},
    }
    return [disk] * (spec.machine.local_ssds or 0)


def has_local_ssd(spec: JobSpec, machine: MachineType) -> bool:
    """Return whether the VM has local SSDs, included or requested."""
    return machine.local_ssd_auto or bool(spec.machine.local_ssds)


def network_interface(spec: JobSpec, region: str) -> dict[str, Any]:
    """Return a gVNIC interface (required for A3, recommended for all); an external IP only on request."""
    network, subnetwork = spec.identity.network, spec.identity.subnetwork
    if not network and not subnetwork:
        network = "default"
    return {
        **given(network=network and (network if "/" in network else f"global/networks/{network}")),
        **given(
            subnetwork=subnetwork
            and (subnetwork if "/" in subnetwork else f"regions/{region}/subnetworks/{subnetwork}")
        ),
        "nicType": "GVNIC",
        **given(
            accessConfigs=[{"type": "ONE_TO_ONE_NAT", "name": "External NAT"}] if spec.vm.external_ip else None,
        ),
    }


def scheduling(spec: JobSpec, machine: MachineType, kind: str, shared: Shared) -> dict[str, Any]:
    """Return the provisioning model and the time after which Google itself ends the VM."""
    training = shared.container is not None
    on_stop = vm_metadata.on_stop(spec, training=training)
    discard = on_stop == "stop" and has_local_ssd(spec, machine)
    # DENSE reservations take no other model, and without an on-demand model a machine has no other.
    dense = spec.vm.dense_reservation or "standard" not in machine.compute_provisioning
    bound = kind == "reservation" and dense
    return {
        "provisioningModel": "RESERVATION_BOUND" if bound else MODEL[kind],
        **({"preemptible": True} if kind == "spot" else {}),
        # GPUs don't migrate: "Instances with guest accelerators do not support live migration."
        "onHostMaintenance": "TERMINATE",
        "automaticRestart": kind in ("standard", "reservation") and not training,
        "maxRunDuration": {"seconds": str(ceil(shared.hours * 3600))},
        "instanceTerminationAction": on_stop.upper(),
        # Google refuses STOP on a machine with local SSDs without it.
        **({"onInstanceStopAction": {"discardLocalSsd": True}} if discard else {}),
    }


def reservation_affinity(provisioning: str, project: str) -> dict[str, Any] | None:
    """Return the ReservationAffinity: none for flex-start, which must not consume one; otherwise the named reservation
    only. A shared reservation is named with its project.
    """
    kind, _, name = provisioning.partition(":")
    if kind == "flex-start":
        return {"consumeReservationType": "NO_RESERVATION"}
    if kind != "reservation":
        return None
    _, owner, _, _, _, reservation = name.split("/")
    value = reservation if owner == project else f"projects/{owner}/reservations/{reservation}"
    return {"consumeReservationType": "SPECIFIC_RESERVATION", "key": RESERVATION_KEY, "values": [value]}


def params(spec: JobSpec, kind: str) -> dict[str, Any] | None:
    """Return how long a flex-start request may stay in the queue (compute_v1.InstanceParams)."""
    if kind != "flex-start":
        return None
    return {"requestValidForDuration": {"seconds": str(waiting.attempt_wait(spec.limits, "vm", kind))}}
