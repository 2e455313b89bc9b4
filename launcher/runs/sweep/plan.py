"""Plan a sweep: one run for each point. All names, cost bounds and requests are known before anything is sent."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from launch_train.report.settings import argument_settings
from launcher.errors import LaunchError, PlanRefused, UsageError
from launcher.inputs.gather import Inputs
from launcher.inputs.planning import planned
from launcher.jobs.job import RUN_ID, SWEEP_LABEL
from launcher.plan import model
from launcher.plan.model import Target
from launcher.runs.cost_limit import is_limited
from launcher.spec.overrides import Override
from launcher.spec.sweep import NAME, Axis, Point, points
from launcher.text import plural, usd_text

SHOWN: Final = 5
"""Maximum number of refused points that an error lists."""
DIGEST: Final = 6
"""Hex digits in a sweep's name: two fewer than in a run's, so that neither is taken for the other."""

Gather = Callable[[Sequence[Override]], Inputs]
"""Gathers the inputs of a plan with some settings on top. Raises SpecError, UsageError."""


class SweepPoint(Struct, frozen=True, kw_only=True):
    """One point: its number (from 1), the value of each swept setting, and its run's plan."""

    number: int
    values: dict[str, Any]
    plan: model.Plan
    inputs: Inputs

    @property
    def run(self) -> str:
        return self.plan.run

    @property
    def text(self) -> str:
        """Return `lr=0.0001 batch_size=16`."""
        return " ".join(f"{name}={value}" for name, value in point_settings([self.values])[0].items())


class SweepPlan(Struct, frozen=True, kw_only=True):
    """A planned sweep."""

    name: str
    points: tuple[SweepPoint, ...]
    is_named: bool = False
    """True: the user chose the name, so another sweep may already have it."""
    notes: tuple[str, ...] = ()
    """Differences from what was requested, such as fewer points."""

    @property
    def target(self) -> Target:
        """Return vertex, vm or local."""
        return self.points[0].plan.target

    @property
    def project(self) -> str:
        """Return the Google Cloud project; `local` on this machine."""
        return self.points[0].plan.project

    @property
    def output(self) -> str:
        """Return the folder of the run folders."""
        return (self.points[0].plan.run_folder or "").rpartition("/")[0]

    @property
    def usd_limit(self) -> float | None:
        """Return `limits.usd`, which holds for the sum of all points."""
        return min((usd for point in self.points if (usd := point.plan.limits.usd) is not None), default=None)

    @property
    def usd_at_most(self) -> float | None:
        """Return the sum of the points' upper bounds; None: a price is unknown."""
        bounds = [point.plan.limits.usd_at_most for point in self.points]
        return None if None in bounds else sum(usd for usd in bounds if usd is not None)

    @property
    def is_limited(self) -> bool:
        """Return whether the user limited the cost of the sum: a cap for each run in a settings file does not."""
        inputs = self.points[0].inputs
        return self.usd_limit is not None or (inputs.settings.usd_cap is None and is_limited(inputs))

    def with_all_costs(self, plan: model.Plan) -> model.Plan:
        """Return a point's plan with the upper bound of all points together."""
        return replace(plan, limits=replace(plan.limits, usd_at_most=self.usd_at_most))

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return the notes and the warnings of all points, each once."""
        return tuple(dict.fromkeys([*self.notes, *(text for point in self.points for text in point.plan.warnings)]))

    def to_dict(self) -> dict[str, Any]:
        """Return the sweep as `launch sweep --dry-run -o json` prints it."""
        return {
            "sweep": self.name,
            "target": self.target,
            "project": self.project,
            "points": [
                {"number": point.number, "set": point.values, "run": point.run, "plan": msgspec.to_builtins(point.plan)}
                for point in self.points
            ],
            "limits": {"usd": self.usd_limit, "usd_at_most": self.usd_at_most},
            "warnings": list(self.warnings),
        }


def plan_sweep(
    gather: Gather, axes: Sequence[Axis], *, random: int | None = None, seed: int = 0, name: str = "", offline: bool
) -> SweepPlan:
    """Plan all points of a sweep; sends nothing. `random`: the number of points to draw, None: the grid.

    Raises:
        UsageError: nothing is swept, points are refused (the error names them), two points are the same run, or the
            name cannot be used.
        PlanRefused: the points together could cost more than `limits.usd`.
    """
    chosen = points(axes, random, seed)
    notes = []
    if random is not None and len(chosen) < random:
        notes.append(f"the values allow only {plural(len(chosen), 'different point')}, not {random}")
    what = json.dumps([[[axis.path, axis.text] for axis in axes], None if random is None else seed])
    planned_points = plan_points(gather, chosen, name, what, offline=offline)
    check_runs(planned_points)
    label = planned_points[0].inputs.spec.labels[SWEEP_LABEL]
    sweep = SweepPlan(name=label, points=tuple(planned_points), is_named=bool(name), notes=tuple(notes))
    check_budget(sweep)
    return sweep


def plan_points(gather: Gather, chosen: Sequence[Point], name: str, what: str, *, offline: bool) -> list[SweepPoint]:
    """Plan each point, with the sweep's label. Raises UsageError: points are refused, or the name cannot be used."""
    planned_points: list[SweepPoint] = []
    refused: list[tuple[int, LaunchError]] = []
    label = ""
    for number, point in enumerate(chosen, 1):
        try:
            inputs = gather(point)
            label = label or sweep_name(name, inputs.spec.name, planned(inputs, offline=offline).run, what)
            labels = {**inputs.spec.labels, SWEEP_LABEL: label}  # labels leave the run ID as it is
            inputs = replace(inputs, spec=replace(inputs.spec, labels=labels))
            plan = planned(inputs, offline=offline)
        except LaunchError as error:
            refused.append((number, error))
            continue
        values = {override.path: override.value for override in point}
        planned_points.append(SweepPoint(number=number, values=values, plan=plan, inputs=inputs))
    if refused:
        raise refusal(refused, chosen)
    return planned_points


