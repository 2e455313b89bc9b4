"""Run a planned sweep, and print what happens."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from launcher.cli.flows.cloud import of_project
from launcher.cli.flows.confirm import confirm_cost
from launcher.cli.flows.launch import LaunchOptions
from launcher.cli.options import Flags, Output
from launcher.cli.ui.documents import printed
from launcher.cli.ui.event_printer import STATES, EventPrinter, after, time_of_day
from launcher.cli.ui.streams import say
from launcher.cli.ui.text import utc_stamp
from launcher.errors import JobFailed, LaunchError, NoCapacity, NotAuthorised, StillRunning
from launcher.plan.model import Plan
from launcher.runs.sweep.events import PointChanged, PointRun, cause_of
from launcher.runs.sweep.in_cloud import CloudSweep
from launcher.runs.sweep.on_this_machine import LocalSweep
from launcher.runs.sweep.plan import SweepPlan
from launcher.runs.sweep.submit import point_preparer
from launcher.signals import signals_stop
from launcher.text import plural


class SweepPrinter:
    """Prints a line to stderr when a point starts, changes its state, or ends. May be called on several threads."""

    def __init__(self, sweep: SweepPlan) -> None:
        self._width = len(str(len(sweep.points)))
        self._count = len(sweep.points)
        self._lock = threading.Lock()

    def say(self, text: str) -> None:
        """Print a message of launch, of one or more lines."""
        with self._lock:
            say(text)

    def __call__(self, event: PointChanged) -> None:
        run, when = event.run, time_of_day()
        if run.had_ended:
            when = " " * len(when)
            cause = f": {cause_of(run)}" if run.error and run.state != "cancelled" else ""
            text = f"already {run.state}{f' on {utc_stamp(run.ended)}' if run.ended else ''}{cause}"
        elif event.kind == "ended":
            cause = f": {run.error.problem.splitlines()[0]}" if run.error and run.state != "cancelled" else ""
            text = f"{run.state}{after(run.job) if run.job else ''}{cause}"
        elif event.kind == "state" and run.job:
            text = STATES.get(run.job.state, run.job.state)
        else:
            place = f" in {run.job.place}" if run.job else ""
            text = f"{'started' if event.kind == 'started' else 'already started'}{place}"
        number = f"{run.point.number:>{self._width}}/{self._count}"
        with self._lock:
            print(f"{when}  {number}  {run.point.run}  {text}  ({run.point.text})", file=sys.stderr, flush=True)


def run_sweep(
    sweep: SweepPlan,
    options: LaunchOptions,
    output: Output,
    spec: Path | None,
    flags: Flags,
    *,
    max_parallel: int | None,
    retry_failed: bool,
) -> None:
    """Run a planned sweep and print its result. Raises LaunchError: all points failed, or none could be started."""
    printer = SweepPrinter(sweep)
    for warning in sweep.warnings:
        printer.say(warning)
    printer.say(f"{sweep.name}: {plural(len(sweep.points), 'point')}")
    running: LocalSweep | CloudSweep
    if sweep.target == "local":
        running = LocalSweep(sweep, printer, max_parallel=max_parallel, retry_failed=retry_failed)
        start = running.run
    else:
        cloud = of_project(sweep.project)
        prepare = point_preparer(sweep, cloud, EventPrinter(None), options.submit)
        confirm = cost_question(sweep, options, printer)
        running = CloudSweep(sweep, cloud, prepare, printer, printer.say, max_parallel, retry_failed, confirm)
        start = partial(running.run, detach=options.detach, seconds=options.watch_seconds)
    error: LaunchError | None = None
    try:
        with signals_stop():
            start()
    except StillRunning as still:
        error = still
    except KeyboardInterrupt as stop:
        text = sweep_interrupted_text(sweep, running.runs)
        stop.add_note(text)
        printer.say(text)
        if output is not Output.text:
            show_result(sweep, running.runs, output, stop)
        raise
    error = error or common_error(sweep, running.runs)
    show_result(sweep, running.runs, output, error)
    if error:
        raise error


def cost_question(sweep: SweepPlan, options: LaunchOptions, printer: SweepPrinter) -> Callable[[Plan], None]:
    """Return the question about the cost of all points, which is asked once."""
    is_accepted = options.yes

    def confirm(plan: Plan) -> None:
        nonlocal is_accepted
        if not is_accepted:
            confirm_cost(sweep.with_all_costs(plan), limited=sweep.is_limited, say=printer.say, what="sweep")
            is_accepted = True

    return confirm


def sweep_interrupted_text(sweep: SweepPlan, runs: Sequence[PointRun]) -> str:
    """Return what continues after the watch was interrupted, and the commands for it."""
    if sweep.target == "local":
        return "interrupted; all points were stopped\nthe same command continues the sweep"
    active = sum(run.state == "active" for run in runs)
    waiting = sum(run.state == "waiting" for run in runs)
    what = f"{plural(active, 'job')} {'continues' if active == 1 else 'continue'}" if active else "no job is known"
    not_started = f"; {plural(waiting, 'point')} not started" if waiting else ""
    return (
        f"stopped watching; {what}{not_started}\n"
        f"the same command continues the sweep; launch cancel {sweep.name} cancels it"
    )


def common_error(sweep: SweepPlan, runs: Sequence[PointRun]) -> LaunchError | None:
    """Return the error if all points failed: with their common cause, or the most frequent one."""
    if all(run.state == "cancelled" for run in runs):
        again = "The same command" if sweep.target == "local" else "The same command with --retry-failed"
        return JobFailed(f"all points of {sweep.name} were cancelled", f"{again} runs them again.")
    failed = [run for run in runs if run.state in ("failed", "cancelled", "unknown")]
    if len(failed) < len(runs):
        return None
    (cause, count), *_ = Counter(map(cause_of, failed)).most_common(1)
    first = next(run for run in failed if cause_of(run) == cause)
    kinds = {type(run.error) for run in failed if isinstance(run.error, NotAuthorised | NoCapacity)}
    kind = next(iter(kinds)) if len(kinds) == 1 and count == len(failed) else JobFailed
    of = "all" if count == len(failed) else f"{count} of them"
    folder = first.point.plan.run_folder
    hint = f"launch logs {first.point.run} shows the output of one" if first.job else f"one run folder: {folder}"
    return kind(f"all {plural(len(failed), 'point')} failed; cause of {of}: {cause}", hint)


def show_result(sweep: SweepPlan, runs: Sequence[PointRun], output: Output, error: BaseException | None) -> None:
    """Print how many points ended how; as JSON, each point."""
    counts = Counter(run.state for run in runs)
    if output is Output.text:
        print(f"{sweep.name}: {', '.join(f'{count} {state}' for state, count in counts.items())}")
        if counts["succeeded"] or counts["active"]:
            print(f"launch report {sweep.name} compares the points")
        return
    points = [
        {
            "number": run.point.number,
            "set": run.point.values,
            "run": run.point.run,
            "run_folder": run.point.plan.run_folder,
            "state": run.state.upper(),
            "job": run.job.name if run.job else None,
            "cause": cause_of(run) or None,
        }
        for run in runs
    ]
    data = {"sweep": sweep.name, "target": sweep.target, "project": sweep.project, "points": points, "error": None}
    printed(data, output, error)
