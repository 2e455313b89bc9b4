"""`launch watch`: show runs live."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import threading
import time
import webbrowser
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import Annotated, Final

import typer
from msgspec.structs import replace

from launcher.cli.flows.confirm import other_owner_of
from launcher.cli.flows.find_run import run_or_sweep
from launcher.cli.flows.report import write_report
from launcher.cli.help_page import OUTPUT, option
from launcher.cli.options import Last, Regions, WatchFor
from launcher.cli.ui.event_printer import EventPrinter
from launcher.cli.ui.job_text import console_url
from launcher.cli.ui.keys import Keys, single_keys
from launcher.cli.ui.story_text import story_lines
from launcher.cli.ui.streams import say, unescaped
from launcher.cli.ui.text import printable
from launcher.cli.ui.watch_page import screen, view_state
from launcher.errors import JobFailed, LaunchError, StillRunning
from launcher.runs.find import FoundRun
from launcher.runs.sweep.find import Sweep, active_points
from launcher.runs.watched_runs import RunView, RunWatch, WatchedRun
from launcher.signals import signals_stop

REFRESH_SECONDS: Final = 1.0
"""Between two drawings of the screen: what a drawing costs is most of what a watch costs."""


def watch(
    runs: Annotated[list[str], typer.Argument(metavar="RUN…", help="Names, IDs or folders of runs, or a sweep.")],
    *,
    regions: Regions = None,
    last: Last = False,
    watch_for: WatchFor = None,
    plain: Annotated[bool, option(OUTPUT, "--plain", help="Print lines, as without a terminal.")] = False,
) -> None:
    """Show one or several runs live, until they end.

    Shows progress, curves, GPUs, cost, attempts and the last lines of output. Only watches: launch follow also starts
    the remaining attempts. Keys: q quits, c cancels a run, r opens its report, w its page in the console.
    """
    gc.enable()  # it may run for days
    messages = Messages(are_printed=plain or not is_terminal())
    watched = watched_runs(runs, regions, messages, last)
    watches = [RunWatch(source, messages.printer(source, len(runs))) for source in watched]
    for watch in watches:
        watch.start()
    until = time.monotonic() + watch_for if watch_for is not None else float("inf")
    screen = Screen(watches, messages)
    try:
        with signals_stop():
            if messages.are_printed:
                while (left := [watch for watch in watches if not watch.view.is_over]) and time.monotonic() < until:
                    left[0].join(0.2)
                has_quit = False
            else:
                has_quit = screen.show(until)
                for run, thread in screen.cancelling.items():
                    if thread.is_alive():
                        say(f"waiting until the cancellation of {run} is confirmed")
                        thread.join()
    except KeyboardInterrupt:
        messages.close()
        say(watch_interrupted_text([watch.view for watch in watches], screen.cancelling))
        raise
    finally:
        messages.close()
    for number, view in enumerate(watch.view for watch in watches):  # how each stands now
        lines = story_lines(view.story.chapters, view.story.cap, view.story.advice, view.progress)
        print("\n".join([*[""] * (number > 0), f"{printable(view.id)}  {view_state(view)[0]}", *lines]))
    if not has_quit:
        raise_end([watch.view for watch in watches])


def watched_runs(
    names: Sequence[str], regions: Sequence[str] | None, messages: Messages, last: bool = False
) -> list[WatchedRun]:
    """Find the runs, each once. Raises LaunchError."""
    runs: dict[str, FoundRun] = {}
    for name in names:
        match run_or_sweep(name, regions, last=last):
            case Sweep() as sweep:  # its active points; all of them if none is
                runs |= {run.job.name: run for run in active_points(sweep) or sweep.runs}
            case run:
                runs[run.job.name] = run
    quiet = (replace(run, context=run.context.with_notice(messages.say)) for run in runs.values())
    return [WatchedRun(run, messages.say) for run in quiet]


def is_terminal() -> bool:
    """Return whether a screen can be drawn on stdout."""
    return sys.stdout.isatty() and os.environ.get("TERM", "") not in ("", "dumb")


def watch_interrupted_text(views: Sequence[RunView], cancelling: Container[str]) -> str:
    """Return what an interrupted watch leaves: the runs that the user has cancelled, and their states."""
    cancelled = [view for view in views if view.id in cancelling]
    if not cancelled:
        return "stopped watching; nothing was cancelled"
    lines = [f"requested to cancel {view.id}; last known state: {view_state(view)[0]}" for view in cancelled]
    return "\n".join(["stopped watching", *lines, *(f"launch status {view.id}" for view in cancelled)])


def raise_end(views: Sequence[RunView]) -> None:
    """Raise the error with which the command ends, if any."""
    for view in views:
        if view.error:
            raise view.error
    if still := [view for view in views if not view.is_over]:
        hint = "\n".join(f"launch watch {view.id}" for view in still)
        raise StillRunning(f"{', '.join(view.id for view in still)}: still running", hint)
    if failed := [view for view in views if view.job and view.job.state != "SUCCEEDED"]:
        texts = "; ".join(f"{view.id} {view_state(view)[0]}" for view in failed)
        raise JobFailed(texts, "\n".join(view.story.advice for view in failed if view.story.advice))


class Messages:
    """Prints launch's messages where there is no terminal; on a terminal they go to the page."""

    def __init__(self, *, are_printed: bool) -> None:
        self.are_printed = are_printed
        self.on_screen: Callable[[str], None] = lambda _text: None
        self._printers: list[EventPrinter] = []

    def say(self, text: str) -> None:
        if self.are_printed:
            say(text)
        else:
            self.on_screen(text)

    def printer(self, source: WatchedRun, runs: int) -> Callable[[object], None]:
        """Return the printer of a run's events; with several runs each line names its run."""
        printer = EventPrinter(None, prefix=f"{source.id}  " if runs > 1 else "")
        self._printers.append(printer)
        return lambda event: printer(event) if self.are_printed else None

    def close(self) -> None:
        """End the progress lines."""
        for printer in self._printers:
            printer.close()


