"""Ask for confirmation in a terminal: before a change of what another account owns, and before a launch that could
cost more than $100 without a limit by the user, or at old prices."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Mapping

from launcher.errors import LaunchError, UsageError
from launcher.inputs.gcloud_config import person
from launcher.jobs.job import OWNER_LABEL, Job
from launcher.plan.model import Plan
from launcher.plan.names import is_of_another
from launcher.runs.cost_limit import could_cost, is_expensive, missing_limit, old_prices


def confirmed(question: str, needs: str, repeat: str) -> bool:
    """Ask a question and return whether the answer is yes.

    Raises UsageError: there is no terminal. The error names what `needs` a confirmation, and `repeat`, the command that
    does not ask.
    """
    if not sys.stdin.isatty():
        raise UsageError(f"{needs}, but there is no terminal", repeat)
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def confirm_for_another(name: str, labels: Mapping[str, str], verb: str, done: str, command: str) -> None:
    """Ask before changing what belongs to another account; `verb` is Cancel, `done` is cancelled.

    Raises UsageError: there is no terminal, with the `command` that asks nothing; LaunchError: the answer is no.
    """
    if not (owner := other_owner(labels)):
        return
    of = f"{name} {owner}"
    if not confirmed(f"{of}.\n{verb} it?", of, f"To {verb.lower()} it anyway: {command} --yes"):
        raise LaunchError(f"{name} was not {done}")


def other_owner_of(job: Job) -> str:
    """Return whose job it is, as `other_owner` does; empty on this machine, where its files have an owner."""
    return "" if job.is_here else other_owner(job.labels)


def other_owner(labels: Mapping[str, str]) -> str:
    """Return `belongs to another account (HASH)`; empty: it does not, as far as is known."""
    if not is_of_another(labels, person(os.environ)):
        return ""
    return f"belongs to another account ({labels[OWNER_LABEL]})"


def confirm_cost(
    plan: Plan, *, limited: bool, say: Callable[[str], None], yes: bool = False, what: str = "run"
) -> None:
    """Ask for confirmation if the plan could cost more than $100, and has no limit or old prices. `what` it plans;
    `yes`: ask nothing.

    A driver asks just before it creates the first job of a new or resumed run; nothing is asked about one that is
    active or has succeeded. Without a terminal, old prices are only reported.

    Raises UsageError: it has no limit, and there is no terminal; LaunchError: the answer is no.
    """
    if yes or not is_expensive(plan):
        return
    could, old = could_cost(plan), old_prices(plan)
    if limited and not old:
        return
    if limited and not sys.stdin.isatty():
        say(f"this {what} {could}, at {old}\nlaunch prices --update fetches today's prices")
        return
    why = old if limited else missing_limit(plan)
    most = plan.limits.usd_at_most
    cap = (
        f"Set a limit: --usd {math.ceil(most)} or --hours H; or confirm"
        if most is not None
        else "Set --hours H; or confirm"
    )
    if not confirmed(f"This {what} {could} ({why}). Submit it?", f"this {what} {could}: {why}", f"{cap} with --yes"):
        raise LaunchError("nothing was submitted", "To limit the cost: --usd USD or --hours H")
