"""The spec's settings as frozen data. Only `name` (the reader takes the file's) and `machine.type` have no default.

The types and `Meta` bounds here are the single source of the checks (`launcher.spec.reader`), of the JSON Schema
(`launch schema`) and of the reference in docs/spec.md. A default is `None` if it depends on the target, the project or
the machine; the plan then resolves it.
"""

# No `from __future__ import annotations`: the reader evaluates the annotations whenever launch starts, and compiling
# each of them from a string costs 2 ms per command.

from typing import Annotated, Any, Final, Literal

from msgspec import Meta, field

from launcher.spec.kinds import (
    ZONE,
    ContainerImage,
    ContainerMount,
    Duration,
    EnvName,
    Event,
    LabelKey,
    LabelValue,
    Model,
    MountPoint,
    Name,
    Provisioning,
    Region,
    Repository,
    SbatchOption,
    SecretVersion,
    ServiceAccount,
    ShellLine,
    SlurmName,
    Webhook,
    Zone,
    matching,
)


class Machine(Model, frozen=True, kw_only=True):
    """The machines of a run. All nodes of an attempt have the same type."""

    type: Annotated[
        str | tuple[str, ...],
        Meta(
            description="a GPU (h100 h100-mega h200 b200 gb200 a100-80gb a100-40gb l4 rtx-pro-6000 t4 v100 p4) "
            "or a machine type (a3-highgpu-2g); of several, the cheapest for the run is tried first (Vertex AI)"
        ),
    ]
    gpus: Annotated[int, Meta(ge=1, le=16, description="GPUs per node; default: all of the machine type's")] | None = (
        None
    )
    nodes: Annotated[int, Meta(ge=1, le=1000, description="number of machines")] = 1
    accelerator: Annotated[
        str | None, Meta(description="the GPU, for machine types that take several kinds: t4 on n1-standard-8")
    ] = None
    gpu_memory_gb: (
        Annotated[
            float,
            Meta(
                gt=0,
                description="GPU memory in GB that each process may use, set by the trainer and by "
                "launch_train.init() (default: all)",
            ),
        ]
        | None
    ) = None
    boot_disk_gb: Annotated[int, Meta(ge=100, le=64000, description="size of the boot disk in GB")] | None = None
    boot_disk_type: Annotated[
        Literal["pd-standard", "pd-balanced", "pd-ssd", "hyperdisk-balanced"] | None,
        Meta(description="type of the boot disk; default: by machine type"),
    ] = None
    local_ssds: (
        Annotated[
            int,
            Meta(ge=0, le=32, description="VMs only: local SSDs of 375 GiB each, if the machine type includes none"),
        ]
        | None
    ) = None

    @property
    def types(self) -> tuple[str, ...]:
        """The names in `type`, in the spec's order."""
        return (self.type,) if isinstance(self.type, str) else self.type


