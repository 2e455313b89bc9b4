"""Plan a spec; errors name the line of the spec, or the flag, that caused them."""

from __future__ import annotations

from launcher import catalog
from launcher.cli.gather import Inputs
from launcher.plan import build
from launcher.plan.model import Image, Plan


def planned(inputs: Inputs) -> Plan:
    """Return the plan of a launch. Raises PlanRefused."""
    with inputs.located.naming_places():
        return build.plan(inputs.spec, catalog.load(), inputs.context)


def planned_image(inputs: Inputs) -> Image:
    """Return the plan of the image only. Raises PlanRefused."""
    with inputs.located.naming_places():
        return build.image(inputs.spec, catalog.load(), inputs.context)
