"""The newest GPU samples of a run's nodes, from its folder."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from launch_train import runfolder
from launch_train.common.storage import Storage
from launch_train.monitoring.alerts import Alert, Alerts
from launch_train.monitoring.summary import MonitorSummary
from launch_train.runfolder.run import samples_by_node
from launch_train.runfolder.starts import Record
from launcher.gcp.storage import read_errors

EACH, ALL = 10, 40
"""Most files to read, of a minute each: per node, and of all nodes together (at least one per node)."""

READERS = 8
"""Files read in parallel."""


class Node(NamedTuple):
    """The newest samples of one node, over `seconds`: its GPUs, their summary (launch_train.monitoring.summary), the
    problems of the node, and the GPU errors as text."""

    number: int
    seconds: float
    gpus: int
    facts: Mapping[str, Any]
    wrong: tuple[Alert, ...] = ()
    errors: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        problems = {"wrong": [alert.line for alert in self.wrong], "errors": [*self.errors]}
        return {"node": self.number, "seconds": round(self.seconds, 1), "gpus": self.gpus, **self.facts, **problems}


def read_nodes(storage: Storage, each: int = EACH) -> tuple[Node, ...]:
    """Return the nodes of the run's newest start, from the last `each` minutes; none if they are not monitored. Raises
    LaunchError."""
    with read_errors():
        wanted = newest(storage.list(f"{runfolder.MONITOR}/"), each)
        with ThreadPoolExecutor(READERS) as threads:
            return nodes(dict(zip(wanted, threads.map(storage.read, wanted), strict=True)))


def newest(names: Iterable[str], each: int = EACH) -> list[str]:
    """Return the last files of each node in the newest start, in order."""
    parts = runfolder.parts_in_order(names)
    by_node: defaultdict[int, list[str]] = defaultdict(list)
    for part, name in parts:
        if part[:2] == parts[-1][0][:2]:
            by_node[part.node].append(name)
    most = max(1, min(each, ALL // max(1, len(by_node))))
    return [name for files in by_node.values() for name in files[-most:]]


def nodes(files: Mapping[str, bytes]) -> tuple[Node, ...]:
    samples = samples_by_node((part, files[name]) for part, name in runfolder.parts_in_order(files))
    return tuple(_node(number, rows) for number, rows in sorted(samples.items()) if rows)


def _node(number: int, rows: Sequence[Record]) -> Node:
    alarms, sums, alerts = Alerts(number), MonitorSummary(), []
    for row in rows:
        sums.add(dict(row))
        alerts += alarms.check(dict(row))
    wrong = tuple(alert for alert in alerts if not alert.event)
    errors = tuple(alert.line for alert in alerts if alert.event)
    gpus = max(len(row.get("gpus", ())) for row in rows)
    return Node(number, rows[-1]["time"] - rows[0]["time"], gpus, sums.facts(), wrong, errors)
