"""The end of a run as a page of a few lines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch_train.common.contract import MEAN_STEPS
from launcher.cli.ui.plan_page import labelled
from launcher.cli.ui.text import elapsed
from launcher.runs.metrics.results import figure
from launcher.text import plural

if TYPE_CHECKING:
    from launcher.runs.metrics.results import Results


def lines(
    run: str,
    folder: str | None,
    succeeded: bool,
    seconds: float,
    found: Results | None,
    preempted: str = "",
    image: str = "",
    how: str = "",
    restarts: int = 0,
) -> Iterator[str]:
    """How it ended, what was learned, where it lies. `preempted` says how it went on after a preemption, `image` what
    it ran in, `how` how it ended where that is neither well nor badly, `restarts` how often its processes were started
    again."""
    yield ""
    how = how or ("succeeded in" if succeeded else "failed in")
    yield from labelled("run", f"{run} {how} {elapsed(seconds)}")
    if image:
        yield from labelled("image", image)
    if preempted:
        yield from labelled("preempted", preempted)
    if restarts:
        yield from labelled("restarts", str(restarts))
    end = found.event("end") if found else None
    if end:
        for label, text in training(end):
            yield from labelled(label, text)
    elif found and found.rows:
        yield from labelled("metrics", last_row(found))
    for text in nonfinite(found) if found else ():
        yield from labelled("warning", text)
    if folder:
        yield from labelled("folder", relative(folder))


def training(end: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What the trainer said at its end."""
    first, last, steps = figure(end, "train_loss_first"), figure(end, "train_loss_last"), end["step"]
    if last is not None and steps <= MEAN_STEPS:
        yield "loss", f"{last:.4f} ({f'mean of the {steps} steps' if steps > 1 else '1 step'})"
    elif first is not None and last is not None:
        each = end.get("train_loss_steps", MEAN_STEPS)
        yield "loss", f"{first:.4f} → {last:.4f} (mean of the first and of the last {each} of {steps} steps)"
    held_out, entropy = figure(end, "eval_loss"), end.get("unigram_entropy")
    if held_out is not None:
        unit = end.get("data_unit", "byte")
        beside = f"; knowing only how often each {unit} occurs: {entropy:.4f}" if entropy is not None else ""
        yield "held-out", f"{held_out:.4f}{f' nats per {unit}' if entropy is not None else ''}{beside}"
    speed = speed_text(end)
    if speed:
        yield "speed", speed


def last_row(found: Results) -> str:
    """The newest row of a script that writes its own: `3 steps; the last: loss 0.3333`."""
    row = found.rows[-1]
    named = {name: figure(row, name) for name in row if name not in ("step", "time")}
    values = [f"{name} {value:.4g}" for name, value in named.items() if value is not None]
    return f"{plural(len(found.rows), 'step')}; the last ({row['step']}): {', '.join(values) or 'no values'}"


def nonfinite(found: Results) -> Iterator[str]:
    """`loss was nan or infinite in 3 of 9 steps, first in step 4`, for each such value."""
    for name, where in found.nonfinite.items():
        count = f"{where['steps']} of {plural(len(found.rows), 'step')}"
        yield f"{name} was nan or infinite in {count}, first in step {where['first_step']}"


def speed_text(end: Mapping[str, Any]) -> str:
    """`12,345 tokens/s with 2 processes (cpu, fp32)`."""
    for unit in ("tokens", "images", "samples"):
        rate = end.get(f"{unit}_per_s")
        if rate:
            processes = plural(end["world_size"], "process")
            speed = f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"
            mfu = f", MFU {end['mfu']:.1%}" if end.get("mfu") else ""
            return f"{speed} {unit}/s with {processes} ({end['device']}, {end['precision']}){mfu}"
    return ""


def as_data(found: Results | None, time: float | None = None) -> dict[str, Any]:
    """For `-o json`: the number of steps, and how the run ended.

    `end` is the trainer's event of that name. Without one (a script, or a run that failed) it is the newest row of the
    metrics; `time` is then when the run ended, in Unix seconds. None: neither is known.
    """
    rows = found.rows if found else ()
    end = found.event("end") if found else None
    if end is None and (rows or time is not None):
        end = {"step": None, **(rows[-1] if rows else {}), **({"time": time} if time is not None else {})}
    return {"steps": len(rows), "end": dict(end) if end else None, "nonfinite": found.nonfinite if found else {}}


def relative(folder: str) -> str:
    """The folder from here where that is shorter."""
    if folder.startswith("gs://"):
        return folder
    try:
        return str(Path(folder).relative_to(Path.cwd()))
    except ValueError:
        return folder
