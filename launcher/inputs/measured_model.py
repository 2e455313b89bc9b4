"""Build and measure a custom model in a separate process, with limits of memory and time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from launch_train.common import contract
from launcher.plan.memory.model_sizes import ModelSizes, Saved

SECONDS = 120.0
"""Time limit of the process that builds a custom model."""
PROGRAM = "launch_train.bench.model_memory"


def run_measurement(config: Mapping[str, Any], code: Path | None) -> dict[str, Any]:
    """Build and run the model in a process with limits of memory and time. Return its sizes, or `error`."""
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
        block_matrices=measurement["block"],
        root=measurement["parameters"] - measurement["in_blocks"],
        head=0,
        units=measurement["units"],
        unit=measurement["unit"],
        logits=0,
        flops=measurement["flops"],
        full=saved_in("fp32"),
        half=saved_in("half"),
    )
