"""What the mounts of a job need: the startup script's parameters on a VM, and what each service cannot mount. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from launch_train.common import contract
from launcher.catalog import MachineType
from launcher.errors import PlanRefused
from launcher.plan import names
from launcher.plan.model import Context, Placement
from launcher.spec.models import JobSpec, Mount


def parameters(spec: JobSpec) -> list[dict[str, Any]]:
    """Return the mounts as the startup script reads them."""
    return [
        {
            "kind": mount.kind.removesuffix("_gb"),
            "source": mount.source,
            "path": mount.folder,
            "read_only": mount.read_only,
        }
        for mount in spec.mounts
    ]


def mount_disks(spec: JobSpec, machine: MachineType, zone: str, labels: dict[str, str]) -> list[dict[str, Any]]:
    """Return the disks of the mounts. The startup script finds each by its device name, with the mount's number. Only
    new ones are deleted with the VM."""
    kms = spec.identity.kms_key
    disks = []
    for number, mount in enumerate(spec.mounts):
        disk = {
            "boot": False,
            "type": "PERSISTENT",
            "mode": "READ_ONLY" if mount.read_only else "READ_WRITE",
            "autoDelete": mount.disk is None,
            "deviceName": f"launch-mount-{number}",
        }
        if mount.disk:
            disks.append({**disk, "source": mount.disk})
        elif mount.new_disk_gb:
            params = {
                "diskType": f"zones/{zone}/diskTypes/{new_disk_type(mount, machine)}",
                "diskSizeGb": str(mount.new_disk_gb),
                "labels": labels,
            }
            encryption = {"diskEncryptionKey": {"kmsKeyName": kms}} if kms else {}
            disks.append({**disk, "initializeParams": params, **encryption})
    return disks


def new_disk_type(mount: Mount, machine: MachineType) -> str:
    return mount.new_disk_type or machine.boot_disk_default


def vertex_nfs(spec: JobSpec) -> list[dict[str, str]]:
    """Return the NfsMounts of a worker pool. Vertex AI mounts each at /mnt/nfs/mountPoint."""
    own = [{"server": mount.server, "path": mount.path, "mountPoint": mount.mount_point} for mount in spec.vertex.nfs]
    for mount in spec.mounts:
        if mount.nfs:
            server, _, path = mount.nfs.partition(":")
            own.append({"server": server, "path": path, "mountPoint": mount.folder.rpartition("/")[2]})
    return own


def vertex_lustre(spec: JobSpec) -> list[dict[str, str]]:
    """Return the LustreMounts of a worker pool. Vertex AI mounts each at /mnt/lustre/mountPoint."""
    own = [
        {
            "instanceIp": mount.instance_ip,
            "volumeHandle": mount.volume_handle,
            "filesystem": mount.filesystem,
            "mountPoint": mount.mount_point,
        }
        for mount in spec.vertex.lustre
    ]
    for mount in spec.mounts:
        if mount.lustre:
            ip, _, filesystem = mount.lustre.partition("@tcp:/")
            point = mount.folder.rpartition("/")[2]
            handle = mount.volume_handle or ""
            own.append({"instanceIp": ip, "volumeHandle": handle, "filesystem": filesystem, "mountPoint": point})
    return own


def check_vertex_mounts(spec: JobSpec) -> None:
    """Check that Vertex AI can mount everything where the spec wants it. Raises PlanRefused.

    Vertex AI has fixed folders: /gcs for all buckets, /mnt/nfs and /mnt/lustre for shares (aiplatform_v1.NfsMount,
    LustreMount). It reaches a share only through a network (Vertex AI, mount an NFS share).
    """
    is_connected = spec.identity.network or spec.identity.psc
    for index, mount in enumerate(spec.mounts):
        if mount.disk or mount.new_disk_gb:
            hint = (
                "Use launch vm SPEC --run; or on Vertex AI a bucket or an NFS share for data, and a larger boot disk\n"
                "for space: --set machine.boot_disk_gb=1000"
            )
            raise refusal(index, mount.kind, "Vertex AI cannot attach disks", hint)
        fixed = f"/gcs/{mount.bucket}" if mount.bucket else f"/mnt/{mount.kind}/{mount.folder.rpartition('/')[2]}"
        if mount.folder != fixed:
            problem = f"{mount.path} is not available on Vertex AI, which mounts it at {fixed}"
            raise refusal(index, "path", problem, f"Use {fixed}, in the script too: VMs mount it there as well.")
        if mount.lustre and not mount.volume_handle:
            hint = "Add volume_handle, the identifier of the Lustre volume, or use launch vm SPEC --run."
            raise refusal(index, "lustre", "volume_handle is required on Vertex AI, but missing", hint)
        if not mount.bucket and not is_connected:
            raise refusal(index, mount.kind, NO_NETWORK, NETWORK)
    for kind in ("nfs", "lustre"):
        if getattr(spec.vertex, kind) and not is_connected:
            raise PlanRefused(f"vertex.{kind}: {NO_NETWORK}", NETWORK, field=f"vertex.{kind}")


NO_NETWORK = "a share needs a network that Vertex AI is connected to"
NETWORK = "Set identity.network: projects/NUMBER/global/networks/NAME (peered), or identity.psc."


def check_vm_mounts(spec: JobSpec, context: Context) -> None:
    """Check that the disks of the mounts can be attached to all nodes, and that the bucket of the run folder is mounted
    if the program uses its path. Raises PlanRefused."""
    bucket = (spec.output or names.default_output(context.project)).removeprefix("gs://").partition("/")[0]
    if f"$({contract.RUN_PATH})" in repr((spec.run, spec.env)) and f"/gcs/{bucket}" not in [
        mount.folder for mount in spec.mounts
    ]:
        problem = f"run uses $({contract.RUN_PATH}), and gs://{bucket} is not mounted on the VM"
        raise PlanRefused(problem, f"Add it to the spec: mounts: [{{bucket: {bucket}}}]", field="run")
    for index, mount in enumerate(spec.mounts):
        if mount.disk and spec.machine.nodes > 1 and not mount.read_only:
            problem = f"{spec.machine.nodes} VMs can only share a disk that is read-only"
            hint = "Add read_only: true to it, or use --nodes 1. Several VMs can write to a bucket or an NFS share."
            raise refusal(index, "disk", problem, hint)


def check_zones(spec: JobSpec, placements: Sequence[Placement]) -> None:
    """Check that existing disks are in the zone of each attempt. Raises PlanRefused."""
    for index, mount in enumerate(spec.mounts):
        if mount.disk is None:
            continue
        _, zone, _, name = mount.disk.split("/")
        if other := next((placement.zone for placement in placements if placement.zone != zone), None):
            problem = f"{name} is in {zone}, but the job may run in {other}"
            raise refusal(
                index, "disk", problem, f"Use that zone alone: --region {zone.rpartition('-')[0]} --zone {zone}"
            )


def refusal(index: int, name: str, problem: str, hint: str) -> PlanRefused:
    """Return the error about a field of a mount."""
    return PlanRefused(f"mounts[{index}].{name}: {problem}", hint, field=f"mounts.{index}.{name}")
