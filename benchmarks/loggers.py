"""Measure what loggers cost a training step.

    python -m benchmarks.loggers [--pairs 60] [--steps 10] [--write]

Each variant is one training process, in which the logger is switched on and off for blocks of steps. A block ends when
its rows have been passed on, and a pause lets the loggers' own process work off its rows. Of each pair of neighbouring
blocks one has the logger: the first and the second in turn. A figure is the median of the pairs' differences, as a
share of a step without it, with a confidence interval of 95 % (ranks: no assumption about the noise). "nothing"
switches nothing: its interval holds 0 if the method is right. All that a logger does in the training process is done by
its thread for metrics, so that this thread's CPU time says what it costs even on a busy machine. Needs wandb and
mlflow-skinny.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

from benchmarks.machine import described
from benchmarks.result import save_result
from launch_train.telemetry.logger_process import LoggerProcess

CONFIG = {"data": "synthetic", "eval": {"every": 0}, "steps": 1_000_000, "checkpoint": "off"}
VARIANTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("nothing", ()),
    ("TensorBoard", ("tensorboard",)),
    ("W&B, offline", ("wandb",)),
    ("MLflow, server down", ("mlflow",)),
)
ENVIRONMENT = {"WANDB_MODE": "offline", "MLFLOW_TRACKING_URI": "http://127.0.0.1:9", "OMP_NUM_THREADS": "1"}
READER = """
import sys
for line in sys.stdin.buffer:
    if line.startswith(b"["):  # the end
        break
"""
WARM_UP_SECONDS = 15.0
"""Until the loggers' packages are imported."""
SETTLE_SECONDS = 0.1
FLUSH_SECONDS = 20.0


class Block(NamedTuple):
    """Seconds of a step in one block: wall time, CPU time of the training process, and of its thread for metrics."""

    wall: float
    cpu: float
    thread: float


class Cost(NamedTuple):
    """The median of paired differences, as a share of a step without loggers, and its interval of 95 %."""

    share: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.share:+.2%} ({self.low:+.2%} to {self.high:+.2%})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=60, help="pairs of blocks of each variant")
    parser.add_argument("--steps", type=int, default=10, help="steps of a block")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    parser.add_argument("--write", action="store_true")
    chosen = parser.parse_args()
    if chosen.inside is not None:
        train(chosen.inside.split(",") if chosen.inside else [], chosen.pairs, chosen.steps)
    lines = [f"CPU time of passing a row on to the loggers' process: {passing() * 1e6:.2f} µs.", ""]
    lines += [f"{chosen.pairs} pairs of blocks of {chosen.steps} steps. {described('torch')}.", ""]
    lines.append(
        "| logger | ms a step without | wall time | CPU time of the process | CPU time of its thread for metrics |"
    )
    lines.append("|---|---:|---:|---:|---:|")
    print("\n".join(lines), flush=True)
    for title, names in VARIANTS:
        pairs = measure(names, chosen.pairs, chosen.steps)
        step = 1000 * median(off.wall for _, off in pairs)
        wall = cost([on.wall / off.wall - 1 for on, off in pairs])
        cpu = cost([on.cpu / off.cpu - 1 for on, off in pairs])
        thread = cost([(on.thread - off.thread) / off.wall for on, off in pairs])
        lines.append(f"| {title} | {step:.2f} | {wall} | {cpu} | {thread} |")
        print(lines[-1], flush=True)
    if chosen.write:
        save_result("loggers", "\n".join(["# Loggers", "", *lines, ""]))


def cost(differences: Sequence[float]) -> Cost:
    """Return the median of the pairs' differences, with the interval that the order statistics give."""
    shares = sorted(differences)
    aside = max(0, math.floor(len(shares) / 2 - 1.96 * math.sqrt(len(shares)) / 2))
    return Cost(median(shares), shares[aside], shares[-1 - aside])


def measure(names: Sequence[str], pairs: int, steps: int) -> list[tuple[Block, Block]]:
    """Train with a logger in a process of its own; return the blocks (on, off). Raises CalledProcessError."""
    line = [sys.executable, "-m", "benchmarks.loggers", "--inside", ",".join(names)]
    line += ["--pairs", str(pairs), "--steps", str(steps)]
    with tempfile.TemporaryDirectory() as folder:
        environ = {**os.environ, **ENVIRONMENT, "XDG_CACHE_HOME": folder, "LAUNCH_RUN_FOLDER": f"{folder}/run"}
        ran = subprocess.run(line, env=environ, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(ran.stdout.splitlines()[-1])
    return [(Block(*on), Block(*off)) for on, off in found]


# --- In the training process -----------------------------------------------------------------------------------------


class Switch:
    """Passes rows on to the loggers, or to the run folder alone."""

    def __init__(self, sink: Any) -> None:
        self._sink, self._parts = sink, (sink._board, sink._loggers)

    def set(self, *, on: bool) -> None:
        self._sink._board, self._sink._loggers = self._parts if on else (None, None)


def train(names: Sequence[str], pairs: int, steps: int) -> None:
    """Run the built-in trainer, take the blocks, print them as JSON, and exit."""
    from launch_train import __main__ as program
    from launch_train.common import contract
    from launch_train.trainer import train as loop

    blocks = take_blocks(pairs, steps)
    next(blocks)
    loop.has_work_left = lambda run: blocks.send(run) is None
    os.environ[contract.CONFIG] = json.dumps({**CONFIG, "loggers": [*names], "log_every": steps})
    program.main()


def take_blocks(pairs: int, steps: int) -> Any:
    """Receive the run before each step; the generator switches the logger and measures between steps."""
    run = yield
    until = time.monotonic() + WARM_UP_SECONDS
    while time.monotonic() < until or run.state["step"] % steps:
        run = yield
    switch, found = Switch(run.sink), []
    for number in range(pairs):
        measured = {}
        for on in (True, False) if number % 2 else (False, True):
            switch.set(on=on)
            time.sleep(SETTLE_SECONDS)
            before = clocks(run.sink)
            for _ in range(steps):
                run = yield
            run.sink.flush(FLUSH_SECONDS)
            measured[on] = Block(*((now - then) / steps for now, then in zip(clocks(run.sink), before, strict=True)))
        found.append((measured[True], measured[False]))
    switch.set(on=True)
    run.sink.close(FLUSH_SECONDS)
    print(json.dumps(found), flush=True)
    os._exit(0)


def clocks(sink: Any) -> tuple[float, float, float]:
    """Return the seconds of the clocks that a Block compares."""
    thread = time.pthread_getcpuclockid(sink._thread.ident)
    return time.perf_counter(), time.process_time(), time.clock_gettime(thread)


def passing(blocks: int = 2000, rows: int = 50) -> float:
    """Return the CPU seconds that a row costs the training process. The JSON is that of the run folder."""
    process = LoggerProcess(["any"], {}, [sys.executable, "-c", READER])
    line = b'{"step": 1000, "loss": 2.5, "lr": 0.001, "grad_norm": 0.7, "tokens_per_s": 1e5, "step_s": 0.1}\n'
    began = time.process_time()
    for _ in range(blocks):
        process.write(line * rows, rows)
    took = time.process_time() - began
    process.finish(5.0, failed=False)
    process.close()
    return took / (blocks * rows)


if __name__ == "__main__":
    main()
