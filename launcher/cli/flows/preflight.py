"""Run the preflight checks of a plan and print the findings."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from launcher.cli.flows.cloud import of_project
from launcher.cli.options import Output
from launcher.cli.ui.streams import say

if TYPE_CHECKING:
    from launcher.inputs.gather import Inputs
    from launcher.plan.model import Plan
    from launcher.project.model import Check
    from launcher.services.compute.client import Compute


def preflight(plan: Plan, compute: Compute | None, say: Callable[[str], None], *, creates_repository: bool) -> Plan:
    """Return the plan without the placements that cannot work, and print what is wrong. `compute`: of a plan of VMs.
    Raises as `launcher.project.plan_preflight.vertex_preflight` does."""
    from launcher.project import plan_preflight as checks
    from launcher.project.report import lines

    def show(found: tuple[Check, ...]) -> None:
        problems = [one for one in found if one.status in ("failed", "warning")]
        if problems:
            say("preflight checks:")
            print("\n".join(lines(problems)), file=sys.stderr)
        if unknown := list(dict.fromkeys(one.name for one in found if one.status == "unknown")):
            say(f"preflight: not checked: {', '.join(unknown)} (--preflight shows why)")

    if compute:
        return checks.vm_preflight(plan, compute, say, show, creates_repository=creates_repository)
    return checks.vertex_preflight(plan, os.environ, show, creates_repository=creates_repository)


def preflight_only(inputs: Inputs, output: Output, *, creates_repository: bool = False) -> None:
    """Run all checks of a plan and print every result; submit nothing.

    Raises PlanRefused, NoCapacity, NotAuthorised: no placement is left.
    """
    from launcher.cli.ui.documents import printed
    from launcher.inputs.planning import planned, planned_image
    from launcher.project.needs import needs_of
    from launcher.project.plan_preflight import vm_checks
    from launcher.project.preflight import allowed, check, refusal
    from launcher.project.report import data, lines, summary
    from launcher.runs.image import check_contents

    plan = planned(inputs)
    if plan.target == "vm":
        needs = needs_of(plan, creates_repository=creates_repository)
        found = vm_checks(plan, needs, of_project(plan.project).compute)
    else:
        found = check(plan, os.environ, creates_repository=creates_repository)
    attempts = allowed(plan, found)
    refused = None if attempts else refusal(found)
    if output is Output.text:
        print("\n".join(lines(one for one in found if attempts or one.status != "failed")))
        print(summary(found) or "all checks passed")
    else:
        keys = ("region", "zone", "provisioning", "machine_type")
        places = [{key: getattr(attempt, key) for key in keys} for attempt in attempts]
        printed({"checks": data(found), "placements": places}, output, refused)
    if refused:
        raise refused
    if plan.image:
        check_contents(inputs, planned_image(inputs), os.environ, say)
