"""Measure how long a run takes from the SIGKILL of a rank to the next row of its metrics, in a local run of two ranks.

    python -m benchmarks.recovery [--kills 30] [--write]

Kill the ranks of one run in turn. Each kill waits until the current generation has written a row and a checkpoint; the
measured time ends with the next generation's first row in the run folder. A generation without a row after HANG_SECONDS
counts as hung and ends the measurement.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from threading import Thread

from benchmarks.machine import described
from benchmarks.result import parser_of, publish, today
from launch_train import runfolder
from launch_train.common import contract

LAUNCH = Path(sys.executable).with_name("launch")
RANKS = 2
MEDIAN_SECONDS, WORST_SECONDS, HANG_SECONDS = 4.0, 8.0, 60.0
"""What a kill should cost: the median, the worst; and when a generation counts as hung."""
SPEC = {
    "name": "job",
    "machine": {"type": "l4", "gpus": RANKS},
    "env": {"OMP_NUM_THREADS": "1"},
    "run": {
        "config": {
            "model": {"name": "gpt", "n_layer": 1, "n_head": 2, "n_embd": 32, "block_size": 32},
            "data": "python-stdlib",
            "steps": 10**7,
            "batch_size": 8,
            "checkpoint": {"minutes": 0.02},
        }
    },
    "output": "runs",
}
STAGES = {
    "failed first": "torchrun reports the killed rank",
    "; restarting (": "all processes have exited",
    "parameters; ": "the ranks are up: torch, trainer and data",
    "resumed from": "checkpoint loaded",
}
"""Parts of the lines that a restart prints, in their order, and what has happened by then."""


def parts_since(run: Path, generation: int) -> list[str]:
    """Return the parts of the metrics that have a step of a later generation."""
    files = sorted((run / runfolder.METRICS).glob("[0-9]*.jsonl"))
    later = (file for file in files if int(file.name.split("-")[1]) > generation)
    return [file.name for file in later if '"step"' in file.read_text()]


def wait_for_row(run: Path, generation: int) -> int:
    """Return the first generation after `generation` with a row in the run folder. Raises TimeoutError."""
    deadline = time.monotonic() + HANG_SECONDS
    while not (names := parts_since(run, generation)):
        if time.monotonic() > deadline:
            raise TimeoutError(f"no row after generation {generation} within {HANG_SECONDS:g} s")
        time.sleep(0.01)
    return int(names[0].split("-")[1])


def process_of(rank: int, run: str) -> int:
    """Return the process id of a rank of the run."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environ = (folder / "environ").read_bytes().split(b"\0")
            name = (folder / "comm").read_text().strip()
        except OSError:  # it has exited
            continue
        if f"{contract.RUN}={run}".encode() in environ and name == f"rank {rank}":
            return int(folder.name)
    raise RuntimeError(f"rank {rank} of {run} does not run")


def measure(kills: int) -> list[dict[str, float]]:
    """Return for each kill the seconds until each stage, and until the next row ("")."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "job.yaml").write_text(json.dumps(SPEC))
        line = [str(LAUNCH), "local", "job.yaml"]
        process = subprocess.Popen(line, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        printed: list[tuple[float, str]] = []
        reader = Thread(target=lambda: printed.extend((time.monotonic(), text) for text in process.stderr or ()))
        reader.start()
        try:
            return [*_measured(folder, kills, printed)]
        except (TimeoutError, RuntimeError):
            sys.stderr.writelines(text for _, text in printed[-40:])
            raise
        finally:
            process.send_signal(signal.SIGINT)
            process.wait()
            reader.join()


def _measured(folder: Path, kills: int, printed: list[tuple[float, str]]) -> list[dict[str, float]]:
    deadline = time.monotonic() + HANG_SECONDS
    while not (runs := [*(folder / "runs").glob(f"*/{runfolder.METRICS}")]) and time.monotonic() < deadline:
        time.sleep(0.1)
    run, rows = runs[0].parent, list[dict[str, float]]()
    generation = wait_for_row(run, -1)
    for number in range(kills):
        latest = run / runfolder.LATEST
        before, deadline = latest.stat().st_mtime if latest.exists() else 0.0, time.monotonic() + HANG_SECONDS
        while not latest.exists() or latest.stat().st_mtime == before:
            if time.monotonic() > deadline:
                raise TimeoutError("no checkpoint")
            time.sleep(0.05)
        pid, known = process_of(number % RANKS, run.name), len(printed)
        began = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        generation = wait_for_row(run, generation)
        row = {"": time.monotonic() - began}
        for when, text in printed[known:]:
            row |= {part: when - began for part in STAGES if part in text and part not in row}
        rows.append(row)
        print(
            f"kill {number + 1}: "
            + ", ".join(f"{part or 'row'} {row[part]:.2f}" for part in (*STAGES, "") if part in row),
            file=sys.stderr,
        )
    return rows


def table(rows: list[dict[str, float]]) -> str:
    """Return a Markdown table of the seconds from the kill to each stage."""
    lines = ["| from the kill until | median s | least to most |", "|---|---:|---:|"]
    for part, title in {**STAGES, "": "**the next row is in the run folder**"}.items():
        if seconds := [row[part] for row in rows if part in row]:
            lines.append(f"| {title} | {median(seconds):.2f} | {min(seconds):.2f} to {max(seconds):.2f} |")
    return "\n".join(lines)


def main() -> None:
    """Measure and print; with --write, save the table in benchmarks/results/."""
    parser = parser_of("recovery", __doc__)
    parser.add_argument("--kills", type=int, default=30, help="ranks to kill")
    options = parser.parse_args()
    rows = measure(options.kills)
    head = f"# A killed rank, {today()}\n\n{options.kills} kills in one local run of {RANKS} ranks, none hung. "
    head += f"{described('torch')}.\n"
    limit = f"The next row should come after {MEDIAN_SECONDS:g} s in the median and {WORST_SECONDS:g} s at most."
    publish("recovery", f"{head}\n{table(rows)}\n\n{limit}\n", write=options.write)


if __name__ == "__main__":
    main()
