"""What a spec says to one service alone: Vertex AI, or Compute Engine's VMs. See `launcher.spec.models`."""

# No `from __future__ import annotations`: here they are values that the reader looks at when launch starts, and as
# texts each of them would be compiled anew (2 ms a command).

from typing import Annotated, Literal

from msgspec import Meta

from launcher.spec.kinds import Duration, Model, MountPoint


class NfsMount(Model, frozen=True, kw_only=True):
    """An NFS share, seen at /mnt/nfs/<mount_point>."""

    server: str
    path: str
    mount_point: MountPoint


class LustreMount(Model, frozen=True, kw_only=True):
    """A Managed Lustre instance, seen at /mnt/lustre/<mount_point>."""

    instance_ip: str
    volume_handle: str
    filesystem: str
    mount_point: MountPoint


class ReductionServer(Model, frozen=True, kw_only=True):
    """Vertex's Reduction Server: CPU nodes that add up gradients, for several nodes on plain networks."""

    replicas: Annotated[int, Meta(ge=1, le=1000)]
    machine_type: str = "n1-highcpu-16"


class Vertex(Model, frozen=True, kw_only=True):
    """What only Vertex AI has."""

    tensorboard: (
        Annotated[
            str,
            Meta(
                pattern=r"^projects/[^/]+/locations/[^/]+/tensorboards/[^/]+$",
                description="a TensorBoard instance: projects/P/locations/L/tensorboards/ID",
            ),
        ]
        | None
    ) = None
    experiment: Annotated[str, Meta(description="name of a Vertex AI experiment in the job's region")] | None = None
    experiment_run: Annotated[str, Meta(description="the run's name in the experiment")] | None = None
    web_access: Annotated[bool, Meta(description="a shell in the running container, from the console")] = False
    dashboard_access: Annotated[bool, Meta(description="the dashboard of the running container")] = False
    persistent_resource: (
        Annotated[str, Meta(description="id of a persistent resource to run on: no wait for machines")] | None
    ) = None
    nfs: tuple[NfsMount, ...] = ()
    lustre: tuple[LustreMount, ...] = ()
    reduction_server: ReductionServer | None = None


class Vm(Model, frozen=True, kw_only=True):
    """What only Compute Engine VMs have."""

    image_family: Annotated[str, Meta(description="of deeplearning-platform-release")] | None = None
    image: (
        Annotated[
            str,
            Meta(
                pattern=r"^projects/[^/]+/global/images/(family/)?[^/]+$",
                description="projects/P/global/images/I, instead of a family",
            ),
        ]
        | None
    ) = None
    external_ip: Annotated[
        bool, Meta(description="left out: SSH goes through IAP, and the way out needs Cloud NAT")
    ] = False
    on_stop: Annotated[Literal["stop", "delete"], Meta(description="at the end of its time")] | None = None
    lease: (
        Annotated[
            Duration,
            Meta(description="a VM to work on stops itself so long after its start; can be moved up to limits.hours"),
        ]
        | None
    ) = None
    idle_stop: (
        Annotated[
            Duration,
            Meta(description="it stops itself when GPUs, CPUs and SSH were idle for so long (5m or more)"),
        ]
        | None
    ) = None
