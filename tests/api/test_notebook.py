"""docs/notebooks: the code cells run in order, in one namespace, against the loopback cloud.

By `exec` instead of nbclient, which would start a kernel in another process: that one would neither have the fake clock
nor be kept from the network, and Jupyter would be needed for four cells.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launch_train import runfolder
from tests.cli.cloudjobs import Job
from tests.command import ROOT

NOTEBOOK = ROOT / "docs" / "notebooks" / "train.ipynb"


def cells(path: Path) -> list[str]:
    found = json.loads(path.read_text())
    assert (found["nbformat"], len({cell["id"] for cell in found["cells"]})) == (4, len(found["cells"]))
    code = [cell for cell in found["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] for cell in code), "notebooks are committed without outputs"
    return ["".join(cell["source"]) for cell in code]


def test_the_notebook_runs(user: Job, capsys: pytest.CaptureFixture[str]) -> None:
    world: dict[str, Any] = {}
    for number, cell in enumerate(cells(NOTEBOOK), 1):
        exec(compile(cell, f"cell {number}", "exec"), world)
        if "spec" in world and "plan" not in world:
            world["spec"] |= {"image": {"uri": user.image}, "output": "gs://my-bucket/runs"}  # what the cloud here has
        if "run" in world:
            part = f"runs/{world['run'].id}/{runfolder.metrics_part(1, 0, 0, 0)}"
            user.cloud.objects.put("my-bucket", part, b'{"event": "start"}\n{"step": 1, "loss": 2.5}\n')
    out = capsys.readouterr().out
    assert world["ended"].state == "SUCCEEDED"
    assert "1 steps; last loss: 2.5" in out
    assert out.splitlines()[-1] == "False"
    assert len(user.created) == 1
