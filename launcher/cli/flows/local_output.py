"""Print the output of a run on this machine while it is running: `launch logs` and `launch follow`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

import launcher.clock
from launcher.cli.options import Output
from launcher.errors import JobFailed, StillRunning, UsageError
from launcher.gcp.storage import open_folder, use_errors
from launcher.runs.logs.folder_logs import TextLogReader
from launcher.services.local.attempts import newest_attempt
from launcher.services.local.folder_lock import is_taken

if TYPE_CHECKING:
    from launcher.runs.find_local_run import LocalRun
    from launcher.runs.logs.line import Line

POLL_SECONDS: Final = 1.0
ENDS: Final = {"FAILED": "failed", "CANCELLED": "was cancelled", "INTERRUPTED": "was interrupted"}


def show_lines(run: LocalRun, output: Output, *, tail: int | None, follow: bool) -> None:
    """Print the lines of the newest attempt, or the last `tail`; with `follow`, new ones until it ends."""
    from launcher.cli.flows.print_logs import print_line

    if output is Output.yaml:
        raise UsageError("-o yaml is not available for logs", "Use -o text or -o json.")

    def show(lines: Iterable[Line]) -> None:
        for line in lines:
            print_line(line, output)
        sys.stdout.flush()

    reader = open_text(run)
    show(reader.read_existing() if tail is None else reader.read_tail(tail))
    if follow:
        watch_lines(run, reader, show)


def follow_local(run: LocalRun, output: Output, *, watch_seconds: float | None = None) -> None:
    """Print the new lines of a run until it ends, then how it ended.

    Raises JobFailed: it did not succeed; StillRunning: `watch_seconds` have passed.
    """
    from launcher.cli.flows.local_status import read_snapshot, show_local
    from launcher.cli.ui.line_printer import LinePrinter

    if is_taken(run.folder):
        reader, printer = open_text(run), LinePrinter()
        reader.skip_existing()

        def show(lines: Iterable[Line]) -> None:
            for line in lines:
                printer(line.replica, line.text)

        if not watch_lines(run, reader, show, watch_seconds):
            raise StillRunning(f"{run.id} is still running", f"launch follow {run.id} continues to watch it")
    state = read_snapshot(run).state
    error = (
        None
        if state == "SUCCEEDED"
        else JobFailed(f"{run.id} {ENDS.get(state, state)}", f"launch logs {run.id} --tail 50")
    )
    show_local(run, output, error)
    if error:
        raise error


def watch_lines(
    run: LocalRun, reader: TextLogReader, show: Callable[[Iterable[Line]], None], seconds: float | None = None
) -> bool:
    """Pass new lines on until the run ends; return False if `seconds` passed before."""
    clock = launcher.clock.REAL
    until = float("inf") if seconds is None else clock.now() + seconds
    while True:
        is_running = is_taken(run.folder)  # before the lines are read: the last ones are not missed
        while lines := reader.read_new():
            show(lines)
        if not is_running:
            return True
        if clock.now() >= until:
            return False
        clock.sleep(min(POLL_SECONDS, max(0.0, until - clock.now())))


def open_text(run: LocalRun) -> TextLogReader:
    """Return the reader of the newest attempt's output. Raises LaunchError."""
    storage = open_folder(str(run.folder))
    with use_errors():
        return TextLogReader(storage, newest_attempt(storage) or None)
