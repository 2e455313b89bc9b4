"""How a run went, in plain sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from launch_train.common.text import elapsed
from launch_train.report.events import event_rows
from launch_train.runfolder.run import RunData
from launcher.cli.ui.event_printer import progress_text
from launcher.cli.ui.text import WIDTH, columns, labelled, printable
from launcher.runs.metrics.progress import Progress
from launcher.runs.story import AttemptSummary, Resumed, total_usd
from launcher.text import plural, usd_text

LEAST_WAIT = 10.0
"""Waits shorter than this, in seconds, are not mentioned."""


def attempt_text(attempt: AttemptSummary) -> str:
    """Return an attempt in one sentence.

    `queued 14 min 3 s, ran 2 h 10 min on 2 × a3-highgpu-8g (spot in us-central1), preempted at step 4,200`.
    """
    resumed = [resumed_text(attempt.resumed, attempt.lost_usd)] if attempt.resumed else []
    restarts = [
        f"{'preempted' if each.was_preempted else 'restarted'} at step {each.stopped_at:,}, {resumed_text(each)}"
        for each in attempt.restarts
    ]
    ran = [*restarts, *_running(attempt)] if attempt.state == "running" else [*_running(attempt), *restarts]
    parts = [*_waiting(attempt), *resumed, *ran, *_end_text(attempt)]
    text = ", ".join(parts)
    return text[:1].upper() + text[1:]


def _waiting(attempt: AttemptSummary) -> Iterator[str]:
    if attempt.state == "waiting":
        yield f"waiting for {_machines_text(attempt)} for {elapsed(attempt.waited)}"
    elif attempt.waited >= LEAST_WAIT:
        yield f"queued {elapsed(attempt.waited)}" + ("" if attempt.ran else f" for {_machines_text(attempt)}")


def _running(attempt: AttemptSummary) -> Iterator[str]:
    where = f" on {_machines_text(attempt)}" if attempt.place else ""
    if attempt.state == "running":
        yield f"running for {elapsed(attempt.ran)}{where}"
    elif attempt.ran:
        yield f"ran {elapsed(attempt.ran)}{where}"


def _end_text(attempt: AttemptSummary) -> Iterator[str]:
    at = f" at step {attempt.reached:,}" if attempt.reached is not None else ""
    match attempt.kind:
        case "preempted":
            yield f"preempted{at}"
        case "succeeded":
            yield "succeeded without a recorded step" if attempt.left_nothing else f"succeeded{at}"
        case "cancelled" if attempt.cause == "it was cancelled":
            yield f"cancelled{at}"
        case "cancelled" if not attempt.ran:
            yield (attempt.cause or "cancelled") + (f" ({attempt.place})" if attempt.place else "")
        case "" if attempt.state == "interrupted":
            was_requested = attempt.place and not attempt.ran and not attempt.waited
            yield f"requested ({attempt.place}), no job is recorded" if was_requested else f"interrupted{at}"
        case "":
            yield from (f"ended{at}",) if attempt.state == "ended" else ()
        case _ if attempt.ran:
            yield f"ended{at}: {attempt.cause or attempt.kind}"
        case _:
            where = "" if attempt.waited >= LEAST_WAIT or not attempt.place else f" ({attempt.place})"
            yield f"refused{where}: {attempt.cause or attempt.kind}"


def _machines_text(attempt: AttemptSummary) -> str:
    if attempt.place == f"standard in {attempt.machine.rpartition(' × ')[2]}":  # a host, which is its own place
        return attempt.machine
    return f"{attempt.machine or 'a machine'} ({attempt.place})" if attempt.place else attempt.machine or "machines"


def resumed_text(resumed: Resumed, usd: float | None = None) -> str:
    """Return `resumed from step 4,000 (200 steps lost, ≈$1.30)`."""
    cost = f", {usd_text(usd, approx=True)}" if usd and usd >= 0.005 else ""
    lost = f"{plural(resumed.lost, 'step')} lost{cost}" if resumed.lost else "no step lost"
    if resumed.resumed_from == 0:
        return f"started from scratch ({lost})"
    return f"resumed from step {resumed.resumed_from:,} ({lost})"


def cost_text(attempts: Sequence[AttemptSummary], cap: float | None) -> str:
    """Return `≈$31.00 so far, at most $60.00`; empty: nothing was paid for, or on this machine."""
    if not any(attempt.ran and attempt.place for attempt in attempts):
        return ""
    usd = total_usd(attempts)
    spent = "price unknown" if usd is None else usd_text(usd, approx=True)
    so_far = " so far" if attempts[-1].state in ("waiting", "running") else ""
    return f"{spent}{so_far}" + (f" of at most {usd_text(cap)}" if cap else "")


def story_lines(
    story: Sequence[AttemptSummary], cap: float | None, advice: str, progress: Progress | None
) -> Iterator[str]:
    """Yield the attempts, the progress, the cost and what to do next, in at most 80 columns."""
    label = "attempts" if len(story) > 1 else "attempt"
    for number, attempt in enumerate(story):
        count = f"{attempt.number}. " if len(story) > 1 else ""
        yield from labelled("" if number else label, f"{count}{attempt_text(attempt)}")
    if progress and story and story[-1].state not in ("waiting", "running"):
        progress = replace(progress, eta_seconds=None)
    if progress:
        yield from labelled("progress", progress_text(progress))
    if cost := cost_text(story, cap):
        yield from labelled("cost", cost)
    for number, text in enumerate(advice.splitlines()):
        yield from labelled("" if number else "to do", text)


def event_lines(run: RunData | None) -> Iterator[str]:
    """Yield all events of a run, a line each, cut at 80 columns."""
    rows = [[printable(cell) for cell in row] for row in event_rows(run)] if run else []
    yield ""
    if not rows:
        yield "No events."
        return
    head = ["TIME (UTC)", "START", "STEP", "EVENT", ""]
    yield from (line if len(line) <= WIDTH else line[: WIDTH - 1] + "…" for line in columns([head, *rows]))
