"""What Vertex AI starts for a CustomJob, as data: one replica after the other, with its environment.

Pure, and told nothing but the request. What Vertex sets is in its documentation on distributed training; the
expansion of `$(NAME)` is Kubernetes' own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from msgspec import Struct

from launch_train.common import contract
from launcher.plan.container import expand
from launcher.rehearsal.request import Container, Job, Pool


class Own(Struct, frozen=True, kw_only=True):
    """What an image itself says: its environment, and what it runs when the request doesn't."""

    env: dict[str, str]
    entrypoint: tuple[str, ...] = ("python", "-m", "launch_train.node")
    """Left out: that of our image."""
    command: tuple[str, ...] = ()


class Replica(Struct, frozen=True, kw_only=True):
    """One container of the job."""

    name: str
    """As in Vertex's logs: workerpool0-0."""
    image: str
    argv: tuple[str, ...]
    env: dict[str, str]
    gpus: int


class Seat(Struct, frozen=True):
    """Where a replica is: its pool, its index there, and the address that the others reach it at."""

    pool: int
    index: int
    address: str


def replicas(job: Job, *, addresses: Sequence[str], job_id: str, own: Callable[[str], Own]) -> tuple[Replica, ...]:
    """All replicas of the job, primary first.

    `addresses` are `host:port`, one for each replica in the order of the pools. `own` tells what an image (its
    imageUri) says itself; the request's own environment beats it.
    """
    seats = tuple(seated(job.pools, addresses))
    return tuple(
        replica(job, seat, seats, job_id, own(job.pools[seat.pool].container_spec.image_uri)) for seat in seats
    )


def seated(pools: Sequence[Pool], addresses: Sequence[str]) -> Iterator[Seat]:
    """A seat for each replica."""
    left = iter(addresses)
    for number, pool in enumerate(pools):
        for index in range(pool.replica_count):
            yield Seat(number, index, next(left))


def named(pools: Sequence[Pool]) -> list[str]:
    """The names of all replicas, in the order of their seats."""
    return [f"workerpool{number}-{index}" for number, pool in enumerate(pools) for index in range(pool.replica_count)]


def replica(job: Job, seat: Seat, seats: Sequence[Seat], job_id: str, own: Own) -> Replica:
    """One container: the image's environment, what Vertex sets, then the request's, expanded in its order."""
    pool = job.pools[seat.pool]
    container = pool.container_spec
    env = {**own.env, **platform_env(job, seat, seats, job_id)}
    for entry in container.env:
        env[entry.name] = expand(entry.value, env)
    return Replica(
        name=f"workerpool{seat.pool}-{seat.index}",
        image=container.image_uri,
        argv=argv(container, env, own),
        env=env,
        gpus=pool.machine_spec.accelerator_count,
    )


def argv(container: Container, env: Mapping[str, str], own: Own) -> tuple[str, ...]:
    """The request's `command` takes the place of the image's ENTRYPOINT and CMD, its `args` that of CMD alone.

    Kubernetes' rule. What the image says itself is not expanded.
    """
    command, args = (tuple(expand(word, env) for word in words) for words in (container.command, container.args))
    if not command:
        command = own.entrypoint
        args = args or own.command
    return (*command, *args)


def platform_env(job: Job, seat: Seat, seats: Sequence[Seat], job_id: str) -> dict[str, str]:
    """What Vertex sets in every replica."""
    folders = {"AIP_MODEL_DIR": "model", "AIP_CHECKPOINT_DIR": "checkpoints", "AIP_TENSORBOARD_LOG_DIR": "logs"}
    return {
        contract.CLUSTER_SPEC: json.dumps(cluster_spec(job.raw, seat, seats)),
        contract.JOB_ID: job_id,
        **({name: f"{job.base}/{folder}/" for name, folder in folders.items()} if job.base else {}),
    }


def cluster_spec(raw: Mapping[str, Any], seat: Seat, seats: Sequence[Seat]) -> dict[str, Any]:
    """CLUSTER_SPEC as Vertex writes it; `environment` says that this is a rehearsal."""
    pools: dict[str, list[str]] = {}
    for one in seats:
        pools.setdefault(f"workerpool{one.pool}", []).append(one.address)
    return {
        "cluster": pools,
        "environment": "local",
        "task": {"type": f"workerpool{seat.pool}", "index": seat.index, "trial": "1"},
        "job": raw,
    }


def sum_gpus(all_replicas: Sequence[Replica]) -> int:
    """GPUs that the whole job asks for."""
    return sum(one.gpus for one in all_replicas)


def shares(all_replicas: Sequence[Replica], visible: Sequence[str]) -> list[tuple[str, ...]]:
    """Each replica's own of the visible GPUs; none for any of them when there aren't enough for all."""
    left = iter(visible if sum_gpus(all_replicas) <= len(visible) else ())
    return [tuple(islice(left, one.gpus)) for one in all_replicas]
