"""Settings that apply to one target alone: Vertex AI, Compute Engine VMs, or this machine. See
`launcher.spec.models`."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import Meta

from launcher.spec.kinds import Duration, Model, MountPoint, matching


class NfsMount(Model, frozen=True, kw_only=True):
    """An NFS share, mounted at /mnt/nfs/<mount_point>."""

    server: Annotated[str, Meta(description="IP address of the NFS server")]
    path: Annotated[str, Meta(description="the path that the server exports, such as /share")]
    mount_point: MountPoint


class LustreMount(Model, frozen=True, kw_only=True):
    """A Managed Lustre instance, mounted at /mnt/lustre/<mount_point>."""

    instance_ip: Annotated[str, Meta(description="IP address of the Managed Lustre instance")]
    volume_handle: Annotated[str, Meta(description="the identifier of the Lustre volume")]
    filesystem: Annotated[str, Meta(description="name of the Lustre file system")]
    mount_point: MountPoint


class ReductionServer(Model, frozen=True, kw_only=True):
    """Vertex AI's Reduction Server: CPU nodes that sum the gradients of several nodes without a fast network."""

    replicas: Annotated[int, Meta(ge=1, le=1000, description="number of nodes that sum gradients")]
    machine_type: Annotated[str, Meta(description="their machine type (default: n1-highcpu-16)")] = "n1-highcpu-16"


class Local(Model, frozen=True, kw_only=True):
    """Settings that only `launch local` has. They never change a request or a run ID."""

    python: (
        Annotated[
            str,
            Meta(
                min_length=1,
                description="launch local: the Python that runs the job, such as .venv/bin/python, relative to the "
                "spec file (default: that of the active environment, else launch's own)",
            ),
        ]
        | None
    ) = None


NO_LOCAL: Final = Local()
"""The default, which a spec's text and digest leave out only if it is this object."""


class Vertex(Model, frozen=True, kw_only=True):
    """Settings that only Vertex AI has."""

    tensorboard: Annotated[
        str | None,
        matching(
            r"^projects/[^/]+/locations/[^/]+/tensorboards/[^/]+$",
            "a TensorBoard instance: projects/P/locations/L/tensorboards/ID",
        ),
    ] = None
    experiment: Annotated[str | None, Meta(description="name of a Vertex AI experiment in the job's region")] = None
    experiment_run: Annotated[str | None, Meta(description="name of the run in the experiment")] = None
    web_access: Annotated[bool, Meta(description="allow a shell in the running container from the console")] = False
    dashboard_access: Annotated[bool, Meta(description="allow access to the dashboard of the running container")] = (
        False
    )
    persistent_resource: Annotated[
        str | None, Meta(description="ID of a persistent resource to run on, without waiting for machines")
    ] = None
    nfs: tuple[NfsMount, ...] = ()
    lustre: tuple[LustreMount, ...] = ()
    reduction_server: ReductionServer | None = None


class Vm(Model, frozen=True, kw_only=True):
    """Settings that only Compute Engine VMs have."""

    image_family: Annotated[
        str | None, Meta(description="boot image: a family of deeplearning-platform-release; default: by GPU")
    ] = None
    image: Annotated[
        str | None,
        matching(
            r"^projects/[^/]+/global/images/(family/)?[^/]+$",
            "boot image instead of a family: projects/P/global/images/I",
        ),
    ] = None
    external_ip: Annotated[
        bool, Meta(description="give the VM an external IP; without one, SSH uses IAP and egress needs Cloud NAT")
    ] = False
    dense_reservation: Annotated[
        bool, Meta(description="the reservation of provisioning has deploymentType DENSE or is in calendar mode")
    ] = False
    on_stop: Annotated[
        Literal["stop", "delete"] | None,
        Meta(description="what happens when its time ends (default: delete for a run, stop for a VM to work on)"),
    ] = None
    lease: (
        Annotated[
            Duration,
            Meta(description="a VM to work on stops itself this long after its start; extendable up to limits.hours"),
        ]
        | None
    ) = None
    idle_stop: (
        Annotated[
            Duration,
            Meta(description="a VM to work on stops itself after GPUs, CPUs and SSH were idle this long (5m or more)"),
        ]
        | None
    ) = None
