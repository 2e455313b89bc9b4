"""A plan as data, and the context that it is built from."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from launcher.catalog import Gpu, MachineType

Target = Literal["vertex", "vm", "local", "on"]
"""Vertex AI, VMs on Compute Engine, this machine, a host that is reached by SSH."""


class Frozen(Struct, frozen=True, kw_only=True):
    """Base class of all plan data."""


class Content(Frozen, frozen=True, kw_only=True):
    """The content of a set of files. The digest does not depend on the files' times, order or owner."""

    digest: str
    files: int = 0
    size: int = 0


EMPTY = Content(digest="")


class Requirement(Frozen, frozen=True, kw_only=True):
    """A package of `image.requirements` that must fit PyTorch's build."""

    name: str
    """Normalised: flash-attn."""
    specifier: str = ""
    """Without a build: ==2.9.1 of torch==2.9.1+cu128."""
    build: str = ""
    url: str = ""
    text: str = ""
    where: str = ""
    """FILE:LINE."""
    arch: Literal["", "amd64", "arm64"] = ""
    """The architecture whose machines need it; empty: every one."""


class LocalProject(Frozen, frozen=True, kw_only=True):
    """A project of this machine that image.requirements installs, such as `-e .`; its files are the image's code."""

    folder: str
    """A full path."""
    where: str
    """FILE:LINE."""
    name: str = ""
    """Its name in a uv.lock."""


class Packages(Frozen, frozen=True, kw_only=True):
    """The packages in `image.requirements` that need more than `pip install` in an image's recipe."""

    tool: Literal["pip", "uv", "conda"] = "pip"
    named: tuple[Requirement, ...] = ()
    """PyTorch, and the packages that are built for a release of it."""
    index_build: str = ""
    """The build that an index of PyTorch's own (…/whl/cu128) or a package of conda (pytorch-cuda=12.8) names."""
    index_where: str = ""
    hashed: bool = False
    """pip checks hashes, so the file lists every package, PyTorch included if anything needs it."""
    git: bool = False
    """Packages come from git repositories."""
    loggers: tuple[str, ...] = ()
    """Clients of loggers (launcher.plan.validate)."""
    extras: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    """Dependency groups. Like `extras`, only those of a uv.lock: those of a pyproject.toml are in its text."""
    projects: tuple[LocalProject, ...] = ()
    requires_python: str = ""
    """The project's requires-python."""


class Torch(Frozen, frozen=True, kw_only=True):
    """The PyTorch that an image gets in place of the recipe's own."""

    version: str
    build: str
    index: str = ""
    """Empty: PyPI."""
    companions: dict[str, str] = {}
    """Package -> its release for this one (torchvision: 0.24.1)."""


class Context(Frozen, frozen=True, kw_only=True):
    """Everything that a plan depends on besides spec and catalog; collected by `launcher.inputs.gather`."""

    target: Target
    project: str
    owner: str
    """gcloud's account, or the user of this machine. Part of the run id."""
    version: str
    owner_label: str = ""
    """The value of the owner label (plan.owner); empty: no label."""
    default_regions: tuple[str, ...] = ()
    """From gcloud's settings; used if the spec names no regions."""
    recipe: Content = EMPTY
    """The Dockerfile and the lock files that the dependency image is built from."""
    trainer: Content = EMPTY
    """The package launch_train."""
    locks: Content = EMPTY
    """The lock files of a recipe that is made for one spec (launcher.plan.recipe)."""
    own_base: Content = EMPTY
    """The user's Dockerfile, with the code if it copies files from it."""
    base: str = ""
    """The recipe's base image, with its digest if known."""
    code: Content = EMPTY
    installed: Content = EMPTY
    """The metadata and programs of the code's projects."""
    requirements: Content = EMPTY
    packages: Packages = Packages()
    torch: Content = EMPTY
    """The spec's PyTorch wheel."""
    driver: int | None = None
    """The driver branch of a host that is known by now."""
    code_warnings: tuple[str, ...] = ()
    """Why the user's code will probably fail on the job's machine."""
    run_id: str | None = None
    training: bool = True
    """False: a VM to work on over SSH."""
    allow_default_account: bool = False
    """--allow-default-service-account was given."""
    is_local_cloud: bool = False
    """The API endpoint is a test server on this machine, which can pull from a registry on this machine."""
    startup: str = ""
    """The text of the startup script; VMs only."""
    mount_script: str = ""
    """The part of the startup script that only jobs with mounts need."""


