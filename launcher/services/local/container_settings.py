"""Compute the settings of a replica's container. Pure.

From the inside it looks as on Vertex AI: the image's code and packages, the host names in CLUSTER_SPEC, a large
/dev/shm, SIGTERM to PID 1. The run folder and the credentials are mounted from this machine at the same paths.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Any, Final, NamedTuple, TypeGuard
from urllib.parse import urlsplit

from msgspec import Struct

from launch_train.common.loopback import is_loopback
from launcher.errors import UsageError
from launcher.services.local.on_host import ENDPOINTS
from launcher.services.local.replicas import ImageDefaults, Replica, gpu_shares
from launcher.services.local.request import ParsedJob

LABEL: Final = "launch.job"
"""The label of a job's containers and network; its value is the job's id. It finds what a killed launch left."""
PORT: Final = 2222
"""The port that CLUSTER_SPEC names for every replica on Vertex AI."""
HOST: Final = "host"
"""Docker's name for this machine's own network."""
SHM: Final = 16 << 30
"""Upper bound for the size of /dev/shm in bytes, as on a large machine. Only used space takes memory."""
CREDENTIALS: Final = (
    "GOOGLE_APPLICATION_CREDENTIALS",
    "CLOUDSDK_AUTH_ACCESS_TOKEN_FILE",
    "CLOUDSDK_AUTH_CREDENTIAL_FILE_OVERRIDE",
)
"""Variables that name a file on this machine."""


class EngineHost(Struct, frozen=True, kw_only=True):
    """The engine's machine and our user on it."""

    memory: int
    """In bytes."""
    user: str
    """The `uid:gid` in a container that writes files as our user."""
    gpus: tuple[str, ...] = ()
    """GPUs for containers, by index or name."""


class Image(Struct, frozen=True, kw_only=True):
    """An image in the engine."""

    id: str
    platform: str
    defaults: ImageDefaults
    group: str = ""
    """The group of the image's user. A container that runs as another user needs it to write beside its code."""


class Mount(NamedTuple):
    """A folder or file of this machine, mounted at the same path in the container."""

    path: str
    writable: bool


class Settings(Struct, frozen=True, kw_only=True):
    """The settings of one container."""

    name: str
    """The replica's name; also its host name in the job's network."""
    job: str
    image: str
    """The id, so that all replicas run the same image."""
    platform: str
    """The image's platform, for example linux/amd64."""
    argv: tuple[str, ...]
    env: dict[str, str]
    network: str
    """The job's own network, or HOST."""
    shm: int
    user: str = ""
    """Empty: the image's user."""
    group: str = ""
    """An additional group of that user; empty: none."""
    gpus: tuple[str, ...] = ()
    mounts: tuple[Mount, ...] = ()


def settings(
    replicas: Sequence[Replica],
    images: Mapping[str, Image],
    *,
    job_id: str,
    network: str,
    machine: EngineHost,
    endpoints: Mapping[str, str],
    mounts: tuple[Mount, ...],
) -> list[Settings]:
    """Return the container settings of each replica. `images`: by image reference; `endpoints`: the environment below
    each replica's own."""
    return [
        Settings(
            name=replica.name,
            job=job_id,
            image=images[replica.image].id,
            platform=images[replica.image].platform,
            argv=replica.argv,
            # Some runtimes give all GPUs to every container: hide them from a replica without a share.
            env={**endpoints, **replica.env, **({} if share else {"CUDA_VISIBLE_DEVICES": ""})},
            network=network,
            shm=min(SHM, machine.memory // 2),
            user=machine.user if mounts else "",
            group=images[replica.image].group,
            gpus=share,
            mounts=mounts,
        )
        for replica, share in zip(replicas, gpu_shares(replicas, machine.gpus), strict=True)
    ]


def image(inspected: Mapping[str, Any], user: str) -> Image:
    """Parse the engine's description of an image, for containers that run as `user` (empty: the image's user)."""
    parts = (inspected.get("Os", "linux"), inspected["Architecture"], inspected.get("Variant", ""))
    group = (inspected["Config"].get("User") or "").partition(":")[2] if user else ""
    return Image(
        id=inspected["Id"],
        platform="/".join(filter(None, parts)),
        defaults=image_defaults(inspected["Config"], user),
        group=group,
    )


def image_defaults(config: Mapping[str, Any], user: str) -> ImageDefaults:
    """Return the environment and command in an image's config.

    A user that the image does not know has no home and no name there. PyTorch needs both when it compiles.
    """
    env = dict(entry.split("=", 1) for entry in config.get("Env") or () if "=" in entry)
    if user and user.partition(":")[0] not in ("0", (config.get("User") or "").partition(":")[0]):
        env |= {"HOME": "/tmp", "USER": "launch"}  # noqa: S108 -- the container's own /tmp
    entrypoint, command = config.get("Entrypoint") or (), config.get("Cmd") or ()
    return ImageDefaults(env=env, entrypoint=tuple(entrypoint), command=tuple(command))


def endpoint_values(job: ParsedJob) -> list[str]:
    """Return the endpoints that the request's environment sets."""
    entries = (entry for pool in job.pools for entry in pool.container_spec.env)
    return [entry.value for entry in entries if entry.name.startswith(ENDPOINTS)]


def is_native(platform: str, architecture: str) -> bool:
    """Return whether a machine (`uname -m`, as reported by the engine) runs `platform` (linux/amd64) natively."""
    names = {"x86_64": "amd64", "aarch64": "arm64", "armv7l": "arm"}
    return platform.split("/")[1] == names.get(architecture, architecture)


def output_folders(job: ParsedJob) -> list[str]:
    """Return the local folders that the job writes to, without those inside another one.

    Raises UsageError: a path is relative, which means another folder in a container.
    """
    paths = {place.removeprefix("file://").rstrip("/") for place in (job.run_folder, job.base) if is_local(place)}
    for path in paths:
        if not PurePath(path).is_absolute():
            raise UsageError(
                f"the job writes to {path}, a relative path: in a container that is another folder",
                "Use an absolute path, or choose the run folder: --output DIR",
            )
    return sorted(path for path in paths if not any(PurePath(other) in PurePath(path).parents for other in paths))


def is_local(place: str | None) -> TypeGuard[str]:
    """Return whether an output exists and is a local folder."""
    return bool(place) and ("://" not in str(place) or str(place).startswith("file://"))


def is_here(engine: str) -> bool:
    """Return whether an engine is on this machine, by its address in Docker's SDK (a named pipe has one too)."""
    return is_loopback(engine) or urlsplit(engine).hostname == "localnpipe"


def network(job_id: str, endpoints: Iterable[str]) -> str:
    """Return the name of the job's own network, or HOST if one of its endpoints listens on loopback: a server on
    127.0.0.1 can't be reached from another network."""
    return HOST if any(map(is_loopback, endpoints)) else f"launch-{job_id}"
