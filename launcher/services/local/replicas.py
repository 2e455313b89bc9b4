"""Compute the replicas that Vertex AI starts for a CustomJob, with their environment. Pure.

The variables that Vertex AI sets are in its documentation on distributed training; `$(NAME)` is expanded by Kubernetes'
rules.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from msgspec import Struct

from launch_train.common import contract
from launcher.plan.container import expand
from launcher.services.local.request import Container, ParsedJob, Pool


class ImageDefaults(Struct, frozen=True, kw_only=True):
    """An image's own environment and command, which the request may override."""

    env: dict[str, str]
    entrypoint: tuple[str, ...] = ("python", "-m", "launch_train.node")
    """Default: launch's image."""
    command: tuple[str, ...] = ()


class Replica(Struct, frozen=True, kw_only=True):
    """One container of the job."""

    name: str
    """As in Vertex AI's logs: workerpool0-0."""
    image: str
    argv: tuple[str, ...]
    env: dict[str, str]
    gpus: int


class Seat(Struct, frozen=True):
    """A replica's pool, its index there, and its address for the others."""

    pool: int
    index: int
    address: str


def replicas(
    job: ParsedJob, *, addresses: Sequence[str], job_id: str, image_defaults: Callable[[str], ImageDefaults]
) -> tuple[Replica, ...]:
    """Return all replicas of the job, primary first.

    addresses: `host:port` of each replica, in the order of the pools.
    image_defaults: Returns the defaults of an image (imageUri), which the request overrides.
    """
    seats = tuple(assign_seats(job.pools, addresses))
    images = (job.pools[seat.pool].container_spec.image_uri for seat in seats)
    return tuple(
        replica(job, seat, seats, job_id, image_defaults(image)) for seat, image in zip(seats, images, strict=True)
    )


def assign_seats(pools: Sequence[Pool], addresses: Sequence[str]) -> Iterator[Seat]:
    left = iter(addresses)
    for number, pool in enumerate(pools):
        for index in range(pool.replica_count):
            yield Seat(number, index, next(left))


def replica_names(pools: Sequence[Pool]) -> list[str]:
    """Return the names of all replicas, in the order of their seats."""
    return [f"workerpool{number}-{index}" for number, pool in enumerate(pools) for index in range(pool.replica_count)]


def replica(job: ParsedJob, seat: Seat, seats: Sequence[Seat], job_id: str, defaults: ImageDefaults) -> Replica:
    """Return one replica. Its environment is the image's, then Vertex AI's, then the request's, expanded in order."""
    pool = job.pools[seat.pool]
    container = pool.container_spec
    env = {**defaults.env, **platform_env(job, seat, seats, job_id)}
    for entry in container.env:
        env[entry.name] = expand(entry.value, env)
    return Replica(
        name=f"workerpool{seat.pool}-{seat.index}",
        image=container.image_uri,
        argv=argv(container, env, defaults),
        env=env,
        gpus=pool.machine_spec.accelerator_count,
    )


def argv(container: Container, env: Mapping[str, str], defaults: ImageDefaults) -> tuple[str, ...]:
    """Return a container's command line by Kubernetes' rules.

    The request's `command` replaces the image's ENTRYPOINT and CMD, its `args` replaces CMD only. The image's own
    words are not expanded.
    """
    command, args = (tuple(expand(word, env) for word in words) for words in (container.command, container.args))
    if not command:
        command = defaults.entrypoint
        args = args or defaults.command
    return (*command, *args)


def platform_env(job: ParsedJob, seat: Seat, seats: Sequence[Seat], job_id: str) -> dict[str, str]:
    """Return the variables that Vertex AI sets in every replica."""
    folders = {"AIP_MODEL_DIR": "model", "AIP_CHECKPOINT_DIR": "checkpoints", "AIP_TENSORBOARD_LOG_DIR": "logs"}
    return {
        contract.CLUSTER_SPEC: json.dumps(cluster_spec(job.raw, seat, seats)),
        contract.JOB_ID: job_id,
        **({name: f"{job.base}/{folder}/" for name, folder in folders.items()} if job.base else {}),
    }


def cluster_spec(raw: Mapping[str, Any], seat: Seat, seats: Sequence[Seat]) -> dict[str, Any]:
    """Return CLUSTER_SPEC as Vertex AI writes it, except that `environment` is "local"."""
    pools: dict[str, list[str]] = {}
    for one in seats:
        pools.setdefault(f"workerpool{one.pool}", []).append(one.address)
    return {
        "cluster": pools,
        "environment": "local",
        "task": {"type": f"workerpool{seat.pool}", "index": seat.index, "trial": "1"},
        "job": raw,
    }


def gpu_shares(all_replicas: Sequence[Replica], visible: Sequence[str]) -> list[tuple[str, ...]]:
    """Return each replica's share of the visible GPUs; all empty if there are too few for all."""
    left = iter(visible if sum(replica.gpus for replica in all_replicas) <= len(visible) else ())
    return [tuple(islice(left, replica.gpus)) for replica in all_replicas]
