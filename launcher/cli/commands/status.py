"""`launch status`: show a run, or list all runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import typer

from launch_train.report.events import event_rows
from launcher.cli.commands.runs import show_runs
from launcher.cli.flows.find_run import run_or_sweep
from launcher.cli.help_page import OUTPUT, option
from launcher.cli.options import AllRuns, Last, Mine, Output, OutputFormat, Regions
from launcher.cli.ui import gpu_monitor
from launcher.cli.ui.data import status_data
from launcher.cli.ui.documents import printed
from launcher.cli.ui.event_printer import STATES, after
from launcher.cli.ui.job_text import console_url, machine_of, place_of, provisioning_of
from launcher.cli.ui.story_text import event_lines, story_lines
from launcher.cli.ui.streams import say
from launcher.cli.ui.sweep_page import show_points
from launcher.cli.ui.text import LABEL, WIDTH, labelled, utc_stamp, wrapped
from launcher.errors import UsageError
from launcher.jobs.job import SLURM_LABEL, Job
from launcher.runs.find import FoundRun
from launcher.runs.run import RunStatus, status_of
from launcher.runs.run_list import RunFilter
from launcher.runs.run_story import RunStory, story_of
from launcher.runs.sweep.find import Sweep
from launcher.services import request
from launcher.text import relative


def status(
    run: Annotated[
        str | None,
        typer.Argument(metavar="[RUN]", help="A run's name, ID, folder or spec, or a job's number; default: list all."),
    ] = None,
    *,
    regions: Regions = None,
    last: Last = False,
    mine: Mine = False,
    events: Annotated[bool, option(OUTPUT, "--events", help="Print all events of the run too.")] = False,
    everything: AllRuns = False,
    output_format: OutputFormat = Output.text,
) -> None:
    """Show a run or a sweep, or list all runs as `launch runs` does.

    Reports each attempt: how long it waited and ran, what was lost, why it ended, and what to do next. Finds a local
    run by its path, or in ./runs by its ID or name. Finds a run in the cloud by the labels of its jobs or by its
    folder, from any machine with the same credentials.
    """
    if run is None:
        if events:
            raise UsageError("--events needs a run", "Name it: launch status RUN --events")
        show_runs(RunFilter(mine=mine), output_format, regions=regions, everything=everything)
        return
    match run_or_sweep(run, regions, last=last):
        case Sweep() as sweep:
            if events:
                raise UsageError(f"--events needs a run, and {run} is a sweep", f"launch status {run} lists its runs.")
            show_points(sweep, output_format)
        case found:
            show_run(found, output_format, events=events)


def show_run(run: FoundRun, output: Output, *, events: bool = False) -> None:
    """Print a run with its story, progress and GPUs, and what could not be read of its folder."""

    status = status_of(run)
    story = story_of(run, status.attempts, whole=events)
    if output is Output.text:
        print("\n".join([*status_lines(status, story), *(event_lines(story.run) if events else ())]))
        return
    if status.problem:
        say(status.problem)
    rows = event_rows(story.run) if story.run and events else ()  # texts without secrets
    printed(status_data(status, story) | ({"events": [row._asdict() for row in rows]} if events else {}), output)


def status_lines(status: RunStatus, story: RunStory) -> Iterator[str]:
    """Yield the page, in at most 80 columns."""
    job = status.job
    yield from wrapped(f"{status.run}  {STATES.get(job.state, job.state)}{after(job)}", WIDTH)
    yield ""
    yield from story_lines(story.chapters, story.cap, story.advice, status.progress)
    for label, text in gpu_monitor.labelled_gpu_lines(status.nodes):
        yield from labelled(label, text)
    if job.reason:
        yield from labelled("waits", job.reason)
    if job.error and not job.is_here:
        yield from labelled("error", job.error.message)
    if status.problem:
        yield from labelled("problem" if job.is_here else "folder", status.problem)
    yield ""
    for label, text in job_facts(job):
        yield f"{label:{LABEL}}{text}"  # not wrapped, to be copied


def job_facts(job: Job) -> Iterator[tuple[str, str]]:
    """Yield where the job is, the facts of its request, and its times."""
    folder = request.run_folder(job.request) or "none"
    if job.is_here:
        yield "machine", place_of(job)
        yield "folder", relative(folder)
    else:
        yield "job", job.name
        if number := job.labels.get(SLURM_LABEL):
            yield "slurm", f"job {number}"
        if url := console_url(job):
            yield "", url
        where = "" if job.target == "on" else f", {provisioning_of(job)} in {place_of(job)}"
        yield "machine", f"{machine_of(job)}{where}"
        if image := request.read(job.request).image:
            yield "image", image
        yield "output", folder
        yield "created", utc_stamp(job.created)
    if job.started:
        yield "started", utc_stamp(job.started)
    if job.ended:
        yield "ended", utc_stamp(job.ended)
