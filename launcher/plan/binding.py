"""A plan's digest, which binds the jobs of a run to the plan that they were created from (docs/security.md). Pure."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec.structs import replace

from launcher.jobs import PLAN_LABEL
from launcher.plan import names
from launcher.plan.model import Plan

DIGITS = 32


def digest(plan: Plan) -> str:
    """Return 32 hex digits of SHA-256 over the whole plan, without the label that holds them.

    The plan goes through JSON first, so that it has the same digest when it is read back from a run folder.
    """
    bare = [replace(attempt, request=unlabelled(attempt.request)) for attempt in plan.attempts]
    text = msgspec.json.encode(replace(plan, attempts=tuple(bare)))
    return names.digest(msgspec.to_builtins(msgspec.json.decode(text, type=Plan)), DIGITS)


def bound(plan: Plan) -> Plan:
    """Return the plan with its digest as a label of each CustomJob. A VM's labels can be changed later, so VMs are
    bound by the id of the create request instead (launcher.apply.identity.request_id)."""
    if plan.target != "vertex":
        return plan
    label = {PLAN_LABEL: digest(plan)}
    attempts = (
        replace(one, request={**one.request, "labels": {**one.request["labels"], **label}}) for one in plan.attempts
    )
    return replace(plan, attempts=tuple(attempts))


def unlabelled(request: dict[str, Any]) -> dict[str, Any]:
    """Return a request without the label."""
    if PLAN_LABEL not in request.get("labels", {}):
        return request
    return {**request, "labels": {name: value for name, value in request["labels"].items() if name != PLAN_LABEL}}
