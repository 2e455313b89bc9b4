"""A plan as data, and the context that it is made from."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from launcher.catalog import Gpu, MachineType

Target = Literal["vertex", "vm", "local"]


class Frozen(Struct, frozen=True, kw_only=True):
    """The base of all plan data."""


class Content(Frozen, frozen=True, kw_only=True):
    """A set of files, by content. The digest is the same whatever the files' times, order or owner."""

    digest: str
    files: int = 0
    size: int = 0


EMPTY = Content(digest="")


class Context(Frozen, frozen=True, kw_only=True):
    """All that a plan needs to know of the world; `launcher.cli.gather` gathers it."""

    target: Target
    project: str
    owner: str
    version: str
    default_regions: tuple[str, ...] = ()
    """From gcloud's own settings; used when the spec names none."""
    recipe: Content = EMPTY
    """The Dockerfile and the locks: what the dependency image is made by."""
    trainer: Content = EMPTY
    """The package launch_train."""
    base: str = ""
    """The recipe's base image, with its digest where it is known."""
    code: Content = EMPTY
    requirements: Content = EMPTY
    torch: Content = EMPTY
    """The spec's own PyTorch wheel."""
    secret_files: tuple[str, ...] = ()
    """Files of the code's folder that hold secrets, and so are left out of the image."""
    elsewhere: tuple[str, ...] = ()
    """The user's own functions (MODULE:FUNCTION) whose modules are no files of the code."""
    ignored: tuple[str, ...] = ()
    """Files that the script or its arguments name and that the image won't have: NAME (WHERE)."""
    outside: tuple[str, ...] = ()
    """Relative paths of the script or its arguments that lead out of the code's folder: PATH (WHERE)."""
    grown: str = ""
    """By how much the code has grown since the job's newest run on this machine, with its largest new files."""
    unread: tuple[str, ...] = ()
    """A warning for each file of the code that this machine's Python can't parse and the image's may."""
    code_warnings: tuple[str, ...] = ()
    """What the code and its settings name that the job's machine won't have."""
    run_id: str | None = None
    training: bool = True
    """False: a VM to work on over SSH."""
    allow_default_account: bool = False
    """Somebody wants the VM to act as the default compute service account."""
    cloud_here: bool = False
    """The cloud is played on this machine, so that a registry here is where it pulls from."""
    startup: str = ""
    """The text of the startup script; VMs only."""


class Image(Frozen, frozen=True, kw_only=True):
    """The container image. `uri` becomes its digest once it is in the registry: apply fills that in, and with it the
    plan's own digest (launcher.plan.binding), and nothing else."""

    uri: str
    pinned: bool
    """True: `uri` is a digest, and a real launch sends it as it is."""
    dependencies: str
    """Everything but the code and our package, as an image of its own, by a tag that is a hash of its content; empty
    for an image of the user's own, as is `base`."""
    base: str
    platform: str
    wheel: str
    """The CUDA variant of the PyTorch wheel, such as cu126, or cpu."""
    min_driver: str | None
    files: int = 0
    size: int = 0
    """Of the user's code, in bytes."""


class Attempt(Frozen, frozen=True, kw_only=True):
    """One request that may be sent. The next is tried when this one is refused or waits too long."""

    region: str
    zone: str | None
    machine_type: str
    provisioning: str
    usd_per_hour: float | None
    """Of one node. None is unknown."""
    usd_approx: bool
    """True: derived by a stated rule, not a listed price."""
    usd_is_bound: bool = False
    """True: the rule gives at least the true price."""
    usd_ceiling: float | None = None
    """The highest expected price of a node and hour, compared with `limits.usd`. None is unknown."""
    usd_ceiling_rule: str = ""
    usd_hard_bound: float | None = None
    """The highest possible price."""
    usd_extras: dict[str, float] = {}
    """USD per node and hour of what the plan creates in addition: the boot disk, an external address."""
    shutdown_seconds: int = 0
    """Seconds that may be billed after the time limit, until the machine is off."""
    service_restarts: int = 0
    """How often the service itself may restart the job."""
    wait_seconds: int | None = None
    """How long it may wait for machines. None: no limit."""
    usd_rule: str
    """How the price came about, in words."""
    usd_excludes: tuple[str, ...]
    """What is billed beside it."""
    request: dict[str, Any]
    """The JSON body: a CustomJob (Vertex), or an Instance (Compute Engine; of several nodes the body of
    instances.bulkInsert, which makes all or none)."""

    @property
    def where(self) -> str:
        """Its zone, or its region where Google chooses the zone."""
        return self.zone or self.region


class Container(Frozen, frozen=True, kw_only=True):
    """The part of a request that is about processes, the same on every node."""

    command: tuple[str, ...]
    args: tuple[str, ...]
    env: dict[str, str]


class Chosen(Frozen, frozen=True, kw_only=True):
    """The machine of each node. `machine` is None in a rehearsal with a shape that Google doesn't sell."""

    machine: MachineType | None
    gpu: Gpu
    gpus: int


class Place(Frozen, frozen=True, kw_only=True):
    """Where one attempt is made, and how: a region, and on Compute Engine one zone of it."""

    provisioning: str
    region: str
    zone: str | None = None

    @property
    def name(self) -> str:
        """The zone, or the region where Google chooses the zone."""
        return self.zone or self.region


class Shared(Frozen, frozen=True, kw_only=True):
    """What all attempts of a plan have in common. `image` and `container` are None for a VM to work on."""

    run: str
    run_folder: str | None
    labels: dict[str, str]
    image: Image | None
    container: Container | None
    hours: float
    mtbf_hours: float | None = None
    """Between two interruptions of the whole run, where it is interrupted most often. None is unknown."""


class PlannedLimits(Frozen, frozen=True, kw_only=True):
    """What the run may use up, resolved."""

    hours: float
    usd: float | None
    usd_at_most: float | None
    """(ceiling + extras) x nodes x (hours + shutdown) of the most expensive attempt, compared with `usd`. None is
    unknown."""
    usd_expected: float | None = None
    """The same by the expected prices."""
    usd_hard_bound: float | None = None
    """The most that the run can cost: by the hard bounds, with the full hours for each of the service's restarts."""
    restarts: int
    wait_seconds: int | None
    """For machines, in one attempt: the longest of all attempts. None: no limit."""
    wait_total_seconds: int | None = None
    """For machines, over all attempts of the run. None: no limit."""
    wait_at_most_seconds: int | None = None
    """What all attempts may wait together until the run first has machines."""


class Gpus(Frozen, frozen=True, kw_only=True):
    """The machine that was chosen, in figures for people."""

    machine_type: str
    gpu: str
    gpus: int
    gpu_memory_gb: int | None
    vcpus: int | None
    memory_gb: float | None
    nodes: int


class Plan(Frozen, frozen=True, kw_only=True):
    """Everything that apply needs, and nothing that it must decide."""

    run: str
    target: Target
    project: str
    run_folder: str | None
    machine: Gpus
    image: Image | None
    """None for a VM to work on: it boots a Deep Learning VM image, named in the request."""
    command: tuple[str, ...]
    """What runs on each node."""
    attempts: tuple[Attempt, ...]
    limits: PlannedLimits
    warnings: tuple[str, ...]
    spec: dict[str, Any]
    """The spec as it was read, flags applied; secrets are references."""
    version: int = 1
    """Format of the run folder that holds this plan."""
