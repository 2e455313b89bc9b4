"""Simulated lives of jobs on the loopback cloud: the states, each with its begin in seconds after the creation."""

from __future__ import annotations

from typing import Final

from launch_train.common.contract import Exit
from launcher.testing.googlecloud.custom_jobs import Stage

WAITING: Final = (Stage("JOB_STATE_QUEUED", 0), Stage("JOB_STATE_PENDING", 5))
RUNNING: Final = (*WAITING, Stage("JOB_STATE_RUNNING", 10))
SUCCEEDED: Final = (*RUNNING, Stage("JOB_STATE_SUCCEEDED", 30))


def _exited(code: int) -> tuple[Stage, ...]:
    # Vertex AI's message for a container that exits with a code other than 0.
    said = f"The replica workerpool0-0 exited with a non-zero status of {int(code)}."
    return (*RUNNING, Stage("JOB_STATE_FAILED", 30, (3, said)))


FAILED: Final = _exited(Exit.FAILED)
PREEMPTED: Final = _exited(Exit.PREEMPTED)
"""The container saved a checkpoint and exited with the code of a preemption (docs/reliability.md)."""
NO_CAPACITY: Final = (
    *WAITING,
    Stage(
        "JOB_STATE_FAILED",
        20,
        (8, "Resources are insufficient in region: us-central1. Please try a different region."),
    ),
)
