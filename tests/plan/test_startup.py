"""The training VM's startup script, run for real with stand-ins for the programs that it calls."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.plan.planning import request

STAND_INS = {
    "nvidia-smi": "exit 0",
    "gcloud": 'echo gcloud "$@" >> "$CALLS"',
    "curl": """\
echo curl "$@" >> "$CALLS"
[[ -n ${REFUSED:-} && $* == *$REFUSED* ]] && exit 22
case "$*" in
  *token) echo '{"access_token":"secret-1","x":2}' ;;
  *zone) echo projects/7/zones/us-central1-a ;;
  *name) echo job-1 ;;
  *DELETE*) [[ $* == *"Bearer secret-1 "*projects/7/* ]] || exit 22 ;;
esac""",
    "poweroff": 'echo poweroff >> "$CALLS"',
    "docker": 'printf "<%s>\\n" "$@" >> "$CALLS"; [[ $1 == pull ]] || exit "${CODE:-0}"',
    "sleep": "exit 0",
}


def run_script(tmp_path: Path, **env: str) -> tuple[int, str]:
    """Run the script; return its exit code and the calls it made."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, stand_in in STAND_INS.items():
        (programs / name).write_text(f"#!/bin/bash\n{stand_in}\n")
        (programs / name).chmod(0o755)
    body = request("vm", provisioning=["spot"], run={"config": {"data": "it's $(X)"}}, output="gs://b-b/o")
    items = body["metadata"]["items"]
    script = str(next(item["value"] for item in items if item["key"] == "startup-script"))
    calls = tmp_path / "calls"
    world = {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "CALLS": str(calls), **env}
    ran = subprocess.run(["bash", "-c", script], env=world, capture_output=True, text=True, check=False, timeout=60)
    return ran.returncode, calls.read_text()


def test_it_runs_the_container_with_its_environment_and_deletes_the_vm(tmp_path: Path) -> None:
    code, calls = run_script(tmp_path)
    assert code == 0
    assert '<LAUNCH_CONFIG={"data":"it\'s $(X)"}>' in calls
    assert "<train.node>" in calls
    assert "-X DELETE -H Authorization: Bearer secret-1" in calls
    assert "compute/v1/projects/7/zones/us-central1-a/instances/job-1" in calls
    assert "poweroff" not in calls


@pytest.mark.parametrize("code", ["1", "75"])
def test_a_failed_job_deletes_the_vm_too(tmp_path: Path, code: str) -> None:
    _, calls = run_script(tmp_path, CODE=code)
    assert "-X DELETE" in calls


@pytest.mark.parametrize("refused", ["DELETE", "token", "computeMetadata"])
def test_a_vm_that_can_not_delete_itself_powers_off(tmp_path: Path, refused: str) -> None:
    _, calls = run_script(tmp_path, REFUSED=refused)
    assert calls.splitlines()[-1] == "poweroff"
