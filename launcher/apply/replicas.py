"""What Vertex AI starts for a CustomJob, as data: one replica after the other, with its environment.

Pure, and told nothing but the request. What Vertex sets is in its documentation on distributed training; the
expansion of `$(NAME)` is Kubernetes' own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct

from launcher.apply.requests import Job, Pool
from launcher.plan.container import expand
from train import contract


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


def replicas(job: Job, *, addresses: Sequence[str], job_id: str, image_env: Mapping[str, str]) -> tuple[Replica, ...]:
    """All replicas of the job, primary first.

    `addresses` are `host:port`, one for each replica in the order of the pools. `image_env` is what the image itself
    sets; the request's own environment beats it.
    """
    seats = tuple(seated(job.pools, addresses))
    return tuple(replica(job, seat, seats, job_id, image_env) for seat in seats)


def seated(pools: Sequence[Pool], addresses: Sequence[str]) -> Iterator[Seat]:
    """A seat for each replica."""
    left = iter(addresses)
    for number, pool in enumerate(pools):
        for index in range(pool.replica_count):
            yield Seat(number, index, next(left))


def replica(job: Job, seat: Seat, seats: Sequence[Seat], job_id: str, image_env: Mapping[str, str]) -> Replica:
    """One container: the image's environment, what Vertex sets, then the request's, expanded in its order."""
    pool = job.pools[seat.pool]
    container = pool.container_spec
    env = {**image_env, **platform_env(job, seat, seats, job_id)}
    for entry in container.env:
        env[entry.name] = expand(entry.value, env)
    argv = (*container.command, *container.args)
    if not container.command:
        argv = ("python", "-m", "train.node", *argv)  # the entrypoint of our image
    return Replica(
        name=f"workerpool{seat.pool}-{seat.index}",
        image=container.image_uri,
        argv=tuple(expand(word, env) for word in argv),
        env=env,
        gpus=pool.machine_spec.accelerator_count,
    )


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
