"""The container's first process is launch_train.node itself: a shell there would not hand SIGTERM on."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from launcher.plan.container import ENTRYPOINT
from tests.plan.planning import told

ROOT = Path(__file__).parents[2]
PLANS = sorted((ROOT / "tests" / "golden").glob("*.json"))


def test_the_image_starts_the_node_without_a_shell() -> None:
    recipe = (ROOT / "containers" / "train.Dockerfile").read_text()
    (given,) = re.findall(r"^ENTRYPOINT (.*)$", recipe, re.MULTILINE)
    assert tuple(json.loads(given)) == ENTRYPOINT  # the shell form is no JSON
    assert not re.search(r"^(CMD|SHELL|STOPSIGNAL)\b", recipe, re.MULTILINE)


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_every_request_starts_the_node_without_a_shell(path: Path) -> None:
    requests = [attempt["request"] for attempt in json.loads(path.read_text())["attempts"]]
    for command in [command for request in requests for command in commands(request)]:
        assert command[: len(ENTRYPOINT)] == list(ENTRYPOINT)


def commands(request: dict[str, Any]) -> list[list[str]]:
    """The command of each container: a CustomJob's, or what a VM's startup script is told."""
    pools = request.get("jobSpec", {}).get("workerPoolSpecs", [])
    found = [pool["containerSpec"]["command"] for pool in pools]
    if "metadata" in request and (container := told(request)).get("kind") == "train":
        found.append([container["entrypoint"], *container["arguments"]])
    return found


def test_there_are_vms_and_jobs_among_them() -> None:
    kinds = {("startup-script" in path.read_text(), "workerPoolSpecs" in path.read_text()) for path in PLANS}
    assert {(True, False), (False, True)} <= kinds
    vms = [json.loads(path.read_text())["attempts"][0]["request"] for path in PLANS if "train-spot" in path.stem]
    assert vms
    assert all(commands(vm) for vm in vms)
