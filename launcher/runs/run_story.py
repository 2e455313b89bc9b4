"""How a run went and what to do next, for a run in the cloud or on this machine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from launcher.errors import LaunchError
from launcher.runs.story import AttemptSummary, LiveAttempt, cap_usd, live_of, summarize_attempts

if TYPE_CHECKING:
    from launch_train.common.storage import Storage
    from launch_train.report import RunData
    from launcher.jobs.job import Job
    from launcher.runs.attempts import AttemptEntry
    from launcher.runs.find_local_run import LocalRun
    from launcher.runs.run import RunStatus

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


def cloud_story(found: RunStatus, *, whole: bool = False) -> RunStory:
    """Return the story of a run in the cloud, from its folder and its job. `whole` reads all metrics."""
    from launcher.runs.run_folder import storage_of
    from launcher.services import request

    storage = storage_of(request.run_folder(found.job.request))
    run = read(storage, whole=whole)
    story = story_of_job(run, found.run, found.job, found.attempts, time.time())
    return with_output(story, storage, found.job.handle) if storage else story


def story_of_job(run: RunData | None, name: str, job: Job, entries: Sequence[AttemptEntry], now: float) -> RunStory:
    """Return the story of a run with a job that was just polled."""
    from launch_train.report.run_data import RunData
    from launcher.diagnosis import diagnose_end
    from launcher.services import request

    number = next((entry.number for entry in reversed(entries) if entry.job == job.name), 0)
    number = number or max((entry.number for entry in entries), default=1)
    diagnosis = diagnose_end(job, request.context_of_job(job, job.name.split("/")[1])) if job.is_over else None
    live = live_of(job, number, diagnosis)
    known = run or RunData(name, "", {}, (), (), {})
    found = summarize_attempts(known, now, live)
    return RunStory(found, cap_usd(known.plan), cloud_advice(job, found[-1]), run)


def local_story(run: LocalRun, *, is_running: bool, number: int, whole: bool = False) -> RunStory:
    """Return the story of a run on this machine. Raises LaunchError: its folder is unreadable."""
    from launch_train.report import read_run
    from launcher.gcp.storage import open_folder, read_errors
    from launcher.runs.find_local_run import shown

    storage = open_folder(str(run.folder))
    with read_errors():
        records = read_run(storage, ends_only=not whole)
    created = next((entry.entry.get("time") for entry in records.attempts if entry.number == number), None)
    live = None
    if is_running and created:
        live = LiveAttempt(number=number, state="running", created=created, started=created)
    found = summarize_attempts(records, time.time(), live)
    if found and found[-1].kind == "failed" and (cause := cause_in_text(storage, found[-1].number)):
        found = (*found[:-1], replace(found[-1], cause=cause))
    advice = local_advice(run, storage, found[-1]) if found and not is_running else ""
    return with_output(RunStory(found, None, advice, records), storage, shown(run))


def read(storage: Storage | None, *, whole: bool = False) -> RunData | None:
    """Read a run's folder; None: it has none, or it is unreadable."""
    from launch_train.report import read_run
    from launcher.gcp.storage import read_errors

    if storage is None:
        return None
    try:
        with read_errors():
            return read_run(storage, ends_only=not whole)
    except LaunchError:
        return None


def with_output(story: RunStory, storage: Storage, run: str) -> RunStory:
    """Return a story with the program's last lines as advice if the last attempt has left nothing."""
    from launcher.runs.logs.folder_logs import TextLogReader

    if not story.chapters or not story.chapters[-1].left_nothing:
        return story
    try:
        lines = TextLogReader(storage, story.chapters[-1].number).read_tail(TAIL)
    except LaunchError:
        lines = []
    texts = [line.text for line in lines if line.text.strip() and not line.text.startswith(("launch: ", "train: "))]
    return story._replace(advice="\n".join([f"see why it took no step: launch logs {run}", *texts[-LAST_LINES:]]))


def cause_in_text(storage: Storage, attempt: int) -> str:
    """Return the cause of a failure that the last lines of output name, or an empty text."""
    from launcher.diagnosis.output_cause import CauseFinder
    from launcher.runs.logs.folder_logs import TextLogReader

    causes = CauseFinder()
    for line in TextLogReader(storage, attempt).read_tail(TAIL):
        causes.add(line.replica, line.text)
    return str(causes.cause or "")


def cloud_advice(job: Job, last: AttemptSummary) -> str:
    """Return what to do about a run in the cloud, with the commands; empty: nothing."""
    from launcher.jobs.job import command
    from launcher.runs.attempts import RUN_ENDS

    run = job.handle
    if last.state == "waiting":
        wait = "limits.wait in the spec bounds the wait for each placement; "
        return f"{wait}launch cancel {run} ends it" if last.waited >= LONG_WAIT else ""
    if last.state == "running":
        return ""
    if last.kind == "succeeded":
        return f"launch report {run} shows its curves"
    if last.kind not in RUN_ENDS:
        return f"launch follow {run} starts the next attempt, unless another launch does"
    resume = f"{command(vm=job.zone is not None)} --resume {run} resumes from its newest checkpoint"
    return last.fix if "--resume" in last.fix else f"{last.fix}\n{resume}".strip()


def local_advice(run: LocalRun, storage: Storage, last: AttemptSummary) -> str:
    """Return what to do about a run on this machine that has ended."""
    from launcher.gcp.storage import use_errors
    from launcher.runs.find_local_run import shown
    from launcher.services.local.attempts import newest_checkpoint

    if last.kind == "succeeded":
        return f"launch report {shown(run)} --open shows its curves"
    with use_errors():
        step = newest_checkpoint(storage)
    after = "starts from scratch, as there is no checkpoint" if step is None else f"resumes from step {step:,}"
    if last.kind == "failed":
        return f"fix the error (launch logs {shown(run)}), then repeat its launch local command: it {after}"
    return f"repeat its launch local command: it {after}"
