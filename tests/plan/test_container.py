"""The container's first process is launch_train.node itself: a shell there would not hand SIGTERM on."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from launcher.errors import PlanRefused
from launcher.plan.container import ENTRYPOINT
from tests.plan.planning import env_of, planned, request, told

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
    for command in [command for body in requests for command in commands(body)]:
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


def test_a_scripts_metrics_reach_the_node_as_they_are_written() -> None:
    regex = r"step (?P<step>\d+)$(?P<loss>.)"  # Vertex AI would replace $(…)
    plain = planned(run={"module": "mine"})
    asked = planned(run={"module": "mine", "metrics": {"regex": regex, "tensorboard": "tb"}})
    text = env_of(asked.attempts[0].request)["LAUNCH_METRICS"]
    assert json.loads(text.replace("$$(", "$(")) == {"regex": regex, "tensorboard": "tb"}
    assert "$$(" in text
    assert asked.run == plain.run, "what is read from the output is not part of the computation"
    assert "LAUNCH_METRICS" not in env_of(plain.attempts[0].request)


def test_how_a_script_resumes_reaches_the_node_and_is_not_part_of_the_run_id() -> None:
    plain = planned(run={"module": "mine"})
    resume = {"resume_glob": "$(LAUNCH_RUN_PATH)/ckpt_*.pt", "resume_args": ["--resume", "{path}"]}
    resuming = planned(run={"module": "mine", **resume})
    assert json.loads(env_of(resuming.attempts[0].request)["LAUNCH_RESUME"]) == {
        "glob": "$(LAUNCH_RUN_PATH)/ckpt_*.pt",
        "args": ["--resume", "{path}"],
    }
    assert resuming.run == plain.run
    assert "LAUNCH_RESUME" not in env_of(plain.attempts[0].request)


@pytest.mark.parametrize(
    "run", [{"args": ["--out=$(LAUNCH_RUN_PATH)/own"]}, {"resume_glob": "$(LAUNCH_RUN_PATH)/*", "resume_args": ["a"]}]
)
def test_a_vm_that_uses_the_path_of_its_run_folder_mounts_the_bucket(run: dict[str, Any]) -> None:
    settings: dict[str, Any] = {"run": {"module": "mine", **run}, "output": "gs://my-bucket/runs"}
    with pytest.raises(PlanRefused) as caught:
        planned("vm", **settings)
    assert "gs://my-bucket is not mounted" in caught.value.problem
    assert "mounts: [{bucket: my-bucket}]" in (caught.value.hint or "")
    planned("vm", **settings, mounts=[{"bucket": "my-bucket"}])
    planned("vertex", **settings)


def test_a_memory_limit_is_ours_and_jaxs_own() -> None:
    machine = {"type": "h100", "gpus": 2, "gpu_memory_gb": 20}
    env = env_of(request(machine=machine))
    assert (env["LAUNCH_GPU_MEMORY_GB"], env["XLA_PYTHON_CLIENT_MEM_FRACTION"]) == ("20", "0.250")
    own = env_of(request(machine=machine, env={"XLA_PYTHON_CLIENT_MEM_FRACTION": ".9"}))
    assert own["XLA_PYTHON_CLIENT_MEM_FRACTION"] == ".9"
    assert "LAUNCH_GPU_MEMORY_GB" not in env_of(request())


@pytest.mark.parametrize("target", ["vertex", "vm", "local"])
def test_a_memory_limit_above_the_gpus_memory_is_refused(target: str) -> None:
    with pytest.raises(PlanRefused) as caught:
        planned(target, machine={"type": "h100", "gpus": 2, "gpu_memory_gb": 81})
    assert caught.value.field == "machine.gpu_memory_gb"
    assert "80 GB" in str(caught.value)
