"""Measure the CPU time of a plan: 1,000 different specs, planned in one process.

python -m benchmarks.planning [--specs 1000] [--write]
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from itertools import count, cycle, islice
from statistics import median, quantiles

from benchmarks.machine import described
from benchmarks.result import parser_of, publish, today
from launcher import __version__, catalog
from launcher.plan.build import plan
from launcher.plan.model import Context
from launcher.spec.models import JobSpec
from launcher.spec.reader import read_text

LIMIT_MS = 2.0
MACHINES = (
    ("h100", 2, 1),
    ("h100", 8, 2),
    ("h200", 8, 4),
    ("a100-80gb", 2, 1),
    ("l4", 2, 1),
    ("l4", 1, 1),
    ("b200", 8, 1),
)
PLACES: tuple[str | list[str], ...] = ("any", ["us-central1"], ["us-central1", "europe-west4"])


def texts() -> Iterator[bytes]:
    """Yield an endless sequence of different specs: machines, regions and settings rotate, name and seed count up."""
    for n, (gpu, gpus, nodes), regions in zip(count(), cycle(MACHINES), cycle(PLACES)):
        spec = {
            "name": f"bench-{n}",
            "machine": {"type": gpu, "gpus": gpus, "nodes": nodes},
            "provisioning": ["flex-start", "spot"],
            "regions": regions,
            "run": {"config": {"steps": 100 + n, "batch_size": 64, "seed": n, "optimizer": {"lr": 1e-3 / (n + 1)}}},
            "env": {"NCCL_DEBUG": "WARN"},
            "output": "gs://my-bucket/runs",
            "limits": {"hours": 12, "wait": "6h"},
            "labels": {"number": str(n)},
        }
        yield json.dumps(spec).encode()


def milliseconds(work: Callable[[], object]) -> float:
    """Return the CPU time of `work` in milliseconds."""
    before = time.process_time_ns()
    work()
    return (time.process_time_ns() - before) / 1e6


def measure(specs: int) -> tuple[list[float], list[float], int]:
    """Return the CPU milliseconds of reading and of planning each spec, and the number of attempts planned."""
    known = catalog.load()
    context = Context(target="vertex", project="my-project", owner="me", version=__version__)
    reading: list[float] = []
    planning: list[float] = []
    attempts = 0
    for text in islice(texts(), specs):
        read: list[JobSpec] = []
        reading.append(milliseconds(lambda text=text, read=read: read.append(read_text(text, "spec.yaml"))))  # type: ignore[misc]  # mypy can't infer a lambda with a default
        planning.append(milliseconds(lambda spec=read[0]: plan(spec, known, context)))  # type: ignore[misc]  # as above
        attempts += len(plan(read[0], known, context).attempts)
    return reading, planning, attempts


def row(name: str, values: list[float]) -> str:
    """Return one row of the table."""
    most = max(values)
    return f"| {name} | {median(values):.2f} | {quantiles(values, n=100)[98]:.2f} | {most:.2f} | {sum(values):.0f} |"


def main() -> None:
    """Measure and print; with --write, save the table in benchmarks/results/."""
    parser = parser_of("planning", __doc__)
    parser.add_argument("--specs", type=int, default=1000)
    options = parser.parse_args()
    reading, planning, attempts = measure(options.specs)
    amount = f"{options.specs:,} different specs in one process, {attempts:,} attempts"
    text = "\n".join(
        [
            f"# Planning, {today()}",
            "",
            f"{amount}. {described('msgspec', 'pyyaml')}.",
            "",
            "| | CPU ms, median | 99th percentile | most | all |",
            "|---|---:|---:|---:|---:|",
            row("plan one spec", planning),
            row("read one spec", reading),
            "",
            f"Planning should stay at or below {LIMIT_MS:g} ms a spec.",
            "",
        ]
    )
    publish("planning", text, write=options.write)


if __name__ == "__main__":
    main()
