"""Specs and plans for the tests of planning, in a word or two."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from launcher import catalog
from launcher.jobs.vm import PARAMETERS
from launcher.plan.build import plan
from launcher.plan.model import Content, Context, Plan
from launcher.spec.models import JobSpec

CATALOG = catalog.load()


def spec(**fields: Any) -> JobSpec:
    """A spec of a user's module on two H100s in us-central1, and what else is given."""
    known = {"machine": {"type": "h100", "gpus": 2}, "regions": ["us-central1"], "run": {"module": "mine"}}
    data = {"name": "job", **known, **fields}
    return msgspec.convert(data, JobSpec)


def context(target: str = "vertex", **fields: Any) -> Context:
    """A context with a project, an owner and some content."""
    known = {
        "target": target,
        "project": "my-project",
        "owner": "me@example.com",
        "version": "0.1.0",
        "recipe": Content(digest="recipe"),
        "startup": "#!/bin/bash\n" if target == "vm" else "",
    }
    return Context(**{**known, **fields})


def planned(target: str = "vertex", *, world: dict[str, Any] | None = None, **fields: Any) -> Plan:
    """The plan of `spec(**fields)`."""
    return plan(spec(**fields), CATALOG, context(target, **(world or {})))


def request(target: str = "vertex", *, world: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """The first attempt's request."""
    return planned(target, world=world, **fields).attempts[0].request


def told(body: dict[str, Any]) -> dict[str, Any]:
    """What the startup script of a VM is told."""
    items = body.get("instanceProperties", body)["metadata"]["items"]
    (text,) = [item["value"] for item in items if item["key"] == PARAMETERS]
    found: dict[str, Any] = json.loads(text)
    return found


def env_of(body: dict[str, Any], pool: int = 0) -> dict[str, str]:
    """The environment of a worker pool's container."""
    entries = body["jobSpec"]["workerPoolSpecs"][pool]["containerSpec"]["env"]
    return {entry["name"]: entry["value"] for entry in entries}
