"""How a run went and what to do next."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec.structs import replace

from launch_train.runfolder.run import RunData, read_run
from launcher.diagnosis.job_end import resume_fix, resumed
from launcher.diagnosis.output_cause import CauseFinder
from launcher.errors import LaunchError
from launcher.gcp.storage import read_errors
from launcher.runs.attempts import RUN_ENDS, AttemptEntry
from launcher.runs.logs.folder_logs import TextLogReader
from launcher.runs.story import AttemptSummary, cap_usd, live_of, summarize_attempts
from launcher.services.local.run_folder import start_text

if TYPE_CHECKING:
    from launch_train.common.storage import Storage
    from launcher.jobs.job import Job
    from launcher.runs.context import RunContext
    from launcher.runs.find import FoundRun
    from launcher.runs.logs.line import Line

LONG_WAIT = 600.0
"""Seconds of waiting after which the advice says what the user can do about it."""
TAIL = 200
"""Number of last output lines that are searched for the cause of a failure."""
LAST_LINES = 3
"""Number of them that are shown of a program that has left nothing."""


class RunStory(NamedTuple):
    """A run's attempts, the upper bound of its cost in USD, what to do next, and its records (None: unreadable)."""

    chapters: tuple[AttemptSummary, ...] = ()
    cap: float | None = None
    advice: str = ""
    run: RunData | None = None


def story_of(run: FoundRun, entries: Sequence[AttemptEntry], *, whole: bool = False) -> RunStory:
    """Return the story of a run, from its folder and its job. `whole` reads all metrics."""
    storage = run.storage
    return story_of_job(run.context, read(storage, whole=whole), run.id, run.job, entries, storage, time.time())


def story_of_job(
    context: RunContext,
    records: RunData | None,
    name: str,
    job: Job,
    entries: Sequence[AttemptEntry],
    storage: Storage | None,
    now: float,
) -> RunStory:
    """Return the story of a run with a job that was just polled; `records` and `entries` are those of its folder.
    `now`: Unix seconds."""
    outlives = context.of_run(storage).outlives_client
    number = next((entry.number for entry in reversed(entries) if entry.job == job.name), 0)
    number = number or max((entry.number for entry in entries), default=1)
    live = None
    if outlives or (entries and not job.is_over):  # else the folder alone says how it ended
        live = live_of(job, number, context.project if job.is_over else None, now)
    known = records or RunData(id=name)
    chapters = summarize_attempts(known, now, live)
    if not chapters or job.state == "UNKNOWN":
        advice = f"restore that file, or delete the run: launch rm {job.handle}" if job.error else ""
        return RunStory(chapters, advice=advice, run=records)
    last = chapters[-1]
    if not outlives and storage and last.kind == "failed" and (cause := cause_in_text(storage, last.number)):
        last = replace(last, cause=cause)
        chapters = (*chapters[:-1], last)
    advice = advice_for(job, last) if outlives else advice_here(job, storage, last, known.plan)
    if storage and last.left_nothing:  # then its last lines tell more
        texts = [line.text for line in read_last_output(storage, last.number)]
        texts = [text for text in texts if text.strip() and not text.startswith(("launch: ", "train: "))]
        hint = f"if it should have trained, see its output: launch logs {job.handle}"
        advice = "\n".join([hint, *texts[-LAST_LINES:]])
    return RunStory(chapters, cap_usd(known.plan) if outlives else None, advice, records)


def read(storage: Storage | None, *, whole: bool = False) -> RunData | None:
    """Read a run's folder; None: it has none, or it is unreadable."""
    if storage is None:
        return None
    try:
        with read_errors():
            return read_run(storage, ends_only=not whole)
    except LaunchError:
        return None


def cause_in_text(storage: Storage, attempt: int) -> str:
    """Return the cause of a failure that the last lines of output name, or an empty text."""
    causes = CauseFinder()
    for line in read_last_output(storage, attempt):
        causes.add(line.replica, line.text)
    return str(causes.cause or "")


def read_last_output(storage: Storage, attempt: int) -> list[Line]:
    """Return the last lines of an attempt's output; none: they cannot be read."""
    try:
        return TextLogReader(storage, attempt).read_tail(TAIL)
    except LaunchError:
        return []


def advice_for(job: Job, last: AttemptSummary) -> str:
    """Return what to do about a run whose job outlives its launch, with the commands; empty: nothing."""
    run = job.handle
    if last.state == "waiting":
        wait = "limits.wait in the spec bounds the wait for each placement; "
        return f"{wait}launch cancel {run} ends it" if last.waited >= LONG_WAIT else ""
    if last.state == "running":
        return ""
    if last.kind == "succeeded":
        return f"launch report {run} shows its curves"
    if last.kind not in RUN_ENDS:
        start = job.command if job.is_missing else f"launch follow {run}"
        return f"{start} starts the next attempt, unless another launch does"
    return last.fix if "--resume" in last.fix else f"{last.fix}\n{resume_fix(job)}".strip()


def advice_here(job: Job, storage: Storage | None, last: AttemptSummary, plan: Mapping[str, Any]) -> str:
    """Return what to do about a run that ended with its launch, with the commands; empty: nothing."""
    if not job.is_over or storage is None:
        return ""
    if last.kind == "succeeded":
        return f"launch report {job.handle} --open shows its curves"
    run = plan.get("spec", {}).get("run")
    is_builtin = isinstance(run, Mapping) and not any(run.get(key) for key in ("script", "module", "command"))
    fix = f"fix the error (launch logs {job.handle}), then " if last.kind == "failed" else ""
    return f"{fix}{resumed(job)}: {start_text(storage, is_builtin=is_builtin)}"
