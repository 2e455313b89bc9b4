"""Run the preflight checks of VMs, print the findings, and order the zones by Spot capacity."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from launcher.errors import NoCapacity, PlanRefused

if TYPE_CHECKING:
    from launcher.compute.client import Compute
    from launcher.compute.preflight_checks import Finding
    from launcher.plan.model import Plan


def preflight(plan: Plan, compute: Compute, say: Callable[[str], None]) -> Plan:
    """Return the plan without the placements that cannot work.

    Raises:
        PlanRefused: no placement is left.
        NoCapacity: no placement is left, for lack of quota.
    """
    from launcher.cli.ui.plan_page import WIDTH, wrapped
    from launcher.compute.preflight import allowed, check
    from launcher.compute.spot_capacity import order_by_capacity

    findings = check(compute, plan)
    attempts = allowed(plan, findings)
    refusals = [one for one in findings if one.scope == "refusal"]
    if not attempts:
        kind = NoCapacity if all("quota" in one.problem.lower() for one in refusals) else PlanRefused
        raise kind(
            "; ".join(text.partition("\n")[0] for text in findings_text(refusals)),
            "\n".join([*fixes(refusals[:1]), "To create it anyway, add --no-preflight."]),
        )
    for text in findings_text(findings):
        problem, _, commands = text.partition("\n")
        say("\n".join(wrapped(problem, WIDTH - len("launch: "))))
        for line in commands.splitlines():  # without a prefix, to be copied
            print(f"    {line}", file=sys.stderr)
    plan, lines = order_by_capacity(replace(plan, attempts=attempts), compute)
    for line in lines:
        say(line)
    return plan


def findings_text(findings: Sequence[Finding]) -> Iterator[str]:
    """Yield each finding with its fix; one text stands for all placements with the same finding."""
    groups: dict[str, list[Finding]] = {}
    for one in findings:
        key = f"{one.problem}\n{one.fix}"
        groups.setdefault(key.replace(one.place, "") if one.place else key, []).append(one)
    for group in groups.values():
        more = f" (same in {len(group) - 1} more placements)" if group[1:] else ""
        yield "\n".join(filter(None, (f"{group[0].problem}{more}", group[0].fix)))


def fixes(findings: list[Finding]) -> list[str]:
    """Return the distinct fixes."""
    return list(dict.fromkeys(one.fix for one in findings if one.fix))
