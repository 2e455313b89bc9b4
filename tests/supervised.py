"""Local jobs that are supervised in the tests' own process, where a test can replace what runs the replicas."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import pytest

from launcher.cli.flows import run_local
from launcher.runs import local_run
from launcher.services.local.__main__ import Stop, supervise
from launcher.services.local.client import OnEvent
from launcher.services.local.job import Event, LocalJob, Outcome


def run_here(job: LocalJob, on_event: OnEvent, *, environ: Mapping[str, str] = os.environ, **_: Any) -> Outcome:
    """Run a job as `run_job` does, without a process of its own."""
    outcomes: list[Outcome] = []

    def report(event: Event) -> None:
        outcomes.extend([event] if isinstance(event, Outcome) else [])
        on_event(event)

    supervise(job, report, environ, Stop())
    return outcomes[-1]


def supervise_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let jobs run in this process."""
    for module in (run_local, local_run):
        monkeypatch.setattr(module, "run_job", run_here)
