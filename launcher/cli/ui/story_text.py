"""How a run went, in plain sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from launch_train.common.text import elapsed
from launcher.cli.ui.event_printer import progress_text
from launcher.cli.ui.plan_page import WIDTH, labelled, printable
from launcher.cli.ui.text import columns
from launcher.runs.story import total_usd
from launcher.text import plural, usd_text

if TYPE_CHECKING:
    from launch_train.runfolder.run import RunData
    from launcher.runs.metrics.progress import Progress
    from launcher.runs.story import AttemptSummary, Resumed

LEAST_WAIT = 10.0
"""Waits shorter than this, in seconds, are not mentioned."""


def attempt_text(one: AttemptSummary) -> str:
    """Return an attempt in one sentence.

    `queued 14 min 3 s, ran 2 h 10 min on 2 × a3-highgpu-8g (spot in us-central1), preempted at step 4,200`.
    """
    resumed = [resumed_text(one.resumed, one.lost_usd)] if one.resumed else []
    restarts = [
        f"{'preempted' if each.was_preempted else 'restarted'} at step {each.stopped_at:,}, {resumed_text(each)}"
        for each in one.restarts
    ]
    ran = [*restarts, *_running(one)] if one.state == "running" else [*_running(one), *restarts]
    parts = [*_waiting(one), *resumed, *ran, *_end(one)]
    text = ", ".join(parts)
    return text[:1].upper() + text[1:]


def _waiting(one: AttemptSummary) -> Iterator[str]:
    if one.state == "waiting":
        yield f"waiting for {_machines(one)} for {elapsed(one.waited)}"
    elif one.waited >= LEAST_WAIT:
        yield f"queued {elapsed(one.waited)}" + ("" if one.ran else f" for {_machines(one)}")


def _running(one: AttemptSummary) -> Iterator[str]:
    where = f" on {_machines(one)}" if one.place else ""
    if one.state == "running":
        yield f"running for {elapsed(one.ran)}{where}"
    elif one.ran:
        yield f"ran {elapsed(one.ran)}{where}"


def _end(one: AttemptSummary) -> Iterator[str]:
    at = f" at step {one.reached:,}" if one.reached is not None else ""
    match one.kind:
        case "preempted":
            yield f"preempted{at}"
        case "succeeded":
            yield "exited with 0 without a step or a checkpoint" if one.left_nothing else f"succeeded{at}"
        case "cancelled" if one.cause == "it was cancelled":
            yield f"cancelled{at}"
        case "cancelled" if not one.ran:
            yield (one.cause or "cancelled") + (f" ({one.place})" if one.place else "")
        case "" if one.state == "interrupted":
            asked = one.place and not one.ran and not one.waited
            yield f"requested ({one.place}), no job is recorded" if asked else f"interrupted{at}"
        case "":
            yield from (f"ended{at}",) if one.state == "ended" else ()
        case _ if one.ran:
            yield f"ended{at}: {one.cause or one.kind}"
        case _:
            where = "" if one.waited >= LEAST_WAIT or not one.place else f" ({one.place})"
            yield f"refused{where}: {one.cause or one.kind}"


def _machines(one: AttemptSummary) -> str:
    return f"{one.machine or 'a machine'} ({one.place})" if one.place else one.machine or "machines"


def resumed_text(resumed: Resumed, usd: float | None = None) -> str:
    """Return `resumed from step 4,000 (200 steps lost, ≈$1.30)`."""
    cost = f", {usd_text(usd, approx=True)}" if usd and usd >= 0.005 else ""
    lost = f"{plural(resumed.lost, 'step')} lost{cost}" if resumed.lost else "no step lost"
    if resumed.resumed_from == 0:
        return f"started from scratch ({lost})"
    return f"resumed from step {resumed.resumed_from:,} ({lost})"


def cost_text(found: Sequence[AttemptSummary], cap: float | None) -> str:
    """Return `≈$31.00 so far, at most $60.00`; empty: nothing was paid for, or on this machine."""
    if not any(one.ran and one.place for one in found):
        return ""
    usd = total_usd(found)
    spent = "price unknown" if usd is None else usd_text(usd, approx=True)
    so_far = " so far" if found[-1].state in ("waiting", "running") else ""
    return f"{spent}{so_far}" + (f" of at most {usd_text(cap)}" if cap else "")


def story_lines(
    story: Sequence[AttemptSummary], cap: float | None, advice: str, progress: Progress | None
) -> Iterator[str]:
    """Yield the attempts, the progress, the cost and what to do next, in at most 80 columns."""
    label = "attempts" if len(story) > 1 else "attempt"
    for number, one in enumerate(story):
        count = f"{one.number}. " if len(story) > 1 else ""
        yield from labelled("" if number else label, f"{count}{attempt_text(one)}")
    if progress and story and story[-1].state not in ("waiting", "running"):
        progress = replace(progress, eta_seconds=None)
    if progress:
        yield from labelled("progress", progress_text(progress))
    if cost := cost_text(story, cap):
        yield from labelled("cost", cost)
    for number, text in enumerate(advice.splitlines()):
        yield from labelled("" if number else "to do", text)


def story_data(story: Sequence[AttemptSummary], cap: float | None, advice: str) -> dict[str, Any]:
    """Return the story for scripts: a sentence for each attempt, cost and upper bound in USD, what to do next."""
    usd = total_usd(story) if any(one.place for one in story) else None
    return {"story": [*map(attempt_text, story)], "usd": usd, "usd_at_most": cap, "to_do": advice}


def event_lines(run: RunData | None) -> Iterator[str]:
    """Yield all events of a run, a line each, cut at 80 columns."""
    from launch_train.report.events import event_rows

    rows = [[printable(cell) for cell in row] for row in event_rows(run)] if run else []
    yield ""
    if not rows:
        yield "No events."
        return
    head = ["TIME (UTC)", "START", "STEP", "EVENT", ""]
    yield from (line if len(line) <= WIDTH else line[: WIDTH - 1] + "…" for line in columns([head, *rows]))


def events_data(run: RunData | None) -> list[dict[str, str]]:
    """Return the events of a run for scripts: time, start, step, kind and details, as texts without secrets."""
    from launch_train.report.events import event_rows

    return [row._asdict() for row in event_rows(run)] if run else []
