"""The interface of a logging service, and the description of the run that it gets."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from launch_train import runfolder
from launch_train.common import contract
from launch_train.common.errors import OutputError
from launch_train.common.masking import mask
from launch_train.common.storage import open_storage
from launch_train.telemetry.rows import Row

State = Literal["finished", "failed", "preempted"]
"""How a start of the run ended. A failed or preempted run may be resumed."""

READ_SECONDS = 20.0
"""Time limit of reading the spec from the run folder."""


class RefusedError(Exception):
    """The service refuses these rows; a retry would not help."""


class Service(Protocol):
    """One run of a service. Any error but RefusedError counts as an outage: the call is repeated."""

    def configure(self, config: Mapping[str, Any]) -> None:
        """Add settings of the run; some may have been added before."""

    def log(self, rows: Sequence[Row]) -> None:
        """Log rows of steps and evaluations; the repeated steps of a resumed run are left out."""

    def finish(self, state: State) -> None:
        """End the run. May take long: the process exits when its time is over."""


@dataclass(frozen=True)
class RunInfo:
    """The run, as described to all loggers. `spec`: its settings, with secrets masked."""

    id: str
    folder: str
    env: Mapping[str, str] = field(repr=False)
    spec: Mapping[str, Any] = field(default_factory=dict)


def time_of(row: Row) -> float:
    """Return the Unix time of a row; the current time if a script's event has another value under that name."""
    moment = row.get("time")
    return float(moment) if isinstance(moment, (int, float)) else time.time()


def run_info(env: Mapping[str, str]) -> RunInfo:
    """Return the run, with the spec from its folder; without a spec if the folder can't be read."""
    folder = env[contract.RUN_FOLDER]
    name = env.get(contract.RUN) or folder.rstrip("/").rpartition("/")[2]
    try:
        spec = json.loads(open_storage(folder).within(READ_SECONDS).read(runfolder.PLAN))["spec"]
        spec.get("run", {}).pop("config", None)  # the trainer reports it with its defaults
    except (OutputError, OSError, ValueError, KeyError, TypeError, AttributeError):
        spec = {}
    return RunInfo(name, folder, env, mask(spec))
