"""The screen of `launch watch`: each run in some lines, then the last lines of output of the chosen one."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from typing import Final

from rich.text import Text

from launch_train.common.text import elapsed
from launch_train.runfolder import figure
from launcher.cli.ui import gpu_monitor
from launcher.cli.ui.event_printer import STATES
from launcher.cli.ui.job_text import place_of
from launcher.cli.ui.plot import sparkline
from launcher.cli.ui.story_text import attempt_text, cost_text
from launcher.cli.ui.text import LABEL, printable, wrapped
from launcher.runs.metrics.progress import Progress
from launcher.runs.story import total_usd
from launcher.runs.watched_runs import RunView

BAR: Final = 20
LEAST_LOG_LINES: Final = 3
STYLES: Final = {"RUNNING": "green", "SUCCEEDED": "green", "FAILED": "red", "QUEUED": "yellow", "PENDING": "yellow"}


def screen(
    views: Sequence[RunView],
    chosen: int,
    width: int,
    height: int,
    *,
    footer: str,
    message: str = "",
    now: float | None = None,
) -> Text:
    """Return the screen, of at most `height` lines of `width` columns. `now`: Unix seconds."""
    now = time.time() if now is None else now
    whole = [
        [*run_block(view, width, now, number=None if len(views) == 1 else number + 1)]
        for number, view in enumerate(views)
    ]
    below = [Text(line, style="yellow") for line in wrapped(message, width)] if message else []
    below.append(Text(footer[:width], style="dim"))
    room = height - len(below) - LEAST_LOG_LINES
    for most in (99, 6, 4, 2):  # several runs on a low screen: their first lines count most
        blocks = [lines if number == chosen and len(views) == 1 else lines[:most] for number, lines in enumerate(whole)]
        if sum(map(len, blocks)) <= room:
            break
    rows = [row for lines in blocks for row in lines][: max(1, room)]
    most = height - len(below) - len(rows) - 1
    last = views[chosen].lines[-most:] if most > 0 else []
    logs = [Text(printable(f"[{line.replica}] {line.text}")[:width]) for line in last]
    rows += [Text(rule(f"output of {views[chosen].id}" if len(views) > 1 else "output", width), style="dim"), *logs]
    rows += [Text("")] * (height - len(below) - len(rows))
    return Text("\n").join([*rows[: height - len(below)], *below])


def run_block(view: RunView, width: int, now: float, number: int | None = None) -> Iterator[Text]:
    """Yield the lines of one run: title, progress, curves, GPUs, cost, attempts, trouble."""
    yield title(view, width, number)
    if view.progress:
        yield labelled_text("progress", progress_line(view.progress, now), width)
        yield from curves(view, width)
    for label, text in gpu_monitor.labelled_gpu_lines(view.nodes):
        yield from labelled_texts(label, text, width)
    if cost := cost_text(view.story.chapters, view.story.cap):
        spent, cap = total_usd(view.story.chapters), view.story.cap
        yield labelled_text("cost", f"{cost}  {bar(spent / cap)}" if spent is not None and cap else cost, width)
    for place, attempt in enumerate(view.story.chapters[-3:]):
        count = f"{attempt.number}. " if len(view.story.chapters) > 1 else ""
        yield from labelled_texts("" if place else "attempt", f"{count}{attempt_text(attempt)}", width)
    for label, text, style in (
        ("trouble", view.trouble and f"{view.trouble} Retrying; the run continues.", "yellow"),
        ("note", view.note, "yellow"),
        ("error", view.error.problem if view.error else "", "red"),
    ):
        yield from labelled_texts(label, text, width, style) if text else ()


def title(view: RunView, width: int, number: int | None) -> Text:
    """Return the rule with the run's ID, state and place."""
    state, style = view_state(view)
    where = place_of(view.job) if view.job else ""
    name = printable(f"{f'[{number}] ' if number else ''}{view.id}")
    text = Text.assemble((f"{name}  ", "bold"), (state, f"bold {style}"), f"  {where} ")
    text.append(rule("", max(0, width - text.cell_len)), "dim")
    text.truncate(width)
    return text


def view_state(view: RunView) -> tuple[str, str]:
    """Return a run's state as text, and its style."""
    if view.job is None:
        return "connecting …" if not view.is_over else "unknown", "yellow"
    return STATES.get(view.job.state, view.job.state.lower()), STYLES.get(view.job.state, "yellow")


def progress_line(progress: Progress, now: float) -> str:
    """Return `step 120 of 2,000  ━━━━━━╌╌╌╌╌╌╌╌╌╌╌╌  6%, 12 min 3 s left`."""
    step = f"step {progress.step:,}"
    if not progress.steps:
        return step
    share = progress.step / progress.steps
    text = f"{step} of {progress.steps:,}  {bar(share)}  {share:.0%}"
    if progress.eta_seconds is None or progress.step >= progress.steps:
        return text
    since = max(0.0, now - progress.time) if progress.time else 0.0
    return f"{text}, {elapsed(max(0.0, progress.eta_seconds - since))} left"


def curves(view: RunView, width: int) -> Iterator[Text]:
    """Yield the loss and the speed, each with its newest value and a sparkline of the newest steps."""
    progress = view.progress
    names = ["loss", *([f"{progress.unit}_per_s"] if progress and progress.unit != "steps" else [])]
    for name in names:
        values = [value for row in view.newest_rows if (value := figure(row, name)) is not None]
        if values:
            value = values[-1]
            shown = f"{value:,.4f}" if name == "loss" else f"{value:,.0f}" if math.isfinite(value) else str(value)
            label = name.replace("_per_s", "/s")
            line = sparkline(values, min(60, width - LABEL - 12))
            yield Text.assemble(f"{label:<{LABEL}}{shown:>8}  ", (line, "cyan"))


def bar(share: float) -> str:
    """Return a bar that is filled up to a share."""
    filled = round(min(1.0, max(0.0, share)) * BAR)
    return "━" * filled + "╌" * (BAR - filled)


def labelled_text(label: str, text: str, width: int) -> Text:
    return Text(f"{label:<{LABEL}}{printable(text)}"[:width])


def labelled_texts(label: str, text: str, width: int, style: str = "") -> Iterator[Text]:
    """Yield the lines of a text beside its label."""
    for place, line in enumerate(wrapped(text, width - LABEL)):
        yield Text(f"{'' if place else label:<{LABEL}}{line}", style=style)


def rule(text: str, width: int) -> str:
    """Return `── output ─────…`."""
    return f"── {text} ".ljust(width, "─")[:width] if text else "─" * width