class Image(Frozen, frozen=True, kw_only=True):
    """The container image. Once the image is pushed, `uri` and the plan's own digest (launcher.plan.binding) are
    replaced; nothing else in a plan changes."""

    uri: str
    pinned: bool
    """True: `uri` has a digest, and a launch sends it unchanged."""
    dependencies: str
    """A separate image with everything but the code and launch_train; its tag is a hash of its content. Like `base`,
    empty for an existing image (image.uri)."""
    base: str
    platform: str
    wheel: str
    """The CUDA variant of the PyTorch wheel, such as cu126, or cpu."""
    min_driver: str | None
    files: int = 0
    size: int = 0
    """Of the user's code, in bytes."""
    torch: Torch | UnsetType = UNSET
    """Unset: the recipe's own."""
    builds_base: bool | UnsetType = UNSET
    """True: `base` is built first, from the user's Dockerfile."""
    appends_node: bool | UnsetType = UNSET
    """True: the dependency image is `base`, an existing image, with the node's packages on top."""
    build_secrets: tuple[str, ...] | UnsetType = UNSET
    """Names of variables that the build sees, in memory only."""
    dockerfile: str | UnsetType = UNSET
    """The recipe that was made for this spec (launcher.plan.recipe). Unset: containers/train.Dockerfile."""

    @property
    def build_arguments(self) -> dict[str, str]:
        """The recipe's arguments. One that was made for this spec names its PyTorch itself."""
        return {"BASE": self.base, **({} if self.dockerfile else {"WHEEL": self.wheel})}


class ImageContents(Frozen, frozen=True, kw_only=True):
    """The contents of an image, as far as its registry shows them (launcher.images.inspect). Empty: unknown."""

    platform: str
    python: str = ""
    torch: str = ""
    build: str = ""
    """CUDA as PyTorch names it: cu128."""
    has_node: bool | None = None


class Gpus(Frozen, frozen=True, kw_only=True):
    """The machines of an attempt, for display."""

    machine_type: str
    gpu: str
    gpus: int
    gpu_memory_gb: int | None
    vcpus: int | None
    memory_gb: float | None
    nodes: int


class Attempt(Frozen, frozen=True, kw_only=True):
    """One request in the fallback order. The next one follows if this one is refused or waits too long."""

    region: str
    zone: str | None
    machine_type: str
    machine: Gpus | UnsetType = UNSET
    """Its machines, if they are not the plan's: see `Plan.machine_of`."""
    provisioning: str
    usd_per_hour: float | None
    """Per node; None: unknown."""
    usd_approx: bool
    """True: derived by a stated rule, not a listed price."""
    usd_is_bound: bool = False
    """True: an upper bound of the true price."""
    usd_ceiling: float | None = None
    """The highest expected price of a node and hour, compared with `limits.usd`; None: unknown."""
    usd_ceiling_rule: str = ""
    usd_hard_bound: float | None = None
    """The highest possible price."""
    usd_extras: dict[str, float] = {}
    """USD per node and hour of additional resources: the boot disk, an external address."""
    shutdown_seconds: int = 0
    """Maximum seconds billed after the time limit, until the machine is off."""
    service_restarts: int = 0
    """Maximum restarts of the job by the service itself."""
    wait_seconds: int | None = None
    """Maximum wait for machines; None: no limit."""
    ends: str | UnsetType = UNSET
    """RFC 3339: the end of its calendar reservation, when Google ends its VMs. The preflight reads it."""
    usd_rule: str
    """Derivation of the price, in words."""
    usd_excludes: tuple[str, ...]
    """Items that are billed in addition."""
    request: dict[str, Any]
    """The JSON body: a CustomJob (Vertex AI) or an Instance (Compute Engine). For several VMs it is the body of
    instances.bulkInsert, which creates all or none."""

    @property
    def where(self) -> str:
        """The zone, or the region if Google chooses the zone."""
        return self.zone or self.region


