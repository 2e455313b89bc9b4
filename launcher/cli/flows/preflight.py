"""Run the preflight checks of a plan and print the findings."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from launcher.cli.flows.cloud import of_project
from launcher.cli.options import Output
from launcher.cli.ui.streams import say

if TYPE_CHECKING:
    from launcher.inputs.gather import Inputs


def preflight_only(inputs: Inputs, output: Output, *, creates_repository: bool = False) -> None:
    """Run all checks of a plan and print every result; submit nothing.

    Raises PlanRefused, NoCapacity, NotAuthorised: no placement is left.
    """
    from launcher.cli.ui.documents import printed
    from launcher.inputs.planning import planned, planned_image
    from launcher.project.preflight import allowed, check_plan, refusal
    from launcher.project.report import data, lines, summary
    from launcher.runs.image import check_contents

    plan = planned(inputs)
    compute = of_project(plan.project).compute
    results = check_plan(plan, os.environ, compute, creates_repository=creates_repository)
    attempts = allowed(plan, results)
    refused = None if attempts else refusal(results)
    if output is Output.text:
        print("\n".join(lines(result for result in results if attempts or result.status != "failed")))
        print(summary(results) or "all checks passed")
    else:
        keys = ("region", "zone", "provisioning", "machine_type")
        places = [{key: getattr(attempt, key) for key in keys} for attempt in attempts]
        printed({"checks": data(results), "placements": places}, output, refused)
    if refused:
        raise refused
    if plan.image:
        check_contents(inputs, planned_image(inputs), os.environ, say)
