"""Print the final lines of a run."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from msgspec.structs import replace

from launcher.cli.options import Output
from launcher.cli.ui.event_printer import attempt_of
from launcher.cli.ui.plan_page import LABEL
from launcher.cli.ui.streams import say
from launcher.errors import LaunchError
from launcher.jobs.job import GONE, Job
from launcher.plan.model import Plan
from launcher.runs.run_folder import read_results, restarts, storage_of
from launcher.services import request
from launcher.text import usd_text

if TYPE_CHECKING:
    from launch_train.runfolder.starts import RunMetrics
    from launcher.runs.find import FoundRun


ENDS = {
    "CANCELLED": "was cancelled after",
    "EXPIRED": "expired after",
    "INTERRUPTED": "was interrupted after",
    "UNKNOWN": "can't be read after",
    GONE: "was deleted after at least",
}
"""Ends that are not failures of the job itself."""


def show_job(job: Job, output: Output, error: BaseException | None = None) -> None:
    """With -o json or yaml, print the last known state of a job that still runs; `error` ends the command."""
    from launcher.cli.ui.data import job_data
    from launcher.cli.ui.documents import printed

    if output is not Output.text:
        printed(job_data(job.run, job), output, error)


def show_gone(plan: Plan, output: Output) -> None:
    """With -o json or yaml, print a run that succeeded and whose job no longer exists."""
    from launcher.cli.ui.documents import printed
    from launcher.cli.ui.run_summary import results_data

    if output is not Output.text:
        results = results_of(plan.run_folder)
        printed({"run": plan.run, "state": "SUCCEEDED", "job": None, "results": results_data(results)}, output)


def show_begun(job: Job, output: Output) -> None:
    """Print a job that continues in the background, with the commands to follow and cancel it."""
    if output is not Output.text:
        show_job(job, output)
        return
    print(f"{job.run} is {job.state} {'on' if job.target == 'on' else 'in'} {job.place}")
    causes = {"on": "a restart of the host", "vm": "a stockout or a preemption"}
    retries = causes.get(job.target, "a stockout")
    print(f"launch follow {job.handle}\n    watches it; needed to start the next attempt after {retries}")
    print(f"launch cancel {job.run}\n    cancels it")


def show_end(
    job: Job, plan: Plan | None, output: Output, error: LaunchError | None = None, *, run: FoundRun | None = None
) -> None:
    """Print how the run ended, its results and its folder; as JSON, of a `run` whose job was watched, its status too.
    `error` is the failure that the command ends with."""
    from launcher.cli.ui.data import job_data, run_document
    from launcher.cli.ui.documents import printed
    from launcher.cli.ui.run_summary import results_data, summary_lines

    folder = request.run_folder(job.request)
    results = results_of(folder)
    count = None
    with suppress(LaunchError):  # its folder cannot be read
        count = restarts(storage) if (storage := storage_of(folder)) else None
    seconds = max(0.0, (job.ended or job.created) - (job.started or job.ended or job.created))
    usd, planned = None, attempt_of(plan, job)
    if plan and planned and planned.usd_per_hour is not None and job.ended is not None:
        usd = planned.usd_per_hour * plan.machine.nodes * seconds / 3600
    if output is Output.text:
        how = ENDS.get(job.state, "")
        known = seconds if job.ended or not job.is_here else None  # a killed supervisor records no end
        summary = (job.run, folder, job.state == "SUCCEEDED", known, results)
        print("\n".join(summary_lines(*summary, how=how, restarts=count or 0)))
        if usd is not None:
            print(f"{'cost':{LABEL}}{usd_text(usd, approx=True)} for the machines of this attempt")
        return
    data = {"seconds": seconds, "usd": usd, "restarts": count, "results": results_data(results)}
    if run:
        ended = replace(run, jobs=(job, *(other for other in run.jobs if other.name != job.name)))
        data = {**run_document(ended), **data}
    printed({**job_data(job.run, job), **data}, output, error)


def results_of(folder: str | None) -> RunMetrics | None:
    """Return the run's metrics, or None if they cannot be read."""
    try:
        return read_results(storage_of(folder))
    except LaunchError as error:
        say(f"cannot read its metrics: {error.problem}")
        return None
