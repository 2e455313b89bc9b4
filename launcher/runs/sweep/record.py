"""The record of a sweep: `sweeps/NAME.json` in the output, with the runs of its points and their settings.

The label `launch-sweep` finds the jobs that exist; the record also has runs whose jobs are gone, such as ended VMs, and
points that have not started.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from launcher.errors import UsageError

if TYPE_CHECKING:
    from launch_train.common.storage import Storage
    from launcher.runs.sweep.plan import SweepPlan

TRIES: Final = 5
"""Attempts to write a record while other launches of the sweep write it at the same time."""


def record_name(sweep: str) -> str:
    return f"sweeps/{sweep}.json"


def write_record(output: Storage, sweep: SweepPlan) -> None:
    """Add the sweep's points to its record.

    Raises UsageError: another sweep has this name; OutputError: the output cannot be used.
    """
    own = {point.run: point.values for point in sweep.points}
    known, version = dict[str, Any](), ""  # a new sweep has no record, and its submission waits for no read
    for _ in range(TRIES):
        points = [{"run": run, "set": values} for run, values in {**known, **own}.items()]
        try:
            output.swap(
                record_name(sweep.name), json.dumps({"sweep": sweep.name, "points": points}, indent=1).encode(), version
            )
            return
        except FileExistsError:
            known, version = read_version(output, sweep.name)
        if sweep.is_named and known and known.keys().isdisjoint(own):
            raise UsageError(
                f"the name {sweep.name} belongs to another sweep, with other settings or other code: {min(known)} …",
                "Use another name: --name NAME; without --name, launch chooses one.",
            )
        if known.keys() >= own.keys():
            return


def read_record(output: Storage, sweep: str) -> Mapping[str, Mapping[str, Any]]:
    """Return the values of each point by run ID; empty if there is no record. Raises OutputError."""
    return read_version(output, sweep)[0]


def read_version(output: Storage, sweep: str) -> tuple[dict[str, Any], str]:
    """Return the record and its version; empty if there is none, or if it is damaged."""
    try:
        text, version = output.read_version(record_name(sweep))
    except FileNotFoundError:
        return {}, ""
    return parse_points(text), version


def parse_points(text: bytes) -> dict[str, Any]:
    """Return the values of each point in a record by run ID; empty if it is damaged."""
    try:
        return {str(point["run"]): dict(point["set"]) for point in json.loads(text)["points"]}
    except (ValueError, KeyError, TypeError):
        return {}


def remove_record(output: Storage, sweep: str) -> None:
    """Delete the record and the mark. Raises OutputError."""
    output.delete(record_name(sweep))
    output.delete(mark_name(sweep))


def mark_cancelled(output: Storage, sweep: str) -> None:
    """Mark the sweep as cancelled, so that launches that run it start no further points. Raises OutputError."""
    output.write(mark_name(sweep), json.dumps({"time": time.time()}).encode())


def mark_version(output: Storage, sweep: str) -> str:
    """Return the version of the newest mark; empty if there is none. Raises OutputError.

    A mark cancels the launches that did not find this version when they began, and no later ones.
    """
    try:
        return output.read_version(mark_name(sweep))[1]
    except FileNotFoundError:
        return ""


def mark_name(sweep: str) -> str:
    return f"sweeps/{sweep}.cancelled"
