"""The events of a run as rows of text, without secrets."""

from __future__ import annotations

import time
from collections.abc import Container, Iterator
from typing import Any, NamedTuple

from launch_train.report.settings import shown_text
from launch_train.runfolder.run import RunData

MOST_DETAILS = 300
"""Most characters of an event's details."""


class EventRow(NamedTuple):
    """An event as text: UTC time, attempt and start of its processes (`1.0`), step, kind, everything else."""

    time: str
    start: str
    step: str
    kind: str
    details: str


def event_rows(run: RunData, without: Container[str] = ()) -> Iterator[EventRow]:
    """Yield the events of a run, except those of the kinds in `without`, the oldest first."""
    for start in run.starts:
        for event in start.events:
            if event["event"] not in without:
                details = {name: value for name, value in event.items() if name not in ("event", "time", "step")}
                if event["event"] == "samples":
                    details = {
                        name: len(value) if isinstance(value, list) else value for name, value in details.items()
                    }
                text = ", ".join(f"{name} {shown_text(name, value)}" for name, value in details.items())
                yield EventRow(
                    clock_text(event.get("time")),
                    f"{start.key[0]}.{start.key[1]}",
                    str(event.get("step", "")),
                    str(event["event"]).replace("_", " "),
                    text if len(text) <= MOST_DETAILS else text[: MOST_DETAILS - 1] + "…",
                )


def clock_text(at: Any) -> str:
    """Return Unix seconds as `2026-11-23 10:05:19` in UTC; an empty text if they are none."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at))
    except (TypeError, ValueError, OverflowError, OSError):
        return ""
