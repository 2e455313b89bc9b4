"""Measure what loggers cost a training step.

    python -m benchmarks.loggers [--rounds 5] [--turns 10] [--steps 20] [--write]

The trainer runs without loggers (twice: the difference is noise), with TensorBoard, with W&B offline, and with an
MLflow server that is down. All write to a local run folder and take turns (benchmarks/turns.py). On a busy machine only
the first figure says something: the CPU time of handing a row to the loggers' process. Needs wandb and mlflow-skinny.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from statistics import median

from benchmarks import turns
from benchmarks.machine import described
from benchmarks.result import save_result
from benchmarks.tables import Loop, Measured
from launch_train.telemetry.logger_process import LoggerProcess

CONFIG = {"data": "synthetic", "eval": {"every": 0}, "steps": 1_000_000, "checkpoint": "off"}
VARIANTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("no loggers", ()),
    ("no loggers, again", ()),
    ("TensorBoard", ("tensorboard",)),
    ("W&B, offline", ("wandb",)),
    ("MLflow, server down", ("mlflow",)),
)
ENVIRONMENT = {"WANDB_MODE": "offline", "MLFLOW_TRACKING_URI": "http://127.0.0.1:9"}
READER = """
import sys
for line in sys.stdin.buffer:
    if line.startswith(b"["):  # the end
        break
"""
WARM_UP = 100
"""Steps during which the loggers' packages are imported."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--write", action="store_true")
    chosen = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    loops = [
        Loop(title, "trainer", {"config": {**CONFIG, "loggers": names}, "writes": True}) for title, names in VARIANTS
    ]
    amount = turns.Amount(chosen.rounds, chosen.turns, chosen.steps, warm_up=WARM_UP)
    lines = [f"CPU time of passing a row on to the loggers' process: {passing() * 1e6:.2f} µs.", ""]
    lines += [f"{chosen.rounds} rounds of {chosen.turns} turns of {chosen.steps} steps. {described('torch')}.", ""]
    lines += table(turns.measure(loops, amount))
    print("\n".join(lines))
    if chosen.write:
        save_result("loggers", "\n".join(["# Loggers", "", *lines, ""]))


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


def table(measured: Sequence[Measured]) -> list[str]:
    """Return a row for each variant: each turn is compared with the first loop's beside it."""
    first = measured[0]
    lines = [
        "| loggers | ms a step | time of a step, ÷ none | CPU time of the training process, ÷ none |",
        "|---|---:|---:|---:|",
    ]
    for one in measured:
        pairs = [
            pair for mine, its in zip(one.rounds, first.rounds, strict=True) for pair in zip(mine, its, strict=True)
        ]
        wall, cpu = (ratio([(mine[at], its[at]) for mine, its in pairs]) for at in (0, 1))
        step = 1000 * median(turn.wall for each in one.rounds for turn in each)
        lines.append(f"| {one.loop.title} | {step:.2f} | {wall:.4f} | {cpu:.4f} |")
    return lines


def ratio(pairs: Sequence[tuple[float, float]]) -> float:
    """Return the median of the ratios."""
    return median(mine / its for mine, its in pairs)


if __name__ == "__main__":
    main()
