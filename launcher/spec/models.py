"""The spec's settings as frozen data. Only `name` (the reader takes the file's) and `machine.type` have no default.

The types and `Meta` bounds here are the single source of the checks (`launcher.spec.reader`), of the JSON Schema
(`launch schema`) and of the reference in docs/spec.md. A default is `None` if it depends on the target, the project or
the machine; the plan then resolves it. Settings of one service alone are in `launcher.spec.services`.
"""

# No `from __future__ import annotations`: the reader evaluates the annotations whenever launch starts, and compiling
# each of them from a string costs 2 ms per command.

from typing import Annotated, Any, Final, Literal

from msgspec import Meta, field

from launcher.spec.kinds import (
    Duration,
    EnvName,
    Event,
    LabelKey,
    LabelValue,
    Model,
    Name,
    Provisioning,
    Region,
    Repository,
    SecretVersion,
    ServiceAccount,
    ShellLine,
    Webhook,
    Zone,
    matching,
)
from launcher.spec.mounts import Mount
from launcher.spec.services import NO_LOCAL, Local, Vertex, Vm


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
OLD_BUILTIN: Final = "train"
"""Its former name, which still selects the trainer unless the user's code has a program of that name."""


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