def refusal(refused: Sequence[tuple[int, LaunchError]], chosen: Sequence[Point]) -> LaunchError:
    """Return the error of the refused points, by number: the one that all have in common, or a text for each."""
    if len(refused) == len(chosen) and len({str(error) for _, error in refused}) == 1:
        return refused[0][1]
    lines = []
    for number, error in refused[:SHOWN]:
        settings = " ".join(f"{override.path}={value_text(override.value)}" for override in chosen[number - 1])
        lines.append(f"point {number} ({settings}): {error}")
    if len(refused) > SHOWN:
        lines.append(f"… and {plural(len(refused) - SHOWN, 'more point')}")
    problem = f"{len(refused)} of {plural(len(chosen), 'point')} cannot run, so nothing was started:\n"
    return UsageError(problem + "\n".join(lines), "Correct the values, or leave these out.")


def check_runs(planned_points: Sequence[SweepPoint]) -> None:
    """Check that no two points are the same run. Raises UsageError."""
    first: dict[str, SweepPoint] = {}
    for point in planned_points:
        if (other := first.setdefault(point.run, point)) is not point:
            differs = [path for path, value in point.values.items() if other.values[path] != value]
            raise UsageError(
                f"points {other.number} and {point.number} are the same run ({point.run}): "
                f"{', '.join(differs)} does not change what is computed",
                "Sweep settings of the computation: run.config, run.args, env, machine.gpus, machine.nodes.",
            )


def sweep_name(name: str, spec_name: str, run: str, what: str) -> str:
    """Return the name given with --name, else `<spec's name>-<6 hex>`: a hash of the first point's run and of what is
    swept. The number of random points does not count, so that more can be added.

    Raises UsageError: the given name is not valid, or is that of runs.
    """
    if not name:
        return f"{spec_name}-{hashlib.sha256(f'{run} {what}'.encode()).hexdigest()[:DIGEST]}"
    if not NAME.fullmatch(name):
        raise UsageError(
            f"--name {name}: invalid name of a sweep", "Use a-z, 0-9 and -, starting with a letter, at most 63."
        )
    if name == spec_name or re.fullmatch(RUN_ID, name):
        raise UsageError(
            f"--name {name} is the name of its runs, so commands could not tell them apart",
            f"Use another name: --name {spec_name}-sweep",
        )
    return name


def check_budget(sweep: SweepPlan) -> None:
    """Check that the points together cost at most `limits.usd`. Raises PlanRefused."""
    limit, total = sweep.usd_limit, sweep.usd_at_most
    if limit is None or total is None or total <= limit:
        return
    hints = []
    hours = int(min(point.plan.limits.hours for point in sweep.points) * limit / total * 100) / 100
    if hours >= 0.1:
        hints.append(f"Shorter runs: --hours {hours:g}")
    dearest = max(point.plan.limits.usd_at_most or 0.0 for point in sweep.points)
    if fit := int(limit / dearest):
        hints.append(f"Fewer points: at most {fit}, or draw some: --random {fit}")
    hints.append(f"A higher limit for the whole sweep: --usd {int(total) + 1}")
    problem = f"limits.usd: the {len(sweep.points)} points could cost {usd_text(total)} together, more than "
    raise PlanRefused(f"{problem}{usd_text(limit)}", "\n".join(hints))


def short_names(paths: Sequence[str]) -> list[str]:
    """Return the shortest ends of dotted names that differ from each other."""
    names = []
    for path in paths:
        parts = path.split(".")
        ends = (".".join(parts[-count:]) for count in range(1, len(parts) + 1))
        others = [other for other in paths if other != path]
        names.append(next((end for end in ends if not any(f".{name}".endswith(f".{end}") for name in others)), path))
    return names


def point_settings(points: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return each point's values as text, by the settings' shortest names that differ: `lr` for
    run.config.optimizer.lr. Of several values of `run.args`, only the arguments that differ."""
    texts = [{name: value_text(value) for name, value in values.items()} for values in points]
    if len(points) > 1 and all(isinstance(values.get("run.args", 0), list) for values in points):
        arguments = [argument_settings([*map(str, values["run.args"])]) for values in points]
        names = dict.fromkeys(name for point in arguments for name in point)
        differing = [name for name in names if len({point.get(name) for point in arguments}) > 1]
        for settings, point in zip(texts, arguments, strict=True):
            del settings["run.args"]
            settings |= {name: point.get(name, "") for name in differing}
    return [dict(zip(short_names([*settings]), settings.values(), strict=True)) for settings in texts]


def value_text(value: Any) -> str:
    """Return a value in the form that --set takes."""
    return str(value) if isinstance(value, str | float | int) and not isinstance(value, bool) else json.dumps(value)
