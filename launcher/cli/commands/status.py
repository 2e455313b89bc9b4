"""`launch status`: show a run, or list the runs in the cloud."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from launcher.cli.help_page import OUTPUT, option
from launcher.cli.options import Output, OutputFormat, Regions
from launcher.cli.ui.text import columns
from launcher.text import rough_duration

if TYPE_CHECKING:
    from launcher.cli.flows.find_run import Run
    from launcher.cli.ui.gpu_monitor import Node
    from launcher.jobs.job import Job
    from launcher.runs.attempts import Entry
    from launcher.runs.watch.loop import Progress

SHOWN = 30
"""Most runs in the list without --all."""
ANSWER_SECONDS = 20.0
"""Timeout of one request to the run's folder."""


def status(
    run: Annotated[
        str | None,
        typer.Argument(metavar="[RUN]", help="A run's name, ID or folder, or a job's number; default: list all."),
    ] = None,
    *,
    regions: Regions = None,
    everything: Annotated[bool, option(OUTPUT, "--all", help=f"List all runs, not only the first {SHOWN}.")] = False,
    output_format: OutputFormat = Output.text,
) -> None:
    """Show a run, or list the runs in the cloud.

    Finds a run of launch local by its path, or in ./runs by its ID or name. Finds all others by the labels of their
    jobs and by the run's folder, so every machine with the same credentials shows the same.
    """
    from launcher.cli.flows.cloud import here
    from launcher.cli.flows.find_local_run import LocalRun
    from launcher.cli.flows.find_run import all_runs, find_run, searched

    if run:
        found = find_run(run, regions)
        if isinstance(found, LocalRun):
            from launcher.cli.flows.local_status import show_local

            show_local(found, output_format)
        else:
            show_run(found, output_format)
        return
    runs = all_runs(here(), searched(regions))
    show_all = everything or output_format is not Output.text  # JSON must not be cut silently
    show_list(runs if show_all else runs[:SHOWN], len(runs), output_format)


# --- The list --------------------------------------------------------------------------------------------------------


def show_list(runs: Sequence[Run], total: int, output: Output) -> None:
    """Print the runs, newest first."""
    if output is not Output.text:
        from launcher.cli.ui.data import job_data
        from launcher.cli.ui.documents import printed

        printed({"runs": [job_data(run.id, run.job) for run in runs]}, output)
        return
    print("\n".join(list_lines(runs)))
    if total > len(runs):
        print(f"… and {total - len(runs)} older runs (--all)")


def list_lines(runs: Sequence[Run]) -> Iterator[str]:
    """Yield a table of at most 80 columns, if the names are short enough."""
    from launcher.cli.ui.job_text import machine_of, provisioning_of

    if not runs:
        yield "No runs."
        return
    rows = [("RUN", "STATE", "MACHINE", "PLACE", "AGE")]
    for run in runs:
        where = f"{machine_of(run.job)} {provisioning_of(run.job)}"
        rows.append((run.id, run.job.state, where, run.job.place, rough_duration(time.time() - run.job.created)))
    yield from columns(rows)


# --- One run ---------------------------------------------------------------------------------------------------------


def show_run(run: Run, output: Output) -> None:
    """Print a run with its attempts, progress and GPUs, and what could not be read of its folder."""
    entries, progress, nodes, problem = read_run_folder(run.job)
    if output is Output.text:
        print("\n".join(lines(run, entries, progress, nodes, problem)))
        return
    if problem:
        print(f"launch: {problem}", file=sys.stderr)
    from launcher.cli.ui.data import attempt_data, job_data, progress_data
    from launcher.cli.ui.documents import printed

    data = job_data(run.id, run.job)
    data["progress"] = progress_data(progress)
    data["nodes"] = [node.to_dict() for node in nodes]
    data["attempts"] = [attempt_data(entry) for entry in entries]
    data["jobs"] = [job_data(run.id, job) for job in run.jobs]
    printed(data, output)


def lines(
    run: Run, entries: Sequence[Entry], progress: Progress | None, nodes: Sequence[Node], problem: str
) -> Iterator[str]:
    """Yield the page, in at most 80 columns."""
    from launcher.cli.ui import gpu_monitor
    from launcher.cli.ui.event_printer import STATES, after, attempted, progress_text
    from launcher.cli.ui.plan_page import LABEL, WIDTH, labelled, wrapped

    job = run.job
    yield from wrapped(f"{run.id}  {STATES.get(job.state, job.state)}{after(job)}", WIDTH)
    yield ""
    for label, text in facts(run):
        yield f"{label:{LABEL}}{text}"  # not wrapped, to be copied
    if job.error:
        yield from labelled("error", job.error.message)
    if progress:
        yield from labelled("progress", progress_text(progress))
    for number, text in enumerate(gpu_monitor.lines(nodes)):
        yield from labelled("" if number else "GPUs", text)
    if problem:
        yield from labelled("folder", problem)
    for number, entry in enumerate(entries):
        yield from labelled("" if number else "attempts", attempted(entry))


def facts(run: Run) -> Iterator[tuple[str, str]]:
    """Yield the facts of the job's request, and its times."""
    from launcher.cli.ui.job_text import console_url, image_of, machine_of, provisioning_of, run_folder_of
    from launcher.cli.ui.text import stamp

    job = run.job
    yield "job", job.name
    yield "", console_url(job)
    yield "machine", f"{machine_of(job)}, {provisioning_of(job)} in {job.place}"
    yield "image", image_of(job)
    yield "output", run_folder_of(job) or "none"
    yield "created", stamp(job.created)
    if job.started:
        yield "started", stamp(job.started)
    if job.ended:
        yield "ended", stamp(job.ended)


def read_run_folder(job: Job) -> tuple[tuple[Entry, ...], Progress | None, tuple[Node, ...], str]:
    """Read the attempts, progress and nodes from the run's folder; the last item is why reading failed, if it did."""
    from launcher.cli.ui.gpu_monitor import read_nodes
    from launcher.cli.ui.job_text import run_folder_of
    from launcher.errors import LaunchError
    from launcher.gcp.storage import open_folder
    from launcher.runs.ledger import BucketLedger
    from launcher.runs.metrics.progress import ProgressReader

    entries: tuple[Entry, ...] = ()
    progress: Progress | None = None
    folder = run_folder_of(job)
    if not folder:
        return entries, None, (), ""
    try:
        storage = open_folder(folder).within(ANSWER_SECONDS)
        entries = BucketLedger(storage).entries()
        number = next((entry.number for entry in entries if entry.job == job.name), 1)
        progress = ProgressReader(storage, job, attempt=number).read_new()
        return entries, progress, read_nodes(storage), ""
    except LaunchError as error:
        return entries, progress, (), error.problem