class Image(Model, frozen=True, kw_only=True):
    """The container image: an existing one (`uri`), or one that launch builds (all other settings)."""

    uri: Annotated[
        str | None,
        matching(
            r"^[a-z0-9][A-Za-z0-9.:/_-]*@sha256:[0-9a-f]{64}$",
            "an existing image, pinned by digest: HOST/NAME@sha256:…",
        ),
    ] = None
    repository: Repository | None = None
    code: Annotated[str | None, Meta(description="the folder with your code, relative to the spec file")] = None
    code_limit_mb: Annotated[int, Meta(ge=1, le=10_000, description="maximum size of image.code in MB")] = 500
    allow_secrets: Annotated[
        tuple[str, ...],
        Meta(description="files of image.code that are sent although they look like secrets; * matches anything"),
    ] = ()
    requirements: Annotated[
        str | None,
        Meta(
            description="a requirements file, pyproject.toml, uv.lock or conda environment.yml, relative to the "
            "spec file; it may name torch"
        ),
    ] = None
    base: Annotated[
        str | None,
        matching(
            r"^[a-z0-9][A-Za-z0-9.:/_-]*(:[A-Za-z0-9_][A-Za-z0-9_.-]*|@sha256:[0-9a-f]{64})$",
            "a custom base image: HOST/NAME:TAG or, pinned, HOST/NAME@sha256:…",
        ),
    ] = None
    dockerfile: Annotated[
        str | None,
        Meta(
            description="a Dockerfile of the base image, relative to the spec file; built with BuildKit, and with "
            "image.code as its context"
        ),
    ] = None
    torch: Annotated[
        str | None,
        matching(
            r"\.whl$|^base$", "a custom PyTorch wheel (.whl), relative to the spec file; base: the base image's own"
        ),
    ] = None
    wheel: Annotated[
        Literal["cpu", "cu118", "cu121", "cu124", "cu126", "cu128", "cu129", "cu130", "cu132"] | None,
        Meta(description="the PyTorch variant; default: by GPU"),
    ] = None
    python: Annotated[
        str | None,
        matching(
            r"^3\.(1[0-9])$", "a Python that the image gets besides the base's own, such as 3.11; default: the base's"
        ),
    ] = None
    build_secrets: Annotated[
        tuple[EnvName, ...],
        Meta(
            description="variables of this shell that pip sees while it installs, such as the token of a private "
            "index; the image does not contain them"
        ),
    ] = ()
    setup: Annotated[
        tuple[ShellLine, ...],
        Meta(
            description="shell lines, run as root when the image is built: those of apt at the beginning before the "
            "packages are installed, the others after them"
        ),
    ] = ()

    @property
    def is_custom(self) -> bool:
        """Return whether the image may contain packages and files that launch doesn't know."""
        return bool(self.uri or self.base or self.dockerfile or self.setup)


BUILTIN: Final = "launch_train"
"""Module of the built-in trainer."""


class ScriptMetrics(Model, frozen=True, kw_only=True):
    """Metrics of a script that doesn't use launch_train.metrics."""

    regex: (
        Annotated[
            str,
            Meta(
                max_length=1000,
                description="found in a line of output, it gives a row of metrics: the group (?P<step>…), and one "
                "named group per value (docs/scripts.md)",
            ),
        ]
        | None
    ) = None
    tensorboard: (
        Annotated[
            str,
            Meta(
                min_length=1,
                description="a folder in which the script writes TensorBoard event files, relative to its working "
                "directory: they are uploaded to the run folder, and their scalars are metrics",
            ),
        ]
        | None
    ) = None


