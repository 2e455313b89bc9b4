"""Check a plan for Vertex AI against its project, just before anything is sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from launcher.errors import LaunchError, NoCapacity, NotAuthorised, PlanRefused
from launcher.gcp.rest import Rest
from launcher.plan.model import Attempt, Plan
from launcher.project.checks import evaluate
from launcher.project.model import Check
from launcher.project.needs import needs_of
from launcher.project.reads import read
from launcher.project.report import lines

ACCESS = ("permissions", "actAs", "access", "job access", "secret")
"""Checks whose failures are missing permissions."""


def check(plan: Plan, environ: Mapping[str, str], *, creates_repository: bool = False) -> tuple[Check, ...]:
    """Return the result of all checks, failures first. Changes nothing, and raises nothing: what can't be read is
    unknown."""
    needs = needs_of(plan, creates_repository=creates_repository)
    return evaluate(needs, read(Rest(plan.project, environ), needs, environ))


def allowed(plan: Plan, checks: Sequence[Check]) -> tuple[Attempt, ...]:
    """Return the attempts that no failed check is about."""
    failed = [one for one in checks if one.status == "failed"]
    return tuple(attempt for attempt in plan.attempts if not any(one.applies_to(attempt) for one in failed))


def refusal(checks: Sequence[Check]) -> LaunchError:
    """Return the error of a plan without an allowed attempt: every failure, each with its fix."""
    failed = [one for one in checks if one.status == "failed"]
    names = {one.name for one in failed}
    kind = NoCapacity if names == {"quota"} else NotAuthorised if names <= {*ACCESS} else PlanRefused
    problem = "\n".join(["preflight: the job can't run, and was not submitted", *lines(failed)])
    return kind(problem, "To submit it anyway, add --no-preflight.")
