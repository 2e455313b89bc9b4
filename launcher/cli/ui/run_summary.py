"""The summary of a finished run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from launch_train import runfolder
from launch_train.common.contract import MEAN_STEPS
from launch_train.common.text import elapsed
from launch_train.runfolder import figure
from launch_train.runfolder.starts import RunMetrics
from launcher.cli.ui.text import labelled
from launcher.text import plural, relative


def summary_lines(
    run: str,
    folder: str | None,
    succeeded: bool,
    seconds: float | None,
    results: RunMetrics | None,
    preempted: str = "",
    image: str = "",
    how: str = "",
    restarts: int = 0,
    report: str = "",
) -> Iterator[str]:
    """Yield how the run ended, its results and its folder.

    `preempted` tells how it resumed after a preemption, `image` what it ran in; `how` replaces `succeeded in` and
    `failed in`; `seconds` is None: unknown; `restarts` counts the restarts of its processes.
    """
    yield ""
    how = how or ("succeeded in" if succeeded else "failed in")
    took = how.rpartition(" ")[0] if seconds is None else f"{how} {elapsed(seconds)}"
    yield from labelled("run", f"{run} {took}")
    for label, text in (("image", image), ("preempted", preempted), ("restarts", str(restarts or ""))):
        yield from labelled(label, text) if text else ()
    end = results.event("end") if results else None
    if end:
        for label, text in training_results(end):
            yield from labelled(label, text)
    elif results and results.rows:
        yield from labelled("metrics", last_row(results))
    if results and not results.rows and (idle := results.event(runfolder.NO_STEP)):
        none = f"none in {figure(idle, 'seconds') or 0:.0f} s, and no checkpoint or other file in the run folder"
        yield from labelled("metrics", f"{none} (docs/scripts.md says how to record them)")
    for text in nonfinite_texts(results) if results else ():
        yield from labelled("warning", text)
    for label, path in (("folder", folder), ("report", report)):
        yield from labelled(label, relative(path)) if path else ()


def training_results(end: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the results in the trainer's `end` event."""
    first, last, steps = figure(end, "train_loss_first"), figure(end, "train_loss_last"), end["step"]
    if last is not None and steps <= MEAN_STEPS:
        yield "loss", f"{last:.4f} ({f'mean of the {steps} steps' if steps > 1 else '1 step'})"
    elif first is not None and last is not None:
        each = end.get("train_loss_steps", MEAN_STEPS)
        yield "loss", f"{first:.4f} → {last:.4f} (mean of the first and of the last {each} of {steps} steps)"
    held_out, entropy = figure(end, "eval_loss"), end.get("unigram_entropy")
    if held_out is not None:
        unit = end.get("data_unit", "byte")
        baseline = f"; unigram baseline: {entropy:.4f}" if entropy is not None else ""
        yield "held-out", f"{held_out:.4f}{f' nats per {unit}' if entropy is not None else ''}{baseline}"
    accuracy, five = figure(end, "eval_accuracy"), figure(end, "eval_accuracy_top5")
    if accuracy is not None and five is not None:
        yield "accuracy", f"{accuracy:.1%} of held-out images; {five:.1%} among the first five guesses"
    speed = speed_text(end)
    if speed:
        yield "speed", speed


def last_row(results: RunMetrics) -> str:
    """Return the last row of a script's metrics: `3 steps; last (step 3): loss 0.3333`."""
    row = results.rows[-1]
    named = {name: figure(row, name) for name in row if name not in ("step", "time")}
    values = [f"{name} {value:.4g}" for name, value in named.items() if value is not None]
    return f"{plural(len(results.rows), 'step')}; last (step {row['step']}): {', '.join(values) or 'no values'}"


def nonfinite_texts(results: RunMetrics) -> Iterator[str]:
    """Yield `loss was nan or infinite in 3 of 9 steps, first in step 4` for each such metric."""
    for name, where in results.nonfinite.items():
        count = f"{where['steps']} of {plural(len(results.rows), 'step')}"
        yield f"{name} was nan or infinite in {count}, first in step {where['first_step']}"


def speed_text(end: Mapping[str, Any]) -> str:
    """Return `12,345 tokens/s with 2 processes (cpu, fp32)`."""
    for unit in ("tokens", "images", "samples"):
        rate = end.get(f"{unit}_per_s")
        if rate:
            processes = plural(end["world_size"], "process")
            speed = f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"
            mfu = f", MFU {end['mfu']:.1%}" if end.get("mfu") else ""
            return f"{speed} {unit}/s with {processes} ({end['device']}, {end['precision']}){mfu}"
    return ""


def results_data(results: RunMetrics | None, time: float | None = None) -> dict[str, Any]:
    """Return the number of steps and the end of the run for `-o json`.

    `end` is the trainer's `end` event. Without one (a script, or a failed run) it is the last row of the metrics with
    `time`, when the run ended in Unix seconds; None if there is neither.
    """
    rows = results.rows if results else ()
    end = results.event("end") if results else None
    if end is None and (rows or time is not None):
        end = {"step": None, **(rows[-1] if rows else {}), **({"time": time} if time is not None else {})}
    return {"steps": len(rows), "end": dict(end) if end else None, "nonfinite": results.nonfinite if results else {}}