class Run(Model, frozen=True, kw_only=True):
    """The program: one of `module`, `script` or `command` (default: the built-in trainer, `module: launch_train`)."""

    module: Annotated[
        str | None,
        matching(r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$", "a module such as my_package.train, started with python -m"),
    ] = None
    script: Annotated[str | None, Meta(description="a Python file, relative to image.code")] = None
    command: (
        Annotated[tuple[str, ...], Meta(min_length=1, description="a command, started unchanged once per node")] | None
    ) = None
    args: Annotated[tuple[str, ...], Meta(description="command-line arguments of the program")] = ()
    config: Annotated[dict[str, Any], Meta(description="settings of the built-in trainer (docs/train.md)")] = field(
        default_factory=dict
    )
    launcher: Annotated[
        Literal["torchrun", "python"] | None,
        Meta(description="torchrun: one process per GPU (default); python: one process per node"),
    ] = None
    node: Annotated[
        Literal["append", "none"] | None,
        Meta(
            description="for image.uri: append adds launch's node to the image as a layer; none starts the image's "
            "own entrypoint (or run.command) without it (default: the image contains the node)"
        ),
    ] = None
    preflight: Annotated[
        Literal["off", "bench"],
        Meta(description="bench: each node measures its GPUs first, and exits if they are far too slow"),
    ] = "off"

    hang_after: (
        Annotated[
            float,
            Meta(
                ge=1,
                le=604800,
                description="seconds without output or metrics after which a script or command is restarted "
                "(default: never)",
            ),
        ]
        | None
    ) = None

    metrics: ScriptMetrics | None = None

    resume_glob: (
        Annotated[
            str,
            Meta(
                min_length=1,
                description="a pattern of the checkpoints that a script writes itself; {step}: its step (default: the "
                "last number in the name; docs/scripts.md)",
            ),
        ]
        | None
    ) = None
    resume_args: (
        Annotated[
            tuple[str, ...],
            Meta(
                min_length=1,
                description="arguments that the program gets besides args if such a checkpoint exists; {path}, {step}: "
                "the newest one's",
            ),
        ]
        | None
    ) = None

    loggers: (
        Annotated[
            tuple[Literal["tensorboard", "wandb", "mlflow", "vertex"], ...],
            Meta(
                description="where launch_train.metrics sends a script's rows besides the run folder (default: "
                "tensorboard; docs/loggers.md)"
            ),
        ]
        | None
    ) = None

    @property
    def is_builtin(self) -> bool:
        """Return whether the program is the built-in trainer."""
        return self.node != "none" and not self.script and not self.command and self.module in (None, BUILTIN)


class Limits(Model, frozen=True, kw_only=True):
    """Limits on time, cost, restarts and waiting."""

    hours: (
        Annotated[
            float,
            Meta(
                ge=0.05,
                le=168,
                description="billed hours of the run, over all attempts (default: 24; a VM to work on: 12)",
            ),
        ]
        | None
    ) = None
    usd: (
        Annotated[float, Meta(gt=0, description="maximum cost in USD: a run that could cost more is not started")]
        | None
    ) = None
    price: (
        Annotated[float, Meta(gt=0, description="USD per hour and node, used if the catalog has no price")] | None
    ) = None
    restarts: Annotated[
        int, Meta(ge=0, le=100, description="maximum restarts of failed processes without a new checkpoint in between")
    ] = 3
    wait: (
        Annotated[
            Duration,
            Meta(
                description="maximum wait for machines in each attempt (default: flex-start 6h, on VMs 2h; others 1h)"
            ),
        ]
        | None
    ) = None
    wait_total: (
        Annotated[Duration, Meta(description="maximum wait for machines over all attempts (default: no limit)")] | None
    ) = None


class Notify(Model, frozen=True, kw_only=True):
    """A webhook that the job calls, once for each event of the run."""

    webhook: Webhook
    on: Annotated[tuple[Event, ...], Meta(min_length=1, description="the events that are sent")] = (
        "preempted",
        "failed",
        "finished",
        "stalled",
    )
    format: Annotated[
        Literal["json", "slack"], Meta(description="the message: all its fields, or a text for Slack")
    ] = "json"


class DnsPeering(Model, frozen=True, kw_only=True):
    """A DNS peering of a Private Service Connect interface."""

    domain: Annotated[str, matching(r"^.+\.$", "a domain with a dot at its end")]
    target_project: Annotated[str, Meta(description="the project with the target network")]
    target_network: Annotated[str, Meta(description="the VPC network in which names of the domain are resolved")]


class Psc(Model, frozen=True, kw_only=True):
    """A Private Service Connect interface (Vertex AI only)."""

    network_attachment: Annotated[
        str, Meta(description="Vertex AI only: a network attachment, projects/P/regions/R/networkAttachments/NAME")
    ]
    dns_peering: tuple[DnsPeering, ...] = ()


class Identity(Model, frozen=True, kw_only=True):
    """The job's service account, network and encryption key."""

    service_account: ServiceAccount | None = None
    network: Annotated[
        str | None,
        Meta(
            description="Vertex AI: the peered network, projects/NUMBER/global/networks/NAME; VMs: the network's "
            "name (default: default)"
        ),
    ] = None
    subnetwork: Annotated[str | None, Meta(description="VMs only: name of the subnetwork")] = None
    reserved_ip_ranges: Annotated[
        tuple[str, ...], Meta(description="Vertex AI only: reserved ranges of the peered network")
    ] = ()
    psc: Psc | None = None
    kms_key: Annotated[
        str | None,
        matching(
            r"^projects/[^/]+/locations/[^/]+/keyRings/[^/]+/cryptoKeys/[^/]+$",
            "a customer-managed encryption key in the job's region: projects/P/locations/L/keyRings/R/cryptoKeys/K",
        ),
    ] = None


# --- Mounts: what a job's container sees besides its image ------------------------------------------------------------

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
        return f"a new disk of {self.new_disk_gb} GB" if self.new_disk_gb else str(getattr(self, self.kind))

    @property
    def folder(self) -> str:
        return self.path or f"/gcs/{self.bucket}"


# --- Settings of one target alone: Vertex AI, Compute Engine VMs, or this machine -------------------------------------


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


class Slurm(Model, frozen=True, kw_only=True):
    """Settings of a Slurm cluster, for `launch slurm`. They never change a run ID."""

    login: (
        Annotated[
            str, Meta(min_length=1, description="the login node, as ssh knows it (default: sbatch on this machine)")
        ]
        | None
    ) = None
    partition: SlurmName | None = None
    account: SlurmName | None = None
    gpu_type: (
        Annotated[
            str,
            matching(
                r"^[A-Za-z0-9_.-]*$",
                'the cluster\'s name of the GPU (default: that of machine.type, such as h100; "": any GPU)',
            ),
        ]
        | None
    ) = None
    hours: (
        Annotated[
            float,
            Meta(ge=0.05, description="time of one Slurm job; a longer run is queued again (default: limits.hours)"),
        ]
        | None
    ) = None
    options: Annotated[
        tuple[SbatchOption, ...], Meta(description="further options of sbatch: [--qos=long, --cpus-per-gpu=8]")
    ] = ()
    container: ContainerImage | None = None
    mounts: Annotated[tuple[ContainerMount, ...], Meta(description="folders there that the container sees")] = ()


NO_SLURM: Final = Slurm()
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


# --- The spec ---------------------------------------------------------------------------------------------------------


class JobSpec(Model, frozen=True, kw_only=True):
    """A training job, or a VM to work on."""

    version: Annotated[int, Meta(ge=1, description="the spec's format (default: 1, the newest)")] = 1
    name: Annotated[Name, Meta(description="run IDs start with it; default: the spec file's name")]
    machine: Machine
    provisioning: Annotated[
        tuple[Provisioning, ...] | None,
        Meta(description="provisioning models in fallback order; default: those of the machine, cheapest first"),
    ] = None
    regions: Annotated[
        tuple[Region, ...] | Literal["any"] | None,
        Meta(description="regions in fallback order; any: all that have the machine, cheapest first"),
    ] = None
    zones: Annotated[tuple[Zone, ...] | None, Meta(description="VMs: restricts the regions to these zones")] = None
    image: Image = Image()
    run: Run = Run()
    env: Annotated[
        dict[EnvName, str],
        Meta(max_length=80, description="environment variables; values are text, exactly as written"),
    ] = field(default_factory=dict)
    secrets: Annotated[
        dict[EnvName, SecretVersion], Meta(description="environment variable -> Secret Manager version")
    ] = field(default_factory=dict)
    output: Annotated[
        str | None, Meta(description="where runs are stored: gs://BUCKET/PATH; for launch local also a folder")
    ] = None
    mounts: Annotated[
        tuple[Mount, ...], Meta(description="data that the job's container sees as folders (docs/data.md)")
    ] = ()
    limits: Limits = Limits()
    notify: Notify | None = None
    identity: Identity = Identity()
    labels: Annotated[dict[LabelKey, LabelValue], Meta(max_length=50, description="labels of the job and its VMs")] = (
        field(default_factory=dict)
    )
    vertex: Vertex = Vertex()
    vm: Vm = Vm()
    local: Local = NO_LOCAL
    slurm: Slurm = NO_SLURM
