"""Parse CLUSTER_SPEC into a `Cluster`: the machines of a run, and which one this is. Pure.

Vertex AI gives every replica the same CLUSTER_SPEC but for `task`. Pool 0 (one replica) and pool 1 (workers) are nodes;
pool 2 (reduction servers) and pool 3 (evaluators) are not. Node 0 is the only replica of pool 0.
https://cloud.google.com/vertex-ai/docs/training/distributed-training#cluster-variables
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from launch_train.common.errors import UsageError

PORT: Final = 2222
"""The port that CLUSTER_SPEC names for every replica on Vertex; used when only RANK and MASTER_ADDR are known."""

_NODE_POOLS: Final = ("workerpool0", "workerpool1")
_OTHER_POOLS: Final = {"workerpool2": "a reduction server", "workerpool3": "an evaluator"}


class ClusterError(UsageError):
    """CLUSTER_SPEC, or the variables used instead of it, are invalid. One line."""


class NotANodeError(ClusterError):
    """This replica is a reduction server or an evaluator, which must not run launch_train.node."""


@dataclass(frozen=True)
class Cluster:
    """The machines of a run.

    `nodes`: `host:port` by rank, empty where unknown (only node 0's is needed). `node`: the index of this machine.
    `cloud`: the platform is Vertex AI. `rehearsal`: this machine stands in for it. Neither: a host, or a Slurm cluster.
    """

    nodes: tuple[str, ...]
    node: int
    cloud: bool = False
    rehearsal: bool = False

    @property
    def size(self) -> int:
        """Number of nodes."""
        return len(self.nodes)

    @property
    def host(self) -> str:
        """Node 0's host name."""
        return self.nodes[0].rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """The port of node 0 that the platform reserves for the job."""
        return int(self.nodes[0].rpartition(":")[2])


def parse_cluster(cluster_spec: str | None, environ: Mapping[str, str]) -> Cluster:
    """Return the cluster of CLUSTER_SPEC's text, or of `environ` if that is empty.

    Raises ClusterError, and NotANodeError on a replica of pool 2 or 3.
    """
    if not cluster_spec:
        return _from_environ(environ)
    try:
        spec = _mapping(json.loads(cluster_spec), "CLUSTER_SPEC")
    except (ValueError, RecursionError) as error:
        raise ClusterError(f"CLUSTER_SPEC is not JSON: {error}") from error
    pools = _mapping(spec.get("cluster"), "CLUSTER_SPEC's cluster")
    primary, workers = (_hosts(pools, pool) for pool in _NODE_POOLS)
    if len(primary) != 1:
        raise ClusterError(f"CLUSTER_SPEC: workerpool0 has {len(primary)} replicas; it must have exactly 1")
    node = _index(_mapping(spec.get("task"), "CLUSTER_SPEC's task"), {"workerpool0": primary, "workerpool1": workers})
    environment = spec.get("environment")
    return Cluster(
        nodes=(*primary, *workers), node=node, cloud=environment == "cloud", rehearsal=environment == "local"
    )


def _from_environ(environ: Mapping[str, str]) -> Cluster:
    """Return a single node, unless RANK, WORLD_SIZE and MASTER_ADDR describe more.

    Vertex AI sets these too (undocumented); there they count nodes, not processes.
    """
    size, node = _environ_number(environ, "WORLD_SIZE", 1), _environ_number(environ, "RANK", 0)
    if size < 1 or not 0 <= node < size:
        raise ClusterError(f"RANK={node} and WORLD_SIZE={size}: RANK must be from 0 to WORLD_SIZE - 1")
    host = environ.get("MASTER_ADDR", "127.0.0.1" if size == 1 else "")
    if not host:
        raise ClusterError(f"WORLD_SIZE={size}, but MASTER_ADDR, the host of node 0, is not set")
    return Cluster(nodes=(f"{host}:{_environ_number(environ, 'MASTER_PORT', PORT)}", *[""] * (size - 1)), node=node)


def _environ_number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name) or str(default)
    if not text.isdecimal():
        raise ClusterError(f"{name}={text!r} is not a whole number")
    return int(text)


def _mapping(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ClusterError(f"{what} must be an object, not {json.dumps(value)[:60]}")
    return value


def _hosts(pools: Mapping[str, Any], pool: str) -> tuple[str, ...]:
    """Return the `host:port` of a pool's replicas; none if the pool doesn't exist."""
    hosts = pools.get(pool, [])
    if not isinstance(hosts, list):
        raise ClusterError(f"CLUSTER_SPEC: {pool} must be a list of host:port, not {json.dumps(hosts)[:60]}")
    for host in hosts:
        name, _, port = host.rpartition(":") if isinstance(host, str) else ("", "", "")
        if not (name and port.isdecimal() and 0 < int(port) < 65536):
            raise ClusterError(f"CLUSTER_SPEC: {pool} has {json.dumps(host)[:60]}, which is not host:port")
    return tuple(hosts)


def _index(task: Mapping[str, Any], pools: Mapping[str, tuple[str, ...]]) -> int:
    """Return this replica's index among the nodes: pool 0 first."""
    pool, index = str(task.get("type")), task.get("index", 0)
    if pool in _OTHER_POOLS:
        raise NotANodeError(
            f"this replica is {_OTHER_POOLS[pool]} ({pool}), not a node: do not run launch_train.node on it"
        )
    if pool not in pools:
        raise ClusterError(f"CLUSTER_SPEC: task type {json.dumps(pool)} is none of {', '.join(pools)}")
    # Vertex AI writes a number, TF_CONFIG's older form a string.
    if not str(index).isdecimal() or int(index) >= len(pools[pool]):
        raise ClusterError(f"CLUSTER_SPEC: task index {json.dumps(index)}, but {pool} has {len(pools[pool])} replicas")
    return int(index) + (len(pools["workerpool0"]) if pool == "workerpool1" else 0)
