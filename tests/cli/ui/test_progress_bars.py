"""Progress on stderr: lines in a log, bars where somebody looks."""

from __future__ import annotations

import io
import sys
import threading
import time

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


def test_the_bars_of_layers_that_begin_at_once_are_one_display(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = []

    class Display:
        def __init__(self) -> None:
            begun.append(self)
            time.sleep(0.05)  # as long as rich takes to be loaded

        def add_task(self, name: str, total: int) -> str:
            return name

        def update(self, task: str, completed: int, total: int) -> None:
            pass

        def start(self) -> None:
            pass

        def stop(self) -> None:
            pass

    monkeypatch.setattr("launcher.cli.ui.progress_bars.bars", Display)
    with Bars() as shown:
        threads = [threading.Thread(target=shown.layer, args=(name, 1, 2)) for name in "abc"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(begun) == 1
