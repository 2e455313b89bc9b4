"""Progress on stderr: lines in a log, bars where somebody looks."""

from __future__ import annotations

import io
import sys

import pytest

from launcher.cli.ui.progress_bars import Bars, Lines, progress


def test_without_a_terminal_each_finished_layer_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with progress() as shown:
        assert type(shown) is Lines  # nobody looks: stderr is no terminal here
        shown.line("appending")
        for done in (0, 5_000, 10_000, 10_000):
            shown.layer("code", done, 10_000)
    assert capsys.readouterr() == ("", "launch: appending\nlaunch: uploaded code (10 kB)\n")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_bars_end_full_and_let_lines_through(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    for name, value in (("TERM", "xterm"), ("COLUMNS", "80")):
        monkeypatch.setenv(name, value)
    with progress() as shown:
        assert type(shown) is Bars
        shown.line("appending [the code]")
        shown.layer("code", 5_000, 10_000)
        shown.line("still [here]")
        shown.layer("code", 10_000, 10_000)
    text = screen.getvalue()
    assert "launch: appending [the code]\n" in text
    assert "still [here]" in text
    assert "10.0/10.0 kB" in text
