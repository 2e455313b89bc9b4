"""A replica as a container: its settings, as data. Pure.

As Vertex AI runs it, as far as it shows from inside: the image's user code and packages, the names of CLUSTER_SPEC, a
large /dev/shm, SIGTERM to PID 1. What is this machine's own comes by mounts at the same path: the run folder, and the
file with the credentials.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Any, Final, NamedTuple, TypeGuard
from urllib.parse import urlsplit

from msgspec import Struct

from launch_train.common.loopback import is_loopback
from launcher.errors import UsageError
from launcher.rehearsal.on_host import ENDPOINTS
from launcher.rehearsal.replicas import Own, Replica, shares
from launcher.rehearsal.request import Job

LABEL: Final = "launch.job"
"""On all that is made for a job, with the job's id: what a killed launch leaves is found by it."""
PORT: Final = 2222
"""The port that CLUSTER_SPEC names for every replica on Vertex AI."""
HOST: Final = "host"
"""The network of this machine itself, in Docker's words."""
SHM: Final = 16 << 30
"""The most that /dev/shm may hold, in bytes: as much as a large machine gives. It takes memory when it is used only."""
CREDENTIALS: Final = (
    "GOOGLE_APPLICATION_CREDENTIALS",
    "CLOUDSDK_AUTH_ACCESS_TOKEN_FILE",
    "CLOUDSDK_AUTH_CREDENTIAL_FILE_OVERRIDE",
)
"""Variables that name a file of this machine."""


class Machine(Struct, frozen=True, kw_only=True):
    """The engine's machine, and whoever asks the engine."""

    memory: int
    """In bytes."""
    user: str
    """`uid:gid` under which a container writes files that are ours."""
    gpus: tuple[str, ...] = ()
    """Those that a container can be given, by index or by name."""


class Image(Struct, frozen=True, kw_only=True):
    """An image that the engine has."""

    id: str
    platform: str
    own: Own
    group: str = ""
    """Of the image's user, for containers that run as another user: a script writes beside its code."""


class Mount(NamedTuple):
    """A folder or a file of this machine, at the same path in the container."""

    path: str
    writable: bool


class Settings(Struct, frozen=True, kw_only=True):
    """One container."""

    name: str
    """The replica's, which is its name in the job's network, too."""
    job: str
    image: str
    """By its id, so that all replicas have the same one."""
    platform: str
    """The image's: linux/amd64."""
    argv: tuple[str, ...]
    env: dict[str, str]
    network: str
    """The job's own, or HOST."""
    shm: int
    user: str = ""
    """Empty: the image's own."""
    group: str = ""
    """A further group of that user; empty: none."""
    gpus: tuple[str, ...] = ()
    mounts: tuple[Mount, ...] = ()

    @property
    def title(self) -> str:
        """Its name among all containers of the engine: two jobs may run beside each other."""
        return f"launch-{self.job}-{self.name}"


def settings(
    replicas: Sequence[Replica],
    images: Mapping[str, Image],
    *,
    job_id: str,
    network: str,
    machine: Machine,
    endpoints: Mapping[str, str],
    mounts: tuple[Mount, ...],
) -> list[Settings]:
    """A container for each replica. `images` are those that their references mean now, `endpoints` come below each
    one's own environment."""
    return [
        Settings(
            name=one.name,
            job=job_id,
            image=images[one.image].id,
            platform=images[one.image].platform,
            argv=one.argv,
            # A runtime that hands all GPUs to every container must not hand out some that were left to others.
            env={**endpoints, **one.env, **({} if share else {"CUDA_VISIBLE_DEVICES": ""})},
            network=network,
            shm=min(SHM, machine.memory // 2),
            user=machine.user if mounts else "",
            group=images[one.image].group,
            gpus=share,
            mounts=mounts,
        )
        for one, share in zip(replicas, shares(replicas, machine.gpus), strict=True)
    ]


def image(inspected: Mapping[str, Any], user: str) -> Image:
    """An image by what the engine's inspection says of it, for containers that run as `user` (empty: as its own)."""
    parts = (inspected.get("Os", "linux"), inspected["Architecture"], inspected.get("Variant", ""))
    group = (inspected["Config"].get("User") or "").partition(":")[2] if user else ""
    return Image(
        id=inspected["Id"],
        platform="/".join(filter(None, parts)),
        own=own(inspected["Config"], user),
        group=group,
    )


def own(config: Mapping[str, Any], user: str) -> Own:
    """What an image sets, and runs when the request doesn't say.

    A user whom the image doesn't know has no home there, nor a name: PyTorch asks for both when it compiles.
    """
    env = dict(entry.split("=", 1) for entry in config.get("Env") or () if "=" in entry)
    if user and user.partition(":")[0] not in ("0", (config.get("User") or "").partition(":")[0]):
        env |= {"HOME": "/tmp", "USER": "launch"}  # noqa: S108 -- the container's, which goes with it
    return Own(env=env, entrypoint=tuple(config.get("Entrypoint") or ()), command=tuple(config.get("Cmd") or ()))


def places(job: Job) -> list[str]:
    """The endpoints among what the request itself sets."""
    entries = (entry for pool in job.pools for entry in pool.container_spec.env)
    return [entry.value for entry in entries if entry.name.startswith(ENDPOINTS)]


def is_native(platform: str, architecture: str) -> bool:
    """Whether a machine (`uname -m`, as the engine says it) runs programs for `platform` (linux/amd64) itself."""
    names = {"x86_64": "amd64", "aarch64": "arm64", "armv7l": "arm"}
    return platform.split("/")[1] == names.get(architecture, architecture)


def folders(job: Job) -> list[str]:
    """The folders of this machine that the job writes to, without those inside another.

    Raises:
        UsageError: one of them is relative, so that in a container it is another.
    """
    named = {place.removeprefix("file://").rstrip("/") for place in (job.run_folder, job.base) if is_local(place)}
    for one in named:
        if not PurePath(one).is_absolute():
            raise UsageError(
                f"the job writes to {one}, which is no whole path: in a container that is another folder",
                "Write the path from / on, or move the run folder: --output DIR",
            )
    return sorted(one for one in named if not any(PurePath(other) in PurePath(one).parents for other in named))


def is_local(place: str | None) -> TypeGuard[str]:
    """Whether an output is a folder of this machine; there may be none."""
    return bool(place) and ("://" not in str(place) or str(place).startswith("file://"))


def is_here(engine: str) -> bool:
    """Whether an engine is on this machine, by the address that Docker's SDK has for it: a pipe has one, too."""
    return is_loopback(engine) or urlsplit(engine).hostname == "localnpipe"


def network(job_id: str, places: Iterable[str]) -> str:
    """The job's own network, or this machine's where one of the `places` that it speaks to listens on loopback.

    A server that is bound to 127.0.0.1 alone can't be reached from another network, by no name.
    """
    return HOST if any(map(is_loopback, places)) else f"launch-{job_id}"