class Container(Frozen, frozen=True, kw_only=True):
    """Command, arguments and environment: the same on every node."""

    command: tuple[str, ...]
    args: tuple[str, ...]
    env: dict[str, str]


class Chosen(Frozen, frozen=True, kw_only=True):
    """The machine of each node. `machine` is None in a rehearsal with a GPU count that Google does not offer."""

    machine: MachineType | None
    gpu: Gpu
    gpus: int

    @property
    def name(self) -> str:
        """The machine type."""
        return self.machine.name if self.machine else "this machine"


class Placement(Frozen, frozen=True, kw_only=True):
    """The placement of one attempt: machine, provisioning model and region, and on Compute Engine also the zone."""

    chosen: Chosen
    provisioning: str
    region: str
    zone: str | None = None

    @property
    def name(self) -> str:
        """The zone, or the region if Google chooses the zone."""
        return self.zone or self.region


class Shared(Frozen, frozen=True, kw_only=True):
    """Properties that all attempts of a plan share; those of one machine type also share the `container`. It and
    `image` are None for a VM to work on."""

    run: str
    run_folder: str | None
    labels: dict[str, str]
    image: Image | None
    container: Container | None
    hours: float
    mtbf_hours: float | None = None
    """Mean hours between two interruptions of the run, in the worst attempt; None: unknown."""


class PlannedLimits(Frozen, frozen=True, kw_only=True):
    """The run's limits, with defaults resolved."""

    hours: float
    usd: float | None
    usd_at_most: float | None
    """(ceiling + extras) x nodes x (hours + shutdown) of the most expensive attempt, compared with `usd`; None:
    unknown."""
    hours_expected: float | None = None
    """Hours of training by the estimate, without start and interruptions; None: unknown."""
    hours_basis: str = ""
    """Source of `hours_expected`, or the reason why it is unknown."""
    usd_expected: float | None = None
    """Expected cost of the first attempt: start, training and interruptions at its expected price; None: unknown."""
    usd_hard_bound: float | None = None
    """Upper bound of the cost: the highest possible prices, and the full hours again for each restart by the
    service."""
    restarts: int
    wait_seconds: int | None
    """The longest wait for machines of all attempts; None: no limit."""
    wait_total_seconds: int | None = None
    """limits.wait_total: maximum wait for machines over all attempts of the run; None: no limit."""
    wait_at_most_seconds: int | None = None
    """The longest that all attempts together can wait until the run first has machines."""


class UsedPrices(Frozen, frozen=True, kw_only=True):
    """The price table of a plan: its day, and a digest of its content. `shipped`: it came with launch."""

    date: str
    digest: str
    shipped: bool


class Plan(Frozen, frozen=True, kw_only=True):
    """Everything that a launch does; executing it leaves nothing to decide."""

    run: str
    target: Target
    project: str
    run_folder: str | None
    machine: Gpus
    """The machine of the attempts that name no other. All have the same number of nodes, and of GPUs on each."""
    image: Image | None
    """None for a VM to work on: it boots the Deep Learning VM image in the request."""
    command: tuple[str, ...]
    """The command line on each node."""
    attempts: tuple[Attempt, ...]
    limits: PlannedLimits
    warnings: tuple[str, ...]
    spec: dict[str, Any]
    """The spec with the flags applied. Secrets are references."""
    prices: UsedPrices | UnsetType = UNSET
    """Unset for a run on this machine, and in plans of older versions."""
    version: int = 1
    """Format of the run folder that holds this plan."""

    @property
    def is_slurm(self) -> bool:
        """Return whether the job is queued in the Slurm of a host."""
        return "script" in self.attempts[0].request

    def machine_of(self, attempt: Attempt) -> Gpus:
        return attempt.machine or self.machine

    @property
    def machines(self) -> tuple[Gpus, ...]:
        """The machines of all attempts, in fallback order."""
        return tuple(dict.fromkeys(map(self.machine_of, self.attempts)))
