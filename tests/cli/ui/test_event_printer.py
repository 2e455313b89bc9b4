"""What a terminal shows while a run is followed."""

from __future__ import annotations

import fcntl
import io
import os
import re
import struct
import sys
import termios
from collections.abc import Callable, Iterator
from typing import IO

import pytest

from launcher.cli.ui.event_printer import EVERY_SECONDS, EventPrinter, progress_text
from launcher.diagnosis import Diagnosis
from launcher.jobs.job import Job
from launcher.runs.driver import AttemptFailed
from launcher.runs.logs.line import Line
from launcher.runs.metrics.progress import Progress
from launcher.runs.watch import LinesPrinted, Note, OutageEnded, OutageStarted, ProgressUpdated, StateChanged

JOB = Job(name="projects/1/locations/us-central1/customJobs/7", region="us-central1", state="RUNNING", created=0.0)


class Terminal(io.StringIO):
    """A stream that shows what a terminal would: it knows \\r and "erase to the end of the line"."""

    def isatty(self) -> bool:
        return True

    @property
    def rows(self) -> list[str]:
        found, column = [""], 0
        for piece in re.findall(r"\x1b\[K|\r|\n|[^\r\n\x1b]+", self.getvalue()):
            if piece == "\n":
                found, column = [*found, ""], 0
            elif piece == "\r":
                column = 0
            elif piece == "\x1b[K":
                found[-1] = found[-1][:column]
            else:
                found[-1] = found[-1][:column] + piece + found[-1][column + len(piece) :]
                column += len(piece)
        return [re.sub(r"\d\d:\d\d:\d\d", "TIME", row) for row in found]


def shown_on(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal in place of stderr. No fixture: pytest puts its own stderr there when the test itself begins."""
    made = Terminal()
    monkeypatch.setattr(sys, "stderr", made)
    return made


def went(step: int, **more: object) -> ProgressUpdated:
    return ProgressUpdated(Progress(step=step, steps=400, **more))  # type: ignore[arg-type]  # fields of Progress


def printed(*texts: str) -> LinesPrinted:
    return LinesPrinted([Line(0.0, "workerpool0-0", text, "INFO") for text in texts])


def test_progress_stays_below_all_other_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = shown_on(monkeypatch)
    tell = EventPrinter(None)
    tell(StateChanged(JOB, None))
    tell(went(1, loss=5.0))
    tell(printed("one", "two"))
    assert terminal.rows == [
        "TIME  running",
        "[workerpool0-0] one",
        "[workerpool0-0] two",
        "TIME  step 1 of 400, loss 5.0000",
    ]
    tell(went(20))
    assert terminal.rows[-1] == "TIME  step 20 of 400"  # in its place, and nothing of the longer one is left
    tell(Note("a note"))
    tell.say("a line of launch's own\nand another")
    rows = ["note      a note", "launch: a line of launch's own", "launch: and another", "TIME  step 20 of 400"]
    assert terminal.rows[3:] == rows


def test_the_last_progress_line_stays_and_output_continues_below(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = shown_on(monkeypatch)
    tell = EventPrinter(None)
    tell(went(400))
    tell.close()
    tell.close()
    print("error: something", file=sys.stderr)
    assert terminal.rows == ["TIME  step 400 of 400", "error: something", ""]


@pytest.fixture
def tty(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], int]]:
    """A terminal of the kernel's with so many columns; called, it answers the other end."""
    ends: list[IO[bytes] | IO[str]] = []

    def make(columns: int) -> int:
        here, there = os.openpty()
        fcntl.ioctl(there, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        ends.extend((os.fdopen(there, "w", encoding="utf-8"), os.fdopen(here, "rb", 0)))
        monkeypatch.setattr(sys, "stderr", ends[0])
        return here

    yield make
    for end in ends:
        end.close()


LONG = {"loss": 2.96, "rate": 123_456_789.0, "unit": "tokens", "eta_seconds": 400_000.0}


@pytest.mark.parametrize(("columns", "seen"), [(50, 49), (80, 79), (0, 79), (200, 90)])
def test_a_long_progress_line_is_truncated(columns: int, seen: int, tty: Callable[[int], int]) -> None:
    other = tty(columns)
    EventPrinter(None)(went(123_456_789, **LONG))
    text = os.read(other, 1000).decode()
    assert text.startswith("\r\x1b[K")
    assert len(text.removeprefix("\r\x1b[K")) == min(seen, len(progress_text(went(123_456_789, **LONG).progress)) + 10)


def test_without_a_terminal_progress_is_printed_at_intervals(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr("launcher.cli.ui.event_printer.time.monotonic", lambda: now[0])
    tell = EventPrinter(None)
    for step in range(100):
        tell(went(step))
        now[0] += 10
    tell.close()
    shown = capsys.readouterr().err.splitlines()
    assert len(shown) == 1 + 99 * 10 // EVERY_SECONDS
    assert "\x1b" not in "".join(shown)


def test_outages_fit_into_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    tell = EventPrinter(None)
    tell(OutageStarted(0.0, f"Vertex AI does not respond: {'why ' * 40}\nTry again in a moment.", "lines"))
    tell(OutageEnded(400_000.0, "lines"))
    shown = capsys.readouterr().err.splitlines()
    assert max(map(len, shown)) <= 80
    assert shown[0].startswith("trouble   log lines temporarily unavailable; the job is still running")
    assert shown[-2] == "          Try again in a moment."
    assert shown[-1].endswith("log lines available again after 4 d 15 h")


def test_control_characters_are_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = shown_on(monkeypatch)
    tell = EventPrinter(None)
    tell(Note("\x1b]0;title\x07"))
    tell(AttemptFailed(job=JOB, number=1, diagnosis=Diagnosis(scope="permanent", kind="user", cause="\x1b[2J", fix="")))
    assert terminal.rows[:2] == ["note      \\x1b]0;title\\x07", "ended     \\x1b[2J"]


def test_without_a_terminal_the_last_step_is_always_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """A short job is over before another line about its progress is due."""
    tell = EventPrinter(None)
    for step in (20, 120, 400):
        tell(went(step, loss=5.0))
    shown = [line.partition("  ")[2] for line in capsys.readouterr().err.splitlines()]
    assert shown == ["step 20 of 400, loss 5.0000", "step 400 of 400, loss 5.0000"]
