"""Run one selftest: list what it creates and may cost, then run its steps in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from launcher import catalog
from launcher.errors import LaunchError, NoCapacity, PlanRefused
from launcher.selftest.cleanup import stop
from launcher.selftest.kit import Kit, NotTried
from launcher.selftest.steps import GROUPS, Step, argv, chosen
from launcher.text import usd_text


class Item(NamedTuple):
    """One resource, and the upper bound on its cost. None: negligible."""

    kind: str
    name: str
    usd: float | None = None


class Outcome(NamedTuple):
    """The result of a step. `ok` is None if it could not be tried: no capacity, or a prerequisite failed."""

    name: str
    ok: bool | None
    target: str
    seconds: float
    why: str = ""
    found: str = ""

    def as_data(self) -> dict[str, Any]:
        """Return it in the format of benchmarks/results/selftest-DATE.json."""
        return {**self._asdict(), "seconds": round(self.seconds, 1)}


# --- Cost -------------------------------------------------------------------------------------------------------------


def items(kit: Kit, steps: Sequence[Step]) -> list[Item]:
    """Return the resources that the steps create.

    Raises LaunchError: the region lacks the machine, or its price is unknown.
    """
    resources = [Item("bucket", kit.bucket)]
    if any(step.group == "push" for step in steps):
        from launcher.images.cloud_build import Options

        minutes = Options().timeout_seconds / 60
        usd = catalog.load().rates["cloud-build-minute"].usd * minutes
        resources += [] if kit.repository else [Item("repository", kit.images)]
        resources.append(Item("build", f"by Cloud Build, {minutes:.0f} min at most", usd))
    return [*resources, *(machine(kit, step) for step in steps if step.command)]


def machine(kit: Kit, step: Step) -> Item:
    """Return the job or VM of a step, priced by the dry run of its command. Raises LaunchError."""
    ran = kit.launch(*argv(kit, step.name), "--dry-run", "-o", "json")
    if ran.code:
        raise PlanRefused(ran.problem)
    plan = ran.data
    usd = plan["limits"]["usd_hard_bound"]
    kind = plan["machine"]["machine_type"]
    if usd is None:  # without a price, --usd would be no upper bound
        raise PlanRefused(f"the highest price of {kind} in {kit.region} is unknown", "Choose another --region.")
    what = "job" if step.command[0] == "vertex" else "VM"
    return Item(what, f"{kit.name(step.name)}, {kind}, {plan['limits']['hours']:g} h at most", usd)


def total(found: Sequence[Item]) -> float:
    """Return the sum in USD."""
    return sum(item.usd or 0.0 for item in found)


def check_cap(kit: Kit, found: Sequence[Item], usd: float) -> None:
    """Raise PlanRefused if it could cost more than `usd`; the hint lists the parts that fit."""
    if total(found) <= usd:
        return
    fits = [group for group in GROUPS if total(items(kit, chosen([group]))) <= usd]
    hint = f"Each of these fits by itself: {', '.join(f'--only {group}' for group in fits)}" if fits else "Raise --usd."
    raise PlanRefused(f"the selftest could cost {usd_text(total(found))}, more than --usd {usd:.2f}", hint)


# --- Its steps --------------------------------------------------------------------------------------------------------


def run(kit: Kit, steps: Sequence[Step], outcomes: list[Outcome], begins: Callable[[Step], None]) -> None:
    """Run the steps; each one's outcome is appended to `outcomes` as soon as it is known.

    If a step fails, the steps that need it are not run, and its jobs and VMs are removed at once.
    """
    for step in steps:
        known = {outcome.name: outcome.ok for outcome in outcomes}
        lacking = next((name for name in step.needs if not known.get(name)), None)
        if lacking:
            outcomes.append(Outcome(step.name, None, step.target, 0.0, f"not run: {lacking} did not pass"))
            continue
        begins(step)
        began = kit.clock.now()
        ok, text = tried(step, kit)
        seconds = kit.clock.now() - began
        outcomes.append(Outcome(step.name, ok, step.target, seconds, "" if ok else text, text if ok else ""))
        if not ok:
            stop(kit, kit.name(step.name))


def tried(step: Step, kit: Kit) -> tuple[bool | None, str]:
    """Return whether a step passed, and the finding or the reason. An unexpected exception counts as a failure."""
    try:
        return True, step.check(kit)
    except NoCapacity as error:
        return None, f"no capacity: {error.problem}"
    except NotTried as error:
        return None, f"not tried: {error.problem}"
    except LaunchError as error:
        return False, " ".join(f"{error.problem} {error.hint}".split())
    except Exception as error:  # noqa: BLE001 - the other steps continue
        return False, f"{type(error).__name__}: {error}"
