"""The rule that a run that could cost more than $100 needs a limit set by the user, or a confirmation."""

from __future__ import annotations

import math
import time
from typing import Final

from launcher.errors import UsageError
from launcher.inputs.gather import Inputs, built_in
from launcher.inputs.price_table import age_days, is_old
from launcher.plan.model import Plan
from launcher.spec.reader import read
from launcher.text import plural, usd_text

ASK_USD: Final = 100.0


def is_limited(inputs: Inputs) -> bool:
    """Return whether the user limited the cost: limits.usd, limits.hours (not those of the built-in spec), or a cap in
    a settings file."""
    spec, located, context = inputs.spec, inputs.located, inputs.context
    if spec.limits.usd is not None or inputs.settings.usd_cap is not None:
        return True
    own = str(built_in(context.target, training=context.training))
    return spec.limits.hours is not None and not located.place("limits.hours").startswith(own)


def is_limited_plan(plan: Plan) -> bool:
    """Return whether the user limited the cost of a stored plan. Settings files do not apply to it.

    The plan does not record its spec's path, so the built-in spec is recognised by its name and hours.
    """
    limits = plan.spec.get("limits", {})
    own = read(built_in(plan.target, training=True))
    is_own = (plan.spec.get("name"), limits.get("hours")) == (own.name, own.limits.hours)
    return plan.limits.usd is not None or (limits.get("hours") is not None and not is_own)


def is_expensive(plan: Plan) -> bool:
    """Return whether a plan could cost more than $100, or has no upper bound."""
    return plan.limits.usd_at_most is None or plan.limits.usd_at_most > ASK_USD


def could_cost(plan: Plan) -> str:
    """Return `could cost $120`."""
    most = plan.limits.usd_at_most
    return f"could cost {usd_text(most)}" if most is not None else "has no upper bound on its cost"


def missing_limit(plan: Plan) -> str:
    """Return why an expensive plan without a limit needs a confirmation."""
    old = old_prices(plan)
    return "neither limits.usd nor limits.hours is set" + (f"; estimated at {old}" if old else "")


def old_prices(plan: Plan) -> str:
    """Return `prices of 2026-07-30, 116 days old`, or an empty text if they are not older than 30 days."""
    if not plan.prices or not is_old(plan.prices.date, time.time()):
        return ""
    return f"prices of {plan.prices.date}, {plural(age_days(plan.prices.date, time.time()), 'day')} old"


def require_limit(plan: Plan, *, limited: bool) -> None:
    """Check that a plan submitted from Python could cost at most $100, or has a limit. Raises UsageError."""
    if not is_expensive(plan) or limited:
        return
    most = plan.limits.usd_at_most
    usd = f'changes={{"limits.usd": {math.ceil(most)}}}' if most is not None else 'changes={"limits.hours": H}'
    raise UsageError(
        f"this run {could_cost(plan)}: {missing_limit(plan)}",
        f"Set a limit: api.plan(…, {usd}); or api.submit(…, yes=True)",
    )
