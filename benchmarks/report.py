"""Measure `launch report` of a run with a million steps: CPU time (user + system) and memory of a fresh process.

    python -m benchmarks.report [--rows 1000000] [--runs 5] [--write]

The rows are those of the built-in trainer on a GPU, ten values each, in parts of 2,000 rows, and 1,000 samples of the
machine. `python -m launch_train.report` writes the same page where the job runs, without msgspec.
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.machine import described
from benchmarks.result import parser_of, publish, today
from launch_train import runfolder

ROWS_IN_PART = 2000
SAMPLES = 1000
CPU_SECONDS, MEGABYTES = 3.0, 300
"""What a report should take at most, with msgspec."""
WITHOUT_MSGSPEC = "import sys; sys.modules['msgspec'] = None; from launch_train.report.__main__ import main; "
COMMANDS = {
    "launch report": (str(Path(sys.executable).with_name("launch")), "report"),
    "launch_train.report, json": (sys.executable, "-c", f"{WITHOUT_MSGSPEC}sys.exit(main(sys.argv[1:]))"),
}


class Taken(NamedTuple):
    """CPU seconds and MB of one process."""

    cpu: float
    memory: float


def make_run(folder: Path, rows: int) -> None:
    """Write a run folder with so many rows of metrics."""
    for name in (runfolder.METRICS, runfolder.MONITOR, runfolder.ATTEMPTS):
        (folder / name).mkdir(parents=True)
    (folder / runfolder.PLAN).write_text(json.dumps({"run": folder.name, "target": "local"}))
    (folder / runfolder.attempt_lock(1)).write_text(json.dumps({"time": 1.7e9}))
    numbers = random.Random(0)
    for part, first in enumerate(range(1, rows + 1, ROWS_IN_PART)):
        start: dict[str, Any] = {"event": "start", "time": 1.7e9, "config": {"steps": rows}}
        lines: list[dict[str, Any]] = [start] if not part else []
        lines += [row(step, numbers) for step in range(first, min(first + ROWS_IN_PART, rows + 1))]
        (folder / runfolder.metrics_part(1, 0, 0, part)).write_text("".join(json.dumps(line) + "\n" for line in lines))
    samples = [
        {"time": 1.7e9 + 15 * at, "host": {"cpu": 0.5}, "gpus": [{"gpu": 0, "util": 0.9}]} for at in range(SAMPLES)
    ]
    (folder / runfolder.monitor_part(1, 0, 0, 0)).write_text("".join(json.dumps(one) + "\n" for one in samples))


def row(step: int, numbers: random.Random) -> dict[str, object]:
    """Return a row as the built-in trainer writes it."""
    seconds = numbers.uniform(0.1, 0.12)
    return {
        "step": step,
        "loss": 3 + 8 * math.exp(-step / 1e5) + numbers.random(),
        "lr": 6e-4 * numbers.random(),
        "grad_norm": numbers.random(),
        "tokens_per_s": 5e5 / seconds,
        "step_s": seconds,
        "data_s": numbers.random() / 1000,
        "mfu": 0.04 / seconds,
        "memory_gb": 61.2345,
        "time": 1.7e9 + step * 0.11,
    }


def take(command: Sequence[str], folder: Path, environ: dict[str, str]) -> Taken:
    """Run a command once. Raises RuntimeError: it fails."""
    process = os.posix_spawn(
        command[0],
        [*command, str(folder)],
        environ,
        file_actions=[(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)],
    )
    _, status, usage = os.wait4(process, 0)
    if status:
        raise RuntimeError(f"{command[0]}: {os.waitstatus_to_exitcode(status)}")
    return Taken(usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1000)


def main() -> None:
    """Measure and print."""
    parser = parser_of("report", __doc__)
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of metrics, a step each")
    parser.add_argument("--runs", type=int, default=5, help="runs of each command, in turns")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "runs", "job-0123abcd")
        make_run(folder, options.rows)
        environ = {**os.environ, "HOME": name, "CLOUDSDK_CONFIG": name}
        taken: dict[str, list[Taken]] = {title: [] for title in COMMANDS}
        for _ in range(options.runs):
            for title, line in COMMANDS.items():
                taken[title].append(take(line, folder, environ))
    head = f"# Report of {options.rows:,} rows, {today()}\n\n{options.runs} runs in turns. {described('msgspec')}.\n\n"
    publish("report", f"{head}{table(taken)}\n\nAt most {CPU_SECONDS:g} s and {MEGABYTES} MB.\n", write=options.write)


def table(taken: Mapping[str, Sequence[Taken]]) -> str:
    """Return a Markdown table."""
    lines = ["| command | CPU s, median | least to most | MB at most |", "|---|---:|---:|---:|"]
    for title, runs in taken.items():
        cpu = [one.cpu for one in runs]
        spread = f"{min(cpu):.2f} to {max(cpu):.2f}"
        lines.append(f"| {title} | {median(cpu):.2f} | {spread} | {max(one.memory for one in runs):.0f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
