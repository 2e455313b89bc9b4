"""What is left on the screen of a run: how it goes on without us, or how it has ended."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from launcher.cli.options import Output
from launcher.cli.ui.event_printer import attempt_of
from launcher.cli.ui.job_text import run_folder_of
from launcher.cli.ui.plan_page import LABEL
from launcher.errors import LaunchError
from launcher.jobs.job import GONE, Job
from launcher.plan.model import Plan
from launcher.text import usd_text

if TYPE_CHECKING:
    from launch_train.common.storage import Storage
    from launcher.runs.metrics.results import Results


ENDS = {"CANCELLED": "was cancelled after", "EXPIRED": "expired after", GONE: "was deleted: seen to run for"}
"""Ends that are no failures of the job's own."""
WHY = "only then is another place tried where there are no machines"


def show_job(job: Job, output: Output, error: LaunchError | None = None) -> None:
    """For scripts, a job as it was last seen: of a watch that has ended without its end, by `error`."""
    from launcher.cli.ui.data import job_data
    from launcher.cli.ui.documents import printed

    if output is not Output.text:
        printed(job_data(job.run, job), output, error)


def show_gone(made: Plan, output: Output) -> None:
    """For scripts, a run that has succeeded and whose job is no more to be seen."""
    from launcher.cli.ui.documents import printed
    from launcher.cli.ui.run_summary import as_data

    if output is not Output.text:
        found = results_of(made.run_folder)
        printed({"run": made.run, "state": "SUCCEEDED", "job": None, "results": as_data(found)}, output)


def show_begun(job: Job, output: Output) -> None:
    """A job that goes on without us."""
    if output is not Output.text:
        show_job(job, output)
        return
    print(f"{job.run} is {job.state} in {job.place}")
    why = "only then is another place tried, or a preempted run gone on with" if job.zone else WHY
    print(f"launch follow {job.handle}\n    watches it; {why}")
    print(f"launch cancel {job.run}\n    ends it")


def show_end(job: Job, made: Plan | None, output: Output, error: LaunchError | None = None) -> None:
    """Print how the run ended, its results and its folder. `error` is the failure that the command ends with."""
    from launcher.cli.ui.data import job_data
    from launcher.cli.ui.documents import printed
    from launcher.cli.ui.run_summary import as_data, lines

    folder = run_folder_of(job)
    found = results_of(folder)
    restarts = restarts_of(folder)
    seconds = max(0.0, (job.ended or job.created) - (job.started or job.ended or job.created))
    usd = usd_of(job, made, seconds)
    if output is Output.text:
        ended = (job.run, folder, job.state == "SUCCEEDED", seconds, found)
        print("\n".join(lines(*ended, how=ENDS.get(job.state, ""), restarts=restarts or 0)))
        if usd is not None:
            print(f"{'cost':{LABEL}}{usd_text(usd, approx=True)} for the machines of this attempt")
        return
    data = {"seconds": seconds, "usd": usd, "restarts": restarts, "results": as_data(found)}
    printed({**job_data(job.run, job), **data}, output, error)


def results_of(folder: str | None) -> Results | None:
    """The run's metrics, where they can be read."""
    from launcher.cli.flows.rehearsal_folder import read_results

    try:
        return read_results(storage_of(folder))
    except LaunchError as error:
        print(f"launch: its metrics can't be read: {error.problem}", file=sys.stderr)
        return None


def restarts_of(folder: str | None) -> int | None:
    """How often the run's processes were started again; None where its folder can't be read."""
    from launcher.cli.flows.rehearsal_folder import restarts

    try:
        return restarts(storage) if (storage := storage_of(folder)) else None
    except LaunchError:
        return None


def usd_of(job: Job, made: Plan | None, seconds: float) -> float | None:
    """What the attempt's machines cost; None where a price is unknown."""
    planned = attempt_of(made, job)
    if made is None or planned is None or planned.usd_per_hour is None or job.ended is None:
        return None
    return planned.usd_per_hour * made.machine.nodes * seconds / 3600


def storage_of(folder: str | None) -> Storage | None:
    """The run's folder; None where it can't be opened."""
    from launcher.gcp.storage import open_folder

    try:
        return open_folder(folder) if folder else None
    except LaunchError:
        return None
