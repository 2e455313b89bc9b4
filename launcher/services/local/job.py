"""A job for this machine, and the events that its supervisor reports to the launch that started it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from msgspec import Struct

from launcher.errors import LaunchError
from launcher.plan.model import Plan
from launcher.services.local.attempts import End
from launcher.services.local.workdirs import Code, WrittenFiles

STOP, KILL = "stop", "kill"
"""Commands from a launch to its supervisor: stop the replicas, which get 30 s to save, or kill them."""


class LocalJob(Struct, frozen=True, kw_only=True):
    """A job to run: a request, the user's code, and the plan that the request comes from (or None)."""

    request: dict[str, Any]
    code: Code = Code()
    content: str = ""
    """The digest of the code."""
    plan: Plan | None = None
    preempt_after: float | None = None
    """Seconds from the replicas' start to a preemption."""
    docker: bool = False
    """Run containers of the image, with the code in the image, instead of processes."""
    image: str | None = None
    """The image to run (default: the request's)."""
    python: str = ""
    """The Python that runs processes; empty: launch's own."""
    recorded_python: str = ""
    """The Python that later attempts use as well; empty: they choose again."""
    substitutes: tuple[str, ...] = ()
    """Lines that name what replaces the image, printed when an attempt begins."""
    job_id: str | None = None
    """The ID of a job of the loopback Vertex AI, which owns the run folder and its locks."""


class Message(NamedTuple):
    """A message of launch."""

    text: str


class Started(NamedTuple):
    """The replicas are being started, for the first time or again after a preemption."""


class Printed(NamedTuple):
    """One line of a replica's output."""

    replica: str
    text: str


class Outcome(Struct, frozen=True, kw_only=True):
    """How a job ended, by its newest attempt."""

    end: End
    attempt: int = 0
    """Its number; 0 without a run folder."""
    is_earlier: bool = False
    """The run had succeeded before, so nothing was started."""
    preempted: Mapping[str, int] | None = None
    """Replica -> exit code at the preemption; None: not preempted."""


Event = Message | Started | Printed | WrittenFiles | Outcome | LaunchError
"""The last one is an Outcome or an error."""
