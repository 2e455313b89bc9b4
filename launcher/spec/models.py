"""What a spec says, as frozen data. Every field has a default but `name` and `machine.type`.

Types and `Meta` bounds here are the single source of the checks (`launcher.spec.reader`), of the JSON Schema
(`launch schema`) and of the fields' meaning. Left out is `None` where the default depends on the target, the project
or the machine: the plan decides it there. What only one of the services has is in `launcher.spec.services`.
"""

# No `from __future__ import annotations`: here they are values that the reader looks at when launch starts, and as
# texts each of them would be compiled anew (2 ms a command).

from typing import Annotated, Any, Final, Literal

from msgspec import Meta, field

from launcher.spec.kinds import (
    Duration,
    EnvName,
    LabelKey,
    LabelValue,
    Model,
    Name,
    Provisioning,
    Region,
    SecretVersion,
    ServiceAccount,
    Zone,
)
from launcher.spec.services import Vertex, Vm


class Machine(Model, frozen=True, kw_only=True):
    """The machines of a run. All nodes are alike."""

    type: Annotated[
        str,
        Meta(
            description="a GPU (h100 h100-mega h200 b200 gb200 a100-80gb a100-40gb l4 rtx-pro-6000 t4 v100 p100 p4) "
            "or a machine type (a3-highgpu-2g)"
        ),
    ]
    gpus: Annotated[int, Meta(ge=1, le=16, description="GPUs on each node; a machine type brings its own")] | None = (
        None
    )
    nodes: Annotated[int, Meta(ge=1, le=1000, description="machines")] = 1
    accelerator: (
        Annotated[str, Meta(description="the GPU on a machine type that takes several kinds: t4 on n1-standard-8")]
        | None
    ) = None
    boot_disk_gb: Annotated[int, Meta(ge=100, le=64000, description="size of the boot disk")] | None = None
    boot_disk_type: (
        Annotated[
            Literal["pd-standard", "pd-balanced", "pd-ssd", "hyperdisk-balanced"],
            Meta(description="left out: the one that suits the machine"),
        ]
        | None
    ) = None
    local_ssds: (
        Annotated[
            int, Meta(ge=0, le=32, description="375 GiB local SSDs, on VMs where they don't come with the machine")
        ]
        | None
    ) = None


class Image(Model, frozen=True, kw_only=True):
    """The container. Either an image of your own (`uri`), or what launch puts together (the rest)."""

    uri: (
        Annotated[
            str,
            Meta(
                pattern=r"^[a-z0-9][A-Za-z0-9.:/_-]*@sha256:[0-9a-f]{64}$",
                description="an image that exists, pinned by its digest: HOST/NAME@sha256:…",
            ),
        ]
        | None
    ) = None
    repository: (
        Annotated[
            str,
            Meta(
                pattern=r"^([a-z]+[a-z0-9-]*-docker\.pkg\.dev/([a-z0-9.-]+/)?[a-z0-9.:-]+/[a-z][a-z0-9-]*"
                r"|([a-z]+\.)?gcr\.io/.+"
                r"|(localhost|127\.0\.0\.1):[0-9]+(/[a-z0-9]+([._-]+[a-z0-9]+)*)+)$",
                description="LOCATION-docker.pkg.dev/PROJECT/REPOSITORY (or localhost:PORT/NAME for trials); "
                "launch adds the image's name and tag",
            ),
        ]
        | None
    ) = None
    code: Annotated[str, Meta(description="the folder with your code, relative to the spec's file")] | None = None
    code_limit_mb: Annotated[int, Meta(ge=1, le=10_000, description="the most that image.code may be, in MB")] = 500
    requirements: Annotated[str, Meta(description="a requirements file, relative to the spec's file")] | None = None
    base: (
        Annotated[
            str,
            Meta(
                pattern=r"^[a-z0-9][A-Za-z0-9.:/_-]*@sha256:[0-9a-f]{64}$",
                description="a base image of your own, with Python 3.11 or later: HOST/NAME@sha256:…",
            ),
        ]
        | None
    ) = None
    torch: (
        Annotated[
            str,
            Meta(pattern=r"\.whl$", description="a PyTorch wheel of your own, relative to the spec's file"),
        ]
        | None
    ) = None
    wheel: (
        Annotated[
            Literal["cpu", "cu126", "cu130"],
            Meta(description="PyTorch's variant; left out: the one for the machine's GPU"),
        ]
        | None
    ) = None


BUILTIN: Final = "launch_train"
"""The module of the built-in trainer."""
OLD_BUILTIN: Final = "train"
"""Its old name, which still means the trainer unless the user's code has a program of that name."""


