"""Write report.html into the run folder during the run: on node 0, every ten minutes and at the end.

Another process does it, at the lowest priority: a run of a million steps takes seconds and hundreds of megabytes.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Final

EVERY: Final = 600.0
"""Seconds between two reports."""

COMMAND: Final = ("-m", "launch_train.report")

LAST_SECONDS: Final = 20.0
"""Time limit for writing the last report. A machine that must stop sooner writes none."""


class ReportWriter:
    """Writes reports of a run folder (gs://…) from a thread. A failure affects only the report."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="report", daemon=True)
        self._thread.start()

    def close(self, seconds: float) -> None:
        """Write the last report, within `seconds`."""
        self._closed.set()
        self._thread.join(min(seconds, LAST_SECONDS))
        if not self._thread.is_alive():
            self._write(min(seconds, LAST_SECONDS))

    def _run(self) -> None:
        while not self._closed.wait(EVERY):
            self._write(EVERY)

    def _write(self, seconds: float) -> None:
        if seconds <= 1.0:
            return
        command = [sys.executable, *COMMAND, self._folder]
        try:
            subprocess.run(["nice", "-n", "19", *command], timeout=seconds, check=False)
        except (OSError, subprocess.TimeoutExpired):
            print("launch: report not written in time", file=sys.stderr, flush=True)
