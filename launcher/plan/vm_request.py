"""Build Compute Engine instances: the JSON body of `instances.insert`, or of `bulkInsert` for several VMs.

The required fields follow Google's documentation and gcloud's own requests; differences between machine types are in
the catalog.
"""

from __future__ import annotations

import re
from math import ceil
from typing import Any

from launcher.catalog import Gpu, MachineType
from launcher.errors import PlanRefused
from launcher.jobs.vm import PARAMETERS, last_url_part
from launcher.plan import iam_commands, mounts
from launcher.plan.container import as_json, expanded
from launcher.plan.model import Container, Context, Placement, Shared
from launcher.plan.names import default_service_account
from launcher.plan.placement import attempt_wait
from launcher.plan.vertex_request import RESERVATION_KEY, given
from launcher.spec.models import JobSpec
from launcher.text import parse_duration

IMAGE_PROJECT = "deeplearning-platform-release"
BOOT_DISK_GB = 200
MODEL = {"standard": "STANDARD", "reservation": "STANDARD", "spot": "SPOT", "flex-start": "FLEX_START"}
SCOPE = "https://www.googleapis.com/auth/cloud-platform"


def request(spec: JobSpec, context: Context, shared: Shared, placement: Placement, *, family: str) -> dict[str, Any]:
    """Return the body of `instances.insert`; for several VMs, of `instances.bulkInsert`, which creates all or none.

    `family` is the image family to boot, unless the spec names an image.
    """
    names = vm_names(spec, shared)
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
    disks = []
    for disk in body["disks"]:
        if "source" in disk:
            disks.append({**disk, "source": last_url_part(disk["source"])})
        else:
            params = disk["initializeParams"]
            disks.append({**disk, "initializeParams": {**params, "diskType": last_url_part(params["diskType"])}})
    gpus = [
        {**gpu, "acceleratorType": last_url_part(gpu["acceleratorType"])} for gpu in body.get("guestAccelerators", ())
    ]
    return {**body, "machineType": last_url_part(body["machineType"]), "disks": disks, **given(guestAccelerators=gpus)}


def instance(spec: JobSpec, context: Context, shared: Shared, placement: Placement, family: str) -> dict[str, Any]:
    """Return the Instance of one VM, without its name."""
    machine, zone = placement.chosen.machine, placement.zone
    if machine is None or zone is None:
        raise ValueError("an Instance needs a machine type and a zone")
    kind = placement.provisioning.partition(":")[0]
    data_disks = mounts.mount_disks(spec, machine, zone, shared.labels) if shared.container else []
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
        "scheduling": vm_scheduling(spec, machine, kind, shared),
        **given(reservationAffinity=vm_reservation_affinity(placement.provisioning, context.project)),
        "serviceAccounts": [{"email": account_of(spec, context), "scopes": [SCOPE]}],
        "metadata": {"items": metadata(spec, context, shared, placement, family)},
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


def vm_scheduling(spec: JobSpec, machine: MachineType, kind: str, shared: Shared) -> dict[str, Any]:
    """Return the provisioning model and the time after which Google itself ends the VM."""
    training = shared.container is not None
    action = on_stop(spec, training=training)
    discard = action == "stop" and has_local_ssd(spec, machine)
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
        "instanceTerminationAction": action.upper(),
        # Google refuses STOP on a machine with local SSDs without it.
        **({"onInstanceStopAction": {"discardLocalSsd": True}} if discard else {}),
    }


def vm_reservation_affinity(provisioning: str, project: str) -> dict[str, Any] | None:
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
    return {"requestValidForDuration": {"seconds": str(attempt_wait(spec.limits, "vm", kind))}}


# --- Metadata ---------------------------------------------------------------------------------------------------------


MAX_ITEM = 256 * 1024
"""Maximum bytes of a metadata value (Compute Engine, VM metadata: limitations)."""
MAX_ARGUMENT = 128 * 1024
"""Maximum bytes of an argument or variable of a process, with its terminator (Linux, MAX_ARG_STRLEN)."""
WITH_DRIVER = r".*-nvidia-[0-9]+"
"""Image families that include a driver (Deep Learning VM: FRAMEWORK-CUDA-OS-DRIVER)."""


