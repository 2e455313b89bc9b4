"""What is looked at before the first VM is made, told or refused; and the plan with its zones in the order of their
capacity."""

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


def preflight(made: Plan, compute: Compute, say: Callable[[str], None]) -> Plan:
    """The plan without the places that can't work, as far as that can be seen now.

    Raises:
        PlanRefused: no place is left.
        NoCapacity: for want of quota.
    """
    from launcher.cli.ui.plan_page import WIDTH, wrapped
    from launcher.compute.preflight import allowed, check
    from launcher.compute.spot_capacity import order_by_capacity

    findings = check(compute, made)
    attempts = allowed(made, findings)
    refusals = [one for one in findings if one.scope == "refusal"]
    if not attempts:
        kind = NoCapacity if all("quota" in one.problem.lower() for one in refusals) else PlanRefused
        raise kind(
            "; ".join(text.partition("\n")[0] for text in findings_text(refusals)),
            "\n".join([*fixes(refusals[:1]), "--no-preflight goes on all the same"]),
        )
    for text in findings_text(findings):
        problem, _, commands = text.partition("\n")
        say("\n".join(wrapped(problem, WIDTH - len("launch: "))))
        for line in commands.splitlines():  # to be copied: nothing stands in front
            print(f"    {line}", file=sys.stderr)
    made, lines = order_by_capacity(replace(made, attempts=attempts), compute)
    for line in lines:
        say(line)
    return made


def findings_text(findings: Sequence[Finding]) -> Iterator[str]:
    """What was found, in words; of places that are alike in it the first one."""
    alike: dict[str, list[Finding]] = {}
    for one in findings:
        key = f"{one.problem}\n{one.fix}"
        alike.setdefault(key.replace(one.place, "") if one.place else key, []).append(one)
    for group in alike.values():
        more = f" (the same in {len(group) - 1} more places of the plan)" if group[1:] else ""
        yield "\n".join(filter(None, (f"{group[0].problem}{more}", group[0].fix)))


def fixes(findings: list[Finding]) -> list[str]:
    """What to do, each thing once."""
    return list(dict.fromkeys(one.fix for one in findings if one.fix))
