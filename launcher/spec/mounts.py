"""What a job's container sees besides its image: buckets, network shares and disks. See `launcher.spec.models`."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import Meta

from launcher.spec.kinds import ZONE, Model, matching

SOURCES: Final = ("bucket", "nfs", "lustre", "disk", "new_disk_gb")
"""The fields of a mount that say what is mounted: one of them is set."""
SYSTEM: Final = ("/bin", "/boot", "/dev", "/etc", "/lib", "/lib64", "/proc", "/run", "/sbin", "/sys", "/usr")
"""Folders of the image and of the kernel, in which nothing is mounted."""
CODE: Final = "/workspace"
"""The folder of the image that holds the code; a mount may be inside it, not in its place."""
OCCUPIED: Final = (CODE, "/opt", "/opt/venv", "/opt/launch", "/mnt/localssd")
"""Folders in whose place nothing is mounted: a mount would hide the image's own, or the VM mounts it itself."""


class Mount(Model, frozen=True, kw_only=True):
    """A folder of the job's container whose content is not in its image."""

    bucket: Annotated[
        str | None,
        matching(
            r"^[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]$",
            "a bucket's name, without gs://; on VMs mounted with Cloud Storage FUSE",
        ),
    ] = None
    nfs: Annotated[
        str | None,
        matching(
            r"^[A-Za-z0-9][A-Za-z0-9.-]{0,252}:(/[A-Za-z0-9._-]{1,255})+$",
            "an NFS share such as Filestore's: SERVER:/SHARE",
        ),
    ] = None
    lustre: Annotated[
        str | None,
        matching(
            r"^[0-9]{1,3}(\.[0-9]{1,3}){3}@tcp:/[A-Za-z0-9_-]{1,64}$",
            "a Managed Lustre instance, by its mount point: IP@tcp:/FILESYSTEM",
        ),
    ] = None
    volume_handle: (
        Annotated[str, Meta(min_length=1, description="Vertex AI only: the identifier of the Lustre volume")] | None
    ) = None
    disk: Annotated[
        str | None,
        matching(
            rf"^zones/{ZONE}/disks/[a-z]([a-z0-9-]{{0,61}}[a-z0-9])?$",
            "VMs only: an existing disk with a file system, zones/ZONE/disks/NAME; it is kept",
        ),
    ] = None
    new_disk_gb: (
        Annotated[
            int,
            Meta(ge=10, le=64000, description="VMs only: size in GB of a new, empty disk of each VM, deleted with it"),
        ]
        | None
    ) = None
    new_disk_type: Annotated[
        Literal["pd-standard", "pd-balanced", "pd-ssd", "hyperdisk-balanced"] | None,
        Meta(description="type of the new disk; default: the boot disk's default"),
    ] = None
    path: Annotated[
        str | None,
        matching(
            r"^(/[A-Za-z0-9_-][A-Za-z0-9._-]{0,62}){1,8}$",
            "the folder in the container, such as /data; default of a bucket: /gcs/BUCKET, as on Vertex AI",
        ),
    ] = None
    read_only: Annotated[bool, Meta(description="VMs only: the job cannot write to it")] = False

    @property
    def kind(self) -> str:
        """Return the field that says what is mounted."""
        return next(name for name in SOURCES if getattr(self, name) is not None)

    @property
    def source(self) -> str:
        """Return what is mounted."""
        return f"a new disk of {self.new_disk_gb} GB" if self.new_disk_gb else str(getattr(self, self.kind))

    @property
    def folder(self) -> str:
        """Return the folder in the container."""
        return self.path or f"/gcs/{self.bucket}"
