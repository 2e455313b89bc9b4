"""Ask before a launch that could cost more than $100 without a limit by the user, or at old prices."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

from launcher.cli.flows.confirm import confirmed
from launcher.errors import LaunchError
from launcher.plan.model import Plan
from launcher.runs.cost_limit import could_cost, is_expensive, missing_limit, old_prices


def confirm_cost(
    plan: Plan, *, limited: bool, say: Callable[[str], None], yes: bool = False, what: str = "run"
) -> None:
    """Ask for confirmation if the plan could cost more than $100, and has no limit or old prices. `what` it plans;
    `yes`: ask nothing.

    A driver asks just before it creates the first job of a new or resumed run; nothing is asked about one that is
    active or has succeeded. Without a terminal, old prices are only reported.

    Raises:
        UsageError: it has no limit, and there is no terminal.
        LaunchError: the answer is no.
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
