"""What Vertex AI starts for a CustomJob, as data: one replica after the other, with its environment.

Pure, and told nothing but the request. What Vertex sets is in its documentation on distributed training; the
expansion of `$(NAME)` is Kubernetes' own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct

from launcher.errors import UsageError
from launcher.plan.container import expand
from train import contract

NODE_POOLS = 2
"""Pools 0 and 1 are nodes; 2 are reduction servers and 3 evaluators, whose images are not ours to rehearse."""


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


def replica_counts(request: Mapping[str, Any]) -> tuple[int, ...]:
    """Replicas in each pool that is rehearsed.

    Raises:
        UsageError: the request has no worker pools, or a pool without a container.
    """
    pools = pool_specs(request)
    if not pools:
        raise UsageError("the request has no jobSpec.workerPoolSpecs", "It must be a CustomJob as JSON.")
    for number, pool in enumerate(pools):
        if "containerSpec" not in pool:
            raise UsageError(f"worker pool {number} has no containerSpec", "launch rehearses containers only.")
    return tuple(int(pool.get("replicaCount", 1)) for pool in pools)


def pool_specs(request: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The worker pools that are nodes."""
    pools: Sequence[Mapping[str, Any]] = request.get("jobSpec", {}).get("workerPoolSpecs", [])
    return pools[:NODE_POOLS]


def replicas(
    request: Mapping[str, Any], *, addresses: Sequence[str], job_id: str, image_env: Mapping[str, str]
) -> tuple[Replica, ...]:
    """All replicas of the job, primary first.

    `addresses` are `host:port`, one for each replica in the order of the pools. `image_env` is what the image itself
    sets; the request's own environment beats it.
    """
    seats = tuple(seated(replica_counts(request), addresses))
    return tuple(replica(request, seat, seats, job_id, image_env) for seat in seats)


def seated(counts: Sequence[int], addresses: Sequence[str]) -> Iterator[Seat]:
    """A seat for each replica."""
    left = iter(addresses)
    for pool, count in enumerate(counts):
        for index in range(count):
            yield Seat(pool, index, next(left))


def replica(
    request: Mapping[str, Any], seat: Seat, seats: Sequence[Seat], job_id: str, image_env: Mapping[str, str]
) -> Replica:
    """One container: the image's environment, what Vertex sets, then the request's, expanded in its order."""
    pool = pool_specs(request)[seat.pool]
    container = pool["containerSpec"]
    env = {**image_env, **platform_env(request, seat, seats, job_id)}
    for entry in container.get("env", ()):
        env[entry["name"]] = expand(entry.get("value", ""), env)
    argv = (*container.get("command", ()), *container.get("args", ()))
    if not container.get("command"):
        argv = ("python", "-m", "train.node", *argv)  # the entrypoint of our image
    return Replica(
        name=f"workerpool{seat.pool}-{seat.index}",
        image=container.get("imageUri", ""),
        argv=tuple(expand(word, env) for word in argv),
        env=env,
        gpus=int(pool.get("machineSpec", {}).get("acceleratorCount", 0)),
    )


def platform_env(request: Mapping[str, Any], seat: Seat, seats: Sequence[Seat], job_id: str) -> dict[str, str]:
    """What Vertex sets in every replica."""
    job = request["jobSpec"]
    base = job.get("baseOutputDirectory", {}).get("outputUriPrefix", "").rstrip("/")
    folders = {"AIP_MODEL_DIR": "model", "AIP_CHECKPOINT_DIR": "checkpoints", "AIP_TENSORBOARD_LOG_DIR": "logs"}
    return {
        contract.CLUSTER_SPEC: json.dumps(cluster_spec(job, seat, seats)),
        contract.JOB_ID: job_id,
        **({name: f"{base}/{folder}/" for name, folder in folders.items()} if base else {}),
    }


def cluster_spec(job: Mapping[str, Any], seat: Seat, seats: Sequence[Seat]) -> dict[str, Any]:
    """CLUSTER_SPEC as Vertex writes it; `environment` says that this is a rehearsal."""
    pools: dict[str, list[str]] = {}
    for one in seats:
        pools.setdefault(f"workerpool{one.pool}", []).append(one.address)
    return {
        "cluster": pools,
        "environment": "local",
        "task": {"type": f"workerpool{seat.pool}", "index": seat.index, "trial": "1"},
        "job": job,
    }


def rebased(request: dict[str, Any], folder: str) -> dict[str, Any]:
    """The same request, writing its run folder below `folder` instead."""
    old = run_folder(request)
    if old is None:
        return request
    text = json.dumps(request).replace(json.dumps(old)[1:-1], json.dumps(f"{folder}/{old.rpartition('/')[2]}")[1:-1])
    moved: dict[str, Any] = json.loads(text)
    return moved


def run_folder(request: Mapping[str, Any]) -> str | None:
    """Where the job writes, without a trailing slash; None when the request doesn't say."""
    pools = pool_specs(request)
    env = {entry["name"]: entry.get("value", "") for entry in pools[0].get("containerSpec", {}).get("env", ())}
    base = request["jobSpec"].get("baseOutputDirectory", {}).get("outputUriPrefix", "")
    folder = str(env.get(contract.RUN_FOLDER) or base).rstrip("/")
    return folder or None


def sum_gpus(all_replicas: Sequence[Replica]) -> int:
    """GPUs that the whole job asks for."""
    return sum(one.gpus for one in all_replicas)
