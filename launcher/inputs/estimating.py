"""Estimate a run from its spec: with formulas or, for a custom model, by building it in a separate process."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from launch_train.common.config import parse
from launcher import catalog
from launcher.errors import UsageError
from launcher.inputs.gather import Inputs
from launcher.plan.estimate import Estimate, estimate
from launcher.plan.memory.config_sizes import sizes_of
from launcher.plan.memory.model_sizes import ModelSizes
from launcher.spec.models import JobSpec

NO_TORCH = 'no formula for this model, and measuring it needs PyTorch here: pip install "gcp-launch[train]"'
MEASURED = "measured on fake tensors; an RNN or a custom kernel may keep more"


def estimate_spec(inputs: Inputs) -> tuple[Estimate, ...]:
    """Return the estimate of a spec on each of its machine types. Raises PlanRefused or UsageError."""
    spec = inputs.spec
    specs = (replace(spec, machine=replace(spec.machine, type=name)) for name in spec.machine.types)
    with inputs.located.naming_places():
        measured, note = measured_sizes(spec, inputs.code)
        return tuple(estimate(each, catalog.load(), inputs.context, measured, note) for each in specs)


def measured_sizes(spec: JobSpec, code: Path | None) -> tuple[ModelSizes | None, str]:
    """Return the sizes of a model without a formula, and a note on them. Raises UsageError: it can't be built."""
    if not spec.run.is_builtin or sizes_of(config := parse(spec.run.config)):
        return None, ""
    from importlib.util import find_spec

    if find_spec("torch") is None:
        return None, NO_TORCH
    from launcher.inputs.measured_model import of_measurement, run_measurement

    measurement = run_measurement(spec.run.config, code)
    if "error" in measurement:
        problem = f"run.config.model: {config.model.name} can't be estimated: {measurement['error']}"
        raise UsageError(problem, "launch local trains it for real.", field="run.config.model")
    return of_measurement(config.model.name, measurement), MEASURED