class Run(Model, frozen=True, kw_only=True):
    """What runs: one of `module`, `script` or `command` (default: the built-in trainer, `module: launch_train`)."""

    module: (
        Annotated[
            str,
            Meta(
                pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$",
                description="a module such as my_package.train, started as python -m",
            ),
        ]
        | None
    ) = None
    script: Annotated[str, Meta(description="a Python file, relative to image.code")] | None = None
    command: (
        Annotated[tuple[str, ...], Meta(min_length=1, description="a command, started once a node as it is")] | None
    ) = None
    args: Annotated[tuple[str, ...], Meta(description="what the program gets on its command line")] = ()
    config: Annotated[dict[str, Any], Meta(description="the built-in trainer's settings (docs/train.md)")] = field(
        default_factory=dict
    )
    launcher: (
        Annotated[
            Literal["torchrun", "python"],
            Meta(description="torchrun: one process a GPU (default); python: started once a node"),
        ]
        | None
    ) = None
    preflight: Annotated[
        Literal["off", "bench"],
        Meta(description="bench: each node measures its GPUs first, and makes way if they are far too slow"),
    ] = "off"

    hang_after: (
        Annotated[
            float,
            Meta(
                ge=1,
                le=604800,
                description="seconds without output or metrics after which a script or command is restarted (never)",
            ),
        ]
        | None
    ) = None

    @property
    def is_builtin(self) -> bool:
        """Whether the built-in trainer runs."""
        return not self.script and not self.command and self.module in (None, BUILTIN)


class Limits(Model, frozen=True, kw_only=True):
    """What the run may use up."""

    hours: (
        Annotated[
            float,
            Meta(ge=0.05, le=168, description="billed time of the whole run, over all attempts (24; a VM for SSH 12)"),
        ]
        | None
    ) = None
    usd: Annotated[float, Meta(gt=0, description="the plan is refused if the run could cost more")] | None = None
    price: Annotated[float, Meta(gt=0, description="USD per hour and node, where the catalog knows none")] | None = None
    restarts: Annotated[
        int, Meta(ge=0, le=100, description="restarts of failed processes without a new checkpoint in between")
    ] = 3
    wait: (
        Annotated[
            Duration,
            Meta(description="for machines, in each attempt (flex-start 6h, on VMs at most 2h; all others 1h)"),
        ]
        | None
    ) = None
    wait_total: (
        Annotated[Duration, Meta(description="for machines, over all attempts of the run (default: no limit)")] | None
    ) = None


class DnsPeering(Model, frozen=True, kw_only=True):
    """One DNS peering of a Private Service Connect interface."""

    domain: Annotated[str, Meta(pattern=r"^.+\.$", description="a domain that ends with a dot")]
    target_project: str
    target_network: str


class Psc(Model, frozen=True, kw_only=True):
    """A Private Service Connect interface (Vertex)."""

    network_attachment: str
    dns_peering: tuple[DnsPeering, ...] = ()


class Identity(Model, frozen=True, kw_only=True):
    """Who the job is, and which network and key it uses."""

    service_account: ServiceAccount | None = None
    network: (
        Annotated[
            str,
            Meta(description="Vertex: projects/NUMBER/global/networks/NAME (peered). VM: the network's name (default)"),
        ]
        | None
    ) = None
    subnetwork: Annotated[str, Meta(description="VM only")] | None = None
    reserved_ip_ranges: Annotated[tuple[str, ...], Meta(description="Vertex; goes with network")] = ()
    psc: Psc | None = None
    kms_key: (
        Annotated[
            str,
            Meta(
                pattern=r"^projects/[^/]+/locations/[^/]+/keyRings/[^/]+/cryptoKeys/[^/]+$",
                description="customer-managed encryption key in the job's region: "
                "projects/P/locations/L/keyRings/R/cryptoKeys/K",
            ),
        ]
        | None
    ) = None


class JobSpec(Model, frozen=True, kw_only=True):
    """One training job, or one VM to work on."""

    version: Annotated[int, Meta(ge=1, description="the spec's format (default: 1, the newest)")] = 1
    name: Annotated[Name, Meta(description="the run's id starts with it")]
    machine: Machine
    provisioning: Annotated[
        tuple[Provisioning, ...] | None,
        Meta(description="tried in this order; left out: what suits the machine and the service"),
    ] = None
    regions: Annotated[
        tuple[Region, ...] | Literal["any"] | None,
        Meta(description="tried in this order, or any: all that have the machine, cheapest first"),
    ] = None
    zones: Annotated[tuple[Zone, ...] | None, Meta(description="VMs: narrows the regions")] = None
    image: Image = Image()
    run: Run = Run()
    env: Annotated[
        dict[EnvName, str],
        Meta(max_length=80, description="environment variables; values are text as they are written"),
    ] = field(default_factory=dict)
    secrets: Annotated[
        dict[EnvName, SecretVersion], Meta(description="environment variable -> Secret Manager version")
    ] = field(default_factory=dict)
    output: Annotated[str, Meta(description="gs://BUCKET/PATH; for launch local also a folder")] | None = None
    limits: Limits = Limits()
    identity: Identity = Identity()
    labels: Annotated[
        dict[LabelKey, LabelValue], Meta(max_length=50, description="labels of the job and its machines")
    ] = field(default_factory=dict)
    vertex: Vertex = Vertex()
    vm: Vm = Vm()
