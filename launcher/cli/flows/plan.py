"""The plan of a spec. What is refused names the line of the spec, or the flag, that caused it."""

from __future__ import annotations

from launcher import catalog
from launcher.cli.gather import Inputs
from launcher.plan import build
from launcher.plan.model import Image, Plan


def planned(inputs: Inputs) -> Plan:
    """Return everything that a launch will do. Raises PlanRefused."""
    with inputs.located.naming_places():
        return build.plan(inputs.spec, catalog.load(), inputs.context)


def planned_image(inputs: Inputs) -> Image:
    """Return the image alone. Raises PlanRefused."""
    with inputs.located.naming_places():
        return build.image(inputs.spec, catalog.load(), inputs.context)
