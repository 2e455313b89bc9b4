"""The Python API of launch, for notebooks, Airflow and tests (docs/python.md).

    from launcher import api

    plan = api.plan("job.yaml", changes={"machine.gpus": 8})
    run = api.submit(plan)
    run.wait()
    print(run.metrics().rows[-1])

The commands call the same functions. Nothing here prints, exits the process or sets a signal handler. Errors are those
of launcher.errors; `exit_code` tells their kinds apart. Each name is imported when it is first used, so importing this
package loads neither Google's libraries nor the rest of launch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from launch_train.export import Exported
    from launcher.inputs.planning import Plan, plan
    from launcher.runs.cancelling import Cancellation
    from launcher.runs.local_run import LocalResult, local
    from launcher.runs.run import Run, RunStatus, find, submit
    from launcher.runs.run_list import ListedRun, RunList, runs
    from launcher.runs.sweep.plan import SweepPlan
    from launcher.runs.sweep.submit import submit_sweep, sweep

__all__ = [
    "Cancellation",
    "Exported",
    "ListedRun",
    "LocalResult",
    "Plan",
    "Run",
    "RunList",
    "RunStatus",
    "SweepPlan",
    "find",
    "local",
    "plan",
    "runs",
    "submit",
    "submit_sweep",
    "sweep",
]

HOMES = {
    "inputs.planning": ("Plan", "plan"),
    "runs.cancelling": ("Cancellation",),
    "runs.exporting": ("Exported",),
    "runs.local_run": ("LocalResult", "local"),
    "runs.run": ("Run", "RunStatus", "find", "submit"),
    "runs.run_list": ("ListedRun", "RunList", "runs"),
    "runs.sweep.plan": ("SweepPlan",),
    "runs.sweep.submit": ("submit_sweep", "sweep"),
}
"""Module of launcher -> the names of this one that it defines."""


def __getattr__(name: str) -> Any:
    """Import a name when it is first used (PEP 562)."""
    for module, names in HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"launcher.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the public names."""
    return __all__