class Screen:
    """The screen with its keys."""

    def __init__(self, watches: Sequence[RunWatch], messages: Messages) -> None:
        self._watches = watches
        self._chosen = 0
        self._message = ""
        self._asks: Callable[[], None] | None = None
        """The action that `y` confirms; None: there is no question."""
        self.cancelling: dict[str, threading.Thread] = {}
        """The threads that cancel runs, by run ID; also those that have ended."""
        self.background: threading.Thread | None = None
        """The work that was begun last."""
        messages.on_screen = self._tell

    @property
    def _one(self) -> RunWatch:
        return self._watches[self._chosen]

    def show(self, until: float) -> bool:
        """Draw until all runs have ended or `until`; return whether the user has quit. The terminal is restored."""
        from rich.console import Console
        from rich.live import Live

        console = Console(file=unescaped(sys.stdout), highlight=False)
        with single_keys() as keys, Live(console=console, screen=True, auto_refresh=False) as live:
            while not all(watch.view.is_over for watch in self._watches) and time.monotonic() < until:
                width, height = console.size
                views = [watch.view for watch in self._watches]
                footer, message = self._footer(keys), self._message
                live.update(screen(views, self._chosen, width, height, footer=footer, message=message), refresh=True)
                if self._pressed(keys.read(REFRESH_SECONDS)[:1]):  # arrows and pasted text have more
                    return True
        return False

    def _footer(self, keys: Keys) -> str:
        several = f"  1-{len(self._watches)} choose" if len(self._watches) > 1 else ""
        return f"q quit{several}  c cancel  r report  w console" if keys.are_on else "Ctrl-C quits"

    def _pressed(self, key: str) -> bool:
        """Do what a key means; return whether it is to quit."""
        if not key:
            return False
        confirmed, self._asks, self._message = self._asks, None, ""
        if confirmed and key.lower() == "y":
            confirmed()
            return False
        match key.lower():
            case "q":
                return not confirmed
            case "c":
                self._ask_to_cancel()
            case "r":
                self._in_background("writing the report …", self._open_report)
            case "w":
                self._open_console()
            case digit if digit.isdecimal() and 0 < int(digit) <= len(self._watches):
                self._chosen = int(digit) - 1
        return False

    def _ask_to_cancel(self) -> None:
        watch = self._one
        view, source = watch.view, watch.source
        if view.job is None or view.job.is_over:
            self._message = f"{view.id} is not running."
        else:
            owner = other_owner_of(view.job)
            self._message = f"Cancel {view.id}{f', which {owner}' if owner else ''}? Press y to cancel it."
            self._asks = lambda: self._start_to_cancel(source, watch)

    def _start_to_cancel(self, source: WatchedRun, watch: RunWatch) -> None:
        thread = self._in_background(f"cancelling {source.id} …", lambda: self._cancel(source, watch.view))
        self.cancelling[source.id] = thread

    def _cancel(self, source: WatchedRun, view: RunView) -> str:
        done = source.cancel(view.job, self._tell)
        return f"{view.id} cancelled" if done else f"{view.id} had already ended"

    def _open_report(self) -> str:
        source = self._one.source
        if source.storage is None:
            return f"{source.id} has no run folder."
        is_here = source.newest_job().is_here  # then beside its results
        folder = None if is_here else Path(tempfile.mkdtemp(prefix="launch-report-"), f"{source.id}.html")
        path = write_report({source.id: source.storage}, folder)
        return open_page(path.resolve().as_uri(), str(path))

    def _open_console(self) -> None:
        job = self._one.view.job
        url = console_url(job) if job else ""
        if not url:
            self._message = "A run on this machine has no page in the console."
        else:
            self._in_background("opening the console …", lambda: open_page(url, url))

    def _in_background(self, text: str, work: Callable[[], str]) -> threading.Thread:
        """Do work that takes a while, and show what it returns or its error. Return its thread."""
        self._message = text

        def run() -> None:
            try:
                self._tell(work())
            except LaunchError as error:
                self._tell(f"{error.problem} {error.hint}".strip())

        self.background = threading.Thread(target=run, daemon=True)
        self.background.start()
        return self.background

    def _tell(self, text: str) -> None:
        self._message = text


def open_page(url: str, shown: str) -> str:
    """Open a page in the browser and return what happened. A browser that would draw on this terminal is not used."""
    try:
        is_text_browser = type(webbrowser.get()) is webbrowser.GenericBrowser
    except webbrowser.Error:
        is_text_browser = True
    if not is_text_browser and webbrowser.open(url):
        return f"opened {shown}"
    return f"no browser here; open {shown}"
