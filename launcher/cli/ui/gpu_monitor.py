"""Sentences about the GPUs of a run's nodes, and the problems in the samples of GPUs, memory and disk."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import Final

from launcher.runs.metrics.gpu_nodes import Node
from launcher.text import plural, rough_duration

SHOWN = 4
"""Most nodes to show: those with problems first, then the least busy ones."""


def gpu_lines(nodes: Sequence[Node], reported: Container[int] = ()) -> Iterator[tuple[str, str]]:
    """Yield what a sentence is about (GPUs, memory or disk), and the sentence: one for each node with GPUs (at most
    SHOWN), and the problems of all nodes.

    Errors of the nodes in `reported` are omitted.
    """
    seen = sorted(
        (node for node in nodes if node.gpus),
        key=lambda node: (not (node.wrong or node.errors), node.facts.get("gpu_util_mean", 1.0)),
    )
    for node in seen[:SHOWN]:
        yield "GPUs", sentence(node)
    if len(seen) > SHOWN:
        yield "GPUs", f"and {plural(len(seen) - SHOWN, 'more node')}"
    for node in nodes:
        yield from ((alert.about, alert.line) for alert in node.wrong)
        yield from (("GPUs", error) for error in node.errors if node.number not in reported)


def labelled_gpu_lines(nodes: Sequence[Node]) -> Iterator[tuple[str, str]]:
    """Yield a label and a sentence; an empty label where the one above still holds."""
    above = ""
    for label, text in gpu_lines(nodes):
        yield ("" if label == above else label), text
        above = label


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
