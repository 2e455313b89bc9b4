"""The nodes of a job on several hosts: each host has a record of its own, and the first one's stands for the job."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

from launcher.errors import UnreachableError
from launcher.remote.agent import Agent
from launcher.remote.connection import connect_to

SUCCESS: Final = 3
"""`order_of_end` of a node that has succeeded: the last in order."""
STOP_SECONDS: Final = 45.0
"""A node that is stopped gets 30 s to save."""


class Node(NamedTuple):
    """One node: its host, its rank, and the ID of its record there."""

    agent: Agent
    rank: int
    id: str


def job_nodes(agent: Agent, body: Mapping[str, Any], job_id: str) -> list[Node]:
    """Return the nodes of a request, by rank. `agent` is that of the first host."""
    agents = [agent, *(Agent(connect_to(peer["host"])) for peer in body.get("peers", ()))]
    return [Node(agent, rank, f"{job_id}-{rank}" if rank else job_id) for rank, agent in enumerate(agents)]


def stop_and_remove(nodes: Sequence[Node]) -> None:
    """Stop the nodes of a job that can't start on all hosts, wait until they end, and remove their records."""
    until = time.monotonic() + STOP_SECONDS
    for node in nodes:
        node.agent.call("cancel", {"id": node.id})
    for node in nodes:
        while any(job["running"] for job in node.agent.call("jobs", {"ids": [node.id]})) and time.monotonic() < until:
            time.sleep(0.5)
        node.agent.call("remove", {"id": node.id})


def whole_job(job: Mapping[str, Any], nodes: Iterable[Node]) -> dict[str, Any]:
    """Return the description of a job on several hosts, from that of its first node and those of the others.

    It runs while one of its nodes does, and its end is that of the node that failed first (`rank`, `host`). Once a node
    has failed, the others are stopped: they would wait for it. A host that does not answer is left out.
    """
    first, *others = nodes
    described = [(first, job)]
    for node in others:
        with suppress(UnreachableError):
            described += [(node, each) for each in node.agent.call("jobs", {"ids": [node.id]})]
    failed = [(node, each) for node, each in described if not each["running"] and order_of_end(each)[0] < SUCCESS]
    for node, each in described if failed else ():
        if each["running"]:
            with suppress(UnreachableError):
                node.agent.call("stop", {"id": node.id})
    node, cause = min(failed, key=lambda pair: order_of_end(pair[1]), default=(first, job))
    running = any(each["running"] for _, each in described)
    return {**job, "running": running, "end": cause["end"], "rank": node.rank, "host": node.agent.connection.host.name}


def order_of_end(job: Mapping[str, Any]) -> tuple[int, float]:
    """Return a key by which the node that failed first is the least: by how it ended, then by when.

    A host that was lost or stopped comes before nodes with an exit code, whatever the times: those failed because of
    it. Nodes that launch stopped because of another one come last but for those that succeeded.
    """
    if not (end := job["end"]):
        return 0, 0.0
    if not end["stopped"] and not end["code"]:
        return SUCCESS, end["time"]
    return {"": 1, "peer": 2}.get(end["stopped"], 0), end["time"]
