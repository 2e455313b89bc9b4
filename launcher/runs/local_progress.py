"""The progress of a run on this machine from the ends of its newest metrics files: no file is read whole."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path
from typing import Final

from launch_train import runfolder
from launcher.runs.metrics.progress import Progress, logged_steps, summarize_rows
from launcher.services.local.run_folder_job import names_in

TAIL_BYTES: Final = 16_384
"""Bytes read from the end of a part of the metrics, where its newest row is."""
HEAD_BYTES: Final = 16_384
"""Bytes read from the beginning of a start's first part: the `start` event has the number of steps."""
PARTS: Final = 3
"""Number of newest parts that are searched for a row: the last one may contain only events."""


def read_local_progress(folder: Path) -> Progress | None:
    """Return the progress according to the newest row; None: no row yet. Raises OSError, ValueError: unreadable."""
    names = sorted(names_in(folder / runfolder.METRICS))  # zero-padded numbers, in the order of writing
    parts = ((part, name) for name in reversed(names) if (part := runfolder.Part.of(f"{runfolder.METRICS}/{name}")))
    for part, name in islice(parts, PARTS):
        lines = reversed(last_lines(folder / runfolder.METRICS / name))
        records = (record for line in lines for record in runfolder.records(line))
        if row := next((row for row in records if "event" not in row and type(row.get("step")) is int), None):
            first = next(other for other in names if other.startswith(f"{runfolder.start_name(*part[:2])}-"))
            with (folder / runfolder.METRICS / first).open("rb") as file:
                starts = runfolder.records(file.read(HEAD_BYTES))
            counts = (logged_steps(event) for event in starts if event.get("event") == "start")
            return summarize_rows((row,), next(filter(None, counts), None), None)
    return None


def last_lines(path: Path) -> list[bytes]:
    """Return the complete lines in the last TAIL_BYTES of a file."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - TAIL_BYTES))
        text = file.read()
    return (text if size <= TAIL_BYTES else text.partition(b"\n")[2]).splitlines()
