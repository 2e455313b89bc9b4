"""The newest GPU samples of a run's nodes, and the problems in them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from launch_train.common import contract
from launcher.text import plural, rough_duration

if TYPE_CHECKING:
    from launch_train.common.storage import Storage
    from launcher.runs.metrics.results import Record

PART: Final = re.compile(rf"^{contract.MONITOR}/(\d+)-(\d+)-(\d+)-(\d+)(?:-\d+)?\.jsonl$")
"""File name: attempt, generation, node, part, and a variant if the name was taken."""

EACH, ALL = 10, 40
"""Most files to read, of a minute each: per node, and of all nodes together (at least one per node)."""

READERS = 8
"""Files read in parallel."""

SHOWN = 4
"""Most nodes to show: those with problems first, then the least busy ones."""


class Node(NamedTuple):
    """The newest samples of one node, over `seconds`: its GPUs, their summary (launch_train.monitoring.summary), the
    problems and the GPU errors as text."""

    number: int
    seconds: float
    gpus: int
    facts: Mapping[str, Any]
    wrong: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the node for scripts."""
        problems = {"wrong": [*self.wrong], "errors": [*self.errors]}
        return {"node": self.number, "seconds": round(self.seconds, 1), "gpus": self.gpus, **self.facts, **problems}


def read_nodes(storage: Storage) -> tuple[Node, ...]:
    """Return the nodes of the run's newest start; none if they are not monitored. Raises LaunchError."""
    from concurrent.futures import ThreadPoolExecutor

    from launcher.gcp.storage import read_errors

    with read_errors():
        wanted = newest(storage.list(f"{contract.MONITOR}/"))
        with ThreadPoolExecutor(READERS) as threads:
            return nodes(dict(zip(wanted, threads.map(storage.read, wanted), strict=True)))


def newest(names: Iterable[str]) -> list[str]:
    """Return the last files of each node in the newest start, in order."""
    named = sorted((tuple(map(int, found.groups())), name) for name in names if (found := PART.match(name)))
    by_node: defaultdict[int, list[str]] = defaultdict(list)
    for numbers, name in named:
        if numbers[:2] == named[-1][0][:2]:
            by_node[numbers[2]].append(name)
    most = max(1, min(EACH, ALL // max(1, len(by_node))))
    return [name for parts in by_node.values() for name in parts[-most:]]


def nodes(parts: Mapping[str, bytes]) -> tuple[Node, ...]:
    """Return the nodes that these files describe."""
    from launcher.runs.metrics.results import records

    rows: defaultdict[int, list[Record]] = defaultdict(list)
    for name, text in parts.items():
        if found := PART.match(name):
            rows[int(found[3])] += [row for row in records(text) if isinstance(row.get("time"), int | float)]
    return tuple(_node(number, sorted(rows[number], key=_time)) for number in sorted(rows) if rows[number])


def _time(row: Record) -> float:
    return float(row["time"])


def _node(number: int, rows: Sequence[Record]) -> Node:
    from launch_train.monitoring.alerts import Alerts
    from launch_train.monitoring.summary import MonitorSummary

    alarms, sums, alerts = Alerts(number), MonitorSummary(), []
    for row in rows:
        sums.add(dict(row))
        alerts += alarms.check(dict(row))
    wrong, errors = ([alert.line for alert in alerts if bool(alert.event) is error] for error in (False, True))
    gpus = max(len(row.get("gpus", ())) for row in rows)
    return Node(number, rows[-1]["time"] - rows[0]["time"], gpus, sums.facts(), tuple(wrong), tuple(errors))


def lines(found: Sequence[Node], reported: Container[int] = ()) -> Iterator[str]:
    """Yield a sentence for each node with GPUs (at most SHOWN) and the problems of all nodes.

    Errors of the nodes in `reported` are omitted.
    """
    seen = sorted((one for one in found if one.gpus), key=_worst_first)
    for node in seen[:SHOWN]:
        yield sentence(node)
    if len(seen) > SHOWN:
        yield f"and {plural(len(seen) - SHOWN, 'more node')}"
    for node in found:
        yield from (*node.wrong, *(() if node.number in reported else node.errors))


def _worst_first(node: Node) -> tuple[bool, float]:
    return not (node.wrong or node.errors), node.facts.get("gpu_util_mean", 1.0)


def sentence(node: Node) -> str:
    """Return `node 0, last 10 min: 8 GPUs, 97% busy, up to 60.0 GB, 61 °C, 653 W; CPUs 35%, RAM up to 120.3 GB`."""
    facts = node.facts
    gpus = [plural(node.gpus, "GPU")]
    gpus += [text.format(facts[name]) for name, text in _GPU.items() if name in facts]
    host = [text.format(facts[name]) for name, text in _HOST.items() if name in facts]
    text = "; ".join(", ".join(part) for part in (gpus, host) if part)
    return f"node {node.number}, last {rough_duration(node.seconds)}: {text}"


_GPU: Final = {
    "gpu_util_mean": "{:.0%} busy",
    "gpu_mem_max_gb": "up to {:.1f} GB",
    "gpu_temp_max_c": "{:.0f} °C",
    "gpu_power_mean_w": "{:.0f} W",
}
_HOST: Final = {"cpu_mean": "CPUs {:.0%}", "ram_max_gb": "RAM up to {:.1f} GB"}
