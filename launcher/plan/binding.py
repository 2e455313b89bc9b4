"""Compute a plan's digest, which binds the jobs of a run to the plan that created them (docs/security.md). Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from launcher.errors import UsageError
from launcher.jobs.job import PLAN_LABEL
from launcher.plan.model import Plan
from launcher.plan.names import json_digest

DIGITS = 32
VERSION = 1
"""The newest format of a run folder that this launch reads (docs/output.md)."""


class Stored(Struct, frozen=True):
    """A plan from a run folder, and the digest of its text."""

    plan: Plan
    digest: str


class NewerFormat(UsageError):
    """A newer launch wrote the run folder."""


def read(text: bytes) -> Stored | None:
    """Return the plan in plan.json; None if this version of launch cannot read it. Raises NewerFormat."""
    try:
        data = msgspec.json.decode(text)
        version = data.get("version") if isinstance(data, dict) else None
        if isinstance(version, int) and version > VERSION:
            problem = f"its run folder has format version {version}; this launch reads up to {VERSION}"
            hint = "Update launch, or use the version that started the run."
            raise NewerFormat(f"run {data.get('run')}: {problem}", hint)
        plan = msgspec.convert(data, Plan)  # from the same data as the digest: two parsers might read two plans
    except msgspec.DecodeError:
        return None
    return Stored(plan, digest_of(data))


def digest(plan: Plan) -> str:
    """Return 32 hex digits of SHA-256 over the whole plan as JSON, without the label that holds the digest."""
    return digest_of(msgspec.json.decode(msgspec.json.encode(plan)))


def bound(plan: Plan) -> Plan:
    """Return the plan with its digest as a label of each CustomJob, or of each job on a host. The labels of VMs can be
    changed later, so VMs are bound by the id of their create request instead
    (launcher.runs.identity_check.request_id)."""
    if plan.target not in ("vertex", "on"):
        return plan
    label = {PLAN_LABEL: digest(plan)}
    attempts = (
        replace(attempt, request={**attempt.request, "labels": {**attempt.request["labels"], **label}})
        for attempt in plan.attempts
    )
    return replace(plan, attempts=tuple(attempts))


def digest_of(data: Mapping[str, Any]) -> str:
    """Return the digest of a plan's JSON as stored, which another version of launch may have written."""
    attempts = []
    for attempt in data["attempts"]:
        request = attempt["request"]
        if PLAN_LABEL in request.get("labels", {}):
            labels = {name: value for name, value in request["labels"].items() if name != PLAN_LABEL}
            request = {**request, "labels": labels}
        attempts.append({**attempt, "request": request})
    return json_digest({**data, "attempts": attempts}, DIGITS)
