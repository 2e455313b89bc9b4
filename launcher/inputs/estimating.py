"""Estimate a run from its spec: with formulas or, for a custom model, by building it in a separate process."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from launch_train.common import contract
from launch_train.common.config import parse
from launcher import catalog
from launcher.errors import UsageError
from launcher.inputs.gather import Inputs
from launcher.plan.estimate import Estimate, estimate
from launcher.plan.memory.sizes import ModelSizes, Saved, sizes_of
from launcher.spec.models import JobSpec

if TYPE_CHECKING:
    import subprocess

NO_TORCH = 'no formula for this model, and measuring it needs PyTorch here: pip install "gcp-launch[train]"'
MEASURED = "measured on fake tensors; an RNN or a custom kernel may keep more"
SECONDS = 120.0
"""Time limit of the process that builds a custom model."""
PROGRAM = "launch_train.bench.model_memory"


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
    measurement = run_measurement(spec.run.config, code)
    if "error" in measurement:
        problem = f"run.config.model: {config.model.name} can't be estimated: {measurement['error']}"
        raise UsageError(problem, "launch local trains it for real.", field="run.config.model")
    return of_measurement(config.model.name, measurement), MEASURED


def run_measurement(config: Mapping[str, Any], code: Path | None) -> dict[str, Any]:
    """Build and run the model in a process with limits of memory and time. Return its sizes, or `error`."""
    import subprocess  # these are needed for a custom model only
    import tempfile

    package = Path(contract.__file__).parents[2]
    path = os.pathsep.join(filter(None, [str(package), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    folder = str(code or Path.cwd())
    with tempfile.TemporaryDirectory() as temporary:
        result = Path(temporary) / "sizes.json"
        command = [sys.executable, "-P", "-m", PROGRAM, str(result)]
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            cwd=folder,
            env={**env, contract.CODE: folder},
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            _, text = child.communicate(json.dumps(config), timeout=SECONDS)
        except subprocess.TimeoutExpired:
            return {"error": f"it was not built and run once within {SECONDS:.0f} s"}
        finally:
            kill_group(child)
        if not result.is_file():
            last = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no message")
            return {"error": f"its process ended with exit code {child.returncode}: {last[:200]}"}
        measurement: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
        return measurement


def kill_group(child: subprocess.Popen[str]) -> None:
    """Kill the process and those that it started."""
    import signal

    if sys.platform == "win32":
        child.kill()
    else:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
    child.communicate()


def of_measurement(name: str, measurement: Mapping[str, Any]) -> ModelSizes:
    """Return the sizes from a measurement. The largest array counts twice: its gradient exists at the same time."""
    number = max(1, measurement["blocks"])

    def saved_in(kind: str) -> Saved:
        each, largest = measurement[kind]
        entries = measurement.get(f"entries_{kind}", each)
        return Saved(number, each, min(entries, each), each, each // number, 2 * largest, 0)

    return ModelSizes(
        name=name,
        parameters=measurement["parameters"],
        matrices=measurement["matrices"],
        block=measurement["block"],
        root=measurement["parameters"] - measurement["in_blocks"],
        head=0,
        units=measurement["units"],
        unit=measurement["unit"],
        logits=0,
        flops=measurement["flops"],
        full=saved_in("fp32"),
        half=saved_in("half"),
    )
