"""Plan a sweep from the command line. Imports nothing that only a launch needs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from launcher.cli.flows.plan import gather
from launcher.cli.options import Flags
from launcher.inputs.code_files import CodeCache
from launcher.runs.sweep.plan import SweepPlan, plan_sweep
from launcher.spec.overrides import Override
from launcher.spec.sweep import parse_axes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from launcher.inputs.gather import Inputs
    from launcher.plan.model import Target


def plan_of(
    target: Target, spec: Path | None, flags: Flags, *, random: int | None, seed: int, offline: bool
) -> SweepPlan:
    """Return the plan of a sweep; `--name` is its name. Raises as `plan_sweep` does."""
    single, axes = parse_axes(flags.set or ())
    for_all = flags._replace(set=single, name=None)
    cache = CodeCache()

    def inputs(point: Sequence[Override]) -> Inputs:
        return gather(target, spec, for_all, more=point, cache=cache)

    return plan_sweep(inputs, axes, random=random, seed=seed, name=flags.name or "", offline=offline)
