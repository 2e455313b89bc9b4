"""Plan and submit a sweep from Python."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from launcher.errors import UsageError
from launcher.images.pipeline import Builder
from launcher.inputs.code_files import CodeCache
from launcher.inputs.gather import GatherOptions, Inputs, gather, gather_data
from launcher.inputs.planning import SPEC
from launcher.plan import model
from launcher.plan.model import Target
from launcher.runs.cloud import CloudContext, open_cloud
from launcher.runs.cost_limit import require_limit
from launcher.runs.run import EventSink, OnEvent, Run
from launcher.runs.submit import Events, SubmitOptions, check_output, image_preparer
from launcher.runs.sweep.in_cloud import CloudSweep
from launcher.runs.sweep.plan import SweepPlan, plan_sweep
from launcher.spec.models import JobSpec
from launcher.spec.reader import Override
from launcher.spec.sweep import EXAMPLE, Axis, distribution


def sweep(
    spec: str | os.PathLike[str] | Mapping[str, Any] | JobSpec | None,
    values: Mapping[str, Sequence[Any] | str],
    *,
    target: Target = "vertex",
    changes: Mapping[str, Any] | None = None,
    folder: str | os.PathLike[str] | None = None,
    random: int | None = None,
    seed: int = 0,
    name: str = "",
) -> SweepPlan:
    """Plan a sweep: a run for each combination of values. Reads files and gcloud's settings; sends no request.

    `values` has a list of values for each swept setting: {"run.config.optimizer.lr": [1e-4, 3e-4]}. With `random`, the
    number of points to draw, it may also have a range: "log(1e-5,1e-2)", "uniform(0,0.3)", "int(1,8)". The other
    arguments are those of `plan`; `changes` hold for all points.

    Raises:
        UsageError: points are refused (the error names them), or nothing is swept.
        PlanRefused: the points together could cost more than `limits.usd`.
    """
    own = [Override(path, value, f"changes[{path!r}]") for path, value in (changes or {}).items()]
    cache = CodeCache()

    def inputs(point: Sequence[Override]) -> Inputs:
        if isinstance(spec, Mapping | JobSpec):
            base = Path(folder) if folder else None
            return gather_data(target, msgspec.to_builtins(spec), SPEC, [*own, *point], folder=base)
        return gather(target, Path(spec) if spec else None, [*own, *point], GatherOptions(cache=cache))

    axes = [axis_of(path, value) for path, value in values.items()]
    return plan_sweep(inputs, axes, random=random, seed=seed, name=name, offline=False)


def axis_of(path: str, values: Sequence[Any] | str) -> Axis:
    """Return the axis of a setting. Raises UsageError: a text is no range, or there are no values."""
    if isinstance(values, str):
        if (axis := distribution(path, values)) is None:
            raise UsageError(f"values[{path!r}]: {values!r} is not a range", "For example: log(1e-5,1e-2)")
        return axis
    if not values:
        raise UsageError(f"values[{path!r}] is empty", f"List its values, as in {EXAMPLE}")
    choices = tuple(Override(path, value, f"values[{path!r}]") for value in values)
    return Axis(path, json.dumps([*values], default=str), choices)


def submit_sweep(
    plan: SweepPlan,
    *,
    builder: Builder = "auto",
    create_repository: bool = False,
    preflight: bool = True,
    yes: bool = False,
    on_event: OnEvent | None = None,
) -> list[Run]:
    """Submit all points of a sweep in parallel, and return their runs once each has a job. The image is pushed once.

    Submitting a sweep again submits what is missing; points that have ended stay as they are. The arguments are those
    of `submit`.

    Raises:
        UsageError: the sweep runs on this machine, its name belongs to another one, its bucket cannot be used, or it
            could cost more than $100 without a limit and without `yes`.
        LaunchError: no point can be submitted.
    """
    if plan.target == "local":
        raise UsageError("the sweep's target is local", "Run its points one by one: api.local(api.plan(…))")
    events = EventSink(on_event)
    cloud = open_cloud(plan.project, events.say)
    options = SubmitOptions(builder=builder, create_repository=create_repository, preflight=preflight)
    prepare = point_preparer(plan, cloud, events, options)

    def confirm(point: model.Plan) -> None:
        require_limit(plan.with_all_costs(point), limited=yes or plan.is_limited)

    running = CloudSweep(plan, cloud, prepare, lambda _event: None, events.say, confirm=confirm)
    running.run(detach=True)
    return [Run(cloud, point.run, point.plan.run_folder, plan=point.plan) for point in plan.points]


def point_preparer(
    sweep: SweepPlan, cloud: CloudContext, events: Events, options: SubmitOptions
) -> Callable[[model.Plan], model.Plan]:
    """Return the function that prepares the image of a point. Raises UsageError: the output is another project's
    bucket."""
    check_output(sweep.points[0].plan, cloud)

    def prepare(plan: model.Plan) -> model.Plan:
        inputs = next(point.inputs for point in sweep.points if point.run == plan.run)
        return image_preparer(inputs, cloud, events, options)(plan)

    return prepare