def metadata(
    spec: JobSpec, context: Context, shared: Shared, placement: Placement, family: str
) -> list[dict[str, str]]:
    """Return all metadata items. OS Login replaces SSH keys; the script reports its progress in guest attributes.

    Raises PlanRefused: environment or arguments exceed the limits of VM metadata or of a process.
    """
    if not context.startup:
        raise ValueError("a VM needs the startup script")
    script = context.startup
    if shared.container is not None and spec.mounts:
        # The functions that mount them stand in front of the last line, which runs the job: the script of other VMs,
        # and so their requests, stay as they are.
        *functions, last = script.splitlines(keepends=True)
        script = "".join([*functions, context.mount_script, "\n", last])
    driver = {} if re.fullmatch(WITH_DRIVER, family) and not spec.vm.image else {"install-nvidia-driver": "True"}
    items = {
        "enable-oslogin": "TRUE",
        "enable-guest-attributes": "TRUE",
        **driver,
        "startup-script": script,
        PARAMETERS: parameters(spec, context, shared, placement),
    }
    return [{"key": key, "value": value} for key, value in items.items()]


def parameters(spec: JobSpec, context: Context, shared: Shared, placement: Placement) -> str:
    """Return the item `launch` as canonical JSON. Raises PlanRefused: it is too large."""
    container = expanded(shared.container) if shared.container else None
    values = (
        training_parameters(spec, context, shared, placement, container) if container else workstation_parameters(spec)
    )
    text = as_json(values)
    if (size := len(text.encode())) > MAX_ITEM:
        raise PlanRefused(
            f"env and arguments: {size // 1024} KiB is too large for VM metadata, which holds {MAX_ITEM // 1024} KiB",
            "Move large values to a file in image.code, or to a bucket.",
            field="env",
        )
    return text


def workstation_parameters(spec: JobSpec) -> dict[str, Any]:
    """Return the parameters of a VM to work on, for its watchdog."""
    vm = spec.vm
    return {
        "kind": "work",
        "on_stop": on_stop(spec, training=False),
        **({"lease_seconds": parse_duration(vm.lease)} if vm.lease else {}),
        **({"idle_stop_seconds": parse_duration(vm.idle_stop)} if vm.idle_stop else {}),
    }


def training_parameters(
    spec: JobSpec, context: Context, shared: Shared, placement: Placement, container: Container
) -> dict[str, Any]:
    """Return the parameters of a training VM: container, nodes, and the grant to report if the VM cannot delete
    itself. Raises PlanRefused."""
    entrypoint, *rest = container.command
    arguments = [*rest, *container.args]
    check_argument_sizes(container.env, arguments)
    account = account_of(spec, context)
    return {
        "kind": "train",
        "run": shared.run,
        "run_folder": shared.run_folder,
        "image": shared.image.uri if shared.image else "",
        "entrypoint": entrypoint,
        "arguments": arguments,
        "env": container.env,
        **({"mounts": mounts.parameters(spec)} if spec.mounts else {}),
        "nodes": list(vm_names(spec, shared)),
        "domain": domain(context.project, placement),
        "account": account,
        "grant": iam_commands.self_delete(context.project, account, prefix(spec, shared.run)),
    }


def check_argument_sizes(env: dict[str, str], arguments: list[str]) -> None:
    """Check that Linux can start a process with these variables and arguments. Raises PlanRefused."""
    variables = [(f"env.{name}", f"{name}={value}") for name, value in env.items()]
    for field, text in (*variables, *(("run.args", argument) for argument in arguments)):
        if (size := len(text.encode())) >= MAX_ARGUMENT:
            raise PlanRefused(
                f"{field}: {size // 1024} KiB is too large: Linux allows {MAX_ARGUMENT // 1024} KiB per argument",
                "Move it to a file in image.code, or to a bucket.",
                field=field,
            )


def on_stop(spec: JobSpec, *, training: bool) -> str:
    """Return what happens to the VM at the end of its time: stop or delete."""
    return spec.vm.on_stop or ("delete" if training else "stop")


def account_of(spec: JobSpec, context: Context) -> str:
    """Return the VM's service account; `default` is Compute Engine's, if --allow-default-service-account allows it."""
    own = "default" if context.allow_default_account else default_service_account(context.project)
    return spec.identity.service_account or own


def vm_names(spec: JobSpec, shared: Shared) -> tuple[str, ...]:
    """Return the VMs' names, node 0 first."""
    count = spec.machine.nodes
    return (shared.run,) if count == 1 else tuple(f"{shared.run}-n{node}" for node in range(count))


def prefix(spec: JobSpec, run: str) -> str:
    """Return the name prefix of this spec's VMs, so that one grant covers all its runs; or a custom run id itself."""
    own = f"{spec.name}-"
    return own if run.startswith(own) else run


def domain(project: str, placement: Placement) -> str:
    """Return the DNS domain of the VMs: zonal internal DNS (Compute Engine, VM.ZONE.c.PROJECT.internal). That of a
    domain-scoped project `example.com:p` ends in p.example.com.internal."""
    owner, _, name = project.rpartition(":")
    return f"{placement.zone}.c.{name}{'.' + owner if owner else ''}.internal"
