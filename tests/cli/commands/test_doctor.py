"""`launch doctor`: this machine, and a project on the loopback cloud."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from launcher.testing.googlecloud import GoogleCloud
from launcher.testing.googlecloud.compute.service import YOU
from tests.cli.cloudjobs import Job
from tests.command import ROOT, launch


def project(cloud: GoogleCloud, *argv: str, code: int = 0) -> dict[str, dict[str, Any]]:
    env = {**cloud.environ(), "CLOUDSDK_CORE_ACCOUNT": YOU}
    ran = launch("doctor", "--only", "project", "-o", "json", *argv, env=env)
    assert ran.code == code, ran.shown
    return {one["name"]: one for one in json.loads(ran.out)["project"]}


def test_a_project_that_lacks_the_bucket(cloud: GoogleCloud) -> None:
    found = project(cloud, code=1)
    assert found["credentials"]["text"] == YOU
    assert {name for name, one in found.items() if one["status"] == "failed"} == {"bucket", "repository"}
    assert found["bucket"]["fix"].startswith("gcloud storage buckets create gs://my-project-launch")


def test_a_project_without_gpu_quota(cloud: GoogleCloud) -> None:
    assert "l4 1000" in project(cloud, code=1)["quota"]["text"]
    cloud.quotas.limits = dict.fromkeys(
        [(f"custom_model_training_{kind}nvidia_{gpu}_gpus", "me-west1") for kind in ("", "preemptible_")
         for gpu in ("t4", "v100", "p100", "p4", "l4", "a100", "a100_80gb", "h100", "h100_mega", "h200")], 0,
    )  # fmt: skip
    found = project(cloud, "--region", "me-west1", code=1)["quota"]
    assert (found["status"], "--request-quota" in found["fix"]) == ("warning", True)


def test_the_quotas_of_a_project_are_a_table(cloud: GoogleCloud) -> None:
    cloud.quotas.limits["custom_model_training_nvidia_l4_gpus", "us-east4"] = 3
    cloud.quotas.usage["custom_model_training_nvidia_l4_gpus", "us-east4"] = 1
    regions = ("--region", "us-central1", "--region", "us-east4")
    ran = launch("doctor", "--only", "project", *regions, env={**cloud.environ(), "CLOUDSDK_CORE_ACCOUNT": YOU})
    rows = [line.split() for line in ran.out.splitlines()]
    assert ["quota", "limit", "used", "region"] in rows
    assert ["✓", "l4", "3", "1", "us-east4"] in rows
    assert ["✓", "preemptible_h100", "1000", "0", "us-central1,", "us-east4"] in rows


def test_the_quotas_of_vms_are_a_table(cloud: GoogleCloud) -> None:
    quotas = cloud.compute.quotas
    quotas.limit("NVIDIA_L4_GPUS", 0, "us-central1")
    quotas.limit("PREEMPTIBLE_NVIDIA_L4_GPUS", 0, "us-central1")
    quotas.limit("GPUS_ALL_REGIONS", 0, "")
    env = {**cloud.environ(), "CLOUDSDK_CORE_ACCOUNT": YOU}
    ran = launch("doctor", "--only", "project", "--for", "vm", "--region", "us-central1", env=env)
    rows = [line.split() for line in ran.out.splitlines()]
    assert ["✗", "NVIDIA_L4_GPUS", "0", "0", "1", "too", "low", "us-central1"] in rows
    assert ["✗", "GPUS_ALL_REGIONS", "0", "0", "1", "too", "low", "all", "regions"] in rows


def test_the_needs_of_a_spec(job: Job) -> None:
    ran = job.launch("doctor", "job.yaml", "--only", "project")
    assert ran.out.startswith("This project\n")
    shown = " ".join(ran.out.split())
    assert "✓ preemptible_l4 1000 0 2 fits us-central1, us-east4" in shown
    assert max(map(len, ran.out.splitlines())) <= 80
    assert not job.created


def test_a_project_for_vms(cloud: GoogleCloud) -> None:
    """The default VM's needs: its API, account, network, quota and image; and the policies."""
    found = project(cloud, "--for", "vm", "--region", "us-central1", code=1)
    assert {name for name, one in found.items() if one["status"] == "failed"} == {"bucket", "repository"}
    assert found["permissions"]["text"].startswith("you can create and watch VMs")
    assert found["policy"]["status"] == "ok"
    assert "no Cloud NAT" in found["vm"]["text"] or "neither" in found["vm"]["text"]
    cloud.compute.zones.open_out("us-central1")
    assert project(cloud, "--for", "vm", "--region", "us-central1", code=1)["vm"]["status"] == "ok"
    cloud.services.disabled.add("orgpolicy.googleapis.com")
    fix = project(cloud, "--for", "vm", "--region", "us-central1", code=1)["policy"]["fix"]
    assert fix.startswith("gcloud services enable orgpolicy.googleapis.com")


def test_expired_credentials_are_one_line(cloud: GoogleCloud) -> None:
    cloud.tokens = {"new"}
    env = {**cloud.environ(), "CLOUDSDK_AUTH_DISABLE_CREDENTIALS": "", "CLOUDSDK_AUTH_ACCESS_TOKEN": "old"}
    env.pop("CLOUDSDK_AUTH_ACCESS_TOKEN_FILE")
    ran = launch("doctor", "--only", "project", env=env)
    assert ran.code == 1
    [line] = [line for line in ran.out.splitlines() if line.startswith("✗")]
    assert line.startswith("✗ credentials")
    assert "gcloud auth application-default login" in ran.out


def test_without_a_project_only_that_is_reported() -> None:
    ran = launch("doctor", "--only", "project", env={"CLOUDSDK_CORE_PROJECT": ""})
    assert ran.code == 0
    assert "gcloud config set project PROJECT" in ran.out


@pytest.mark.slow
def test_this_machine() -> None:
    ran = launch("doctor", "--only", "machine")
    assert ran.out.startswith("This machine\n")
    assert "✓ python" in ran.out
    assert max(map(len, ran.out.splitlines())) <= 80
    assert ran.code == ("✗" in ran.out)


BASE = """
import sys
from importlib.machinery import PathFinder
for name in [name for name in sys.modules if name.partition(".")[0] == "google"]:
    del sys.modules[name]  # a .pth file of the environment may have loaded it
class Base:
    @staticmethod
    def find_spec(name, path=None, target=None):
        hidden = ("torch", "google", "requests", "grpc", "docker", "numpy")
        return None if name.partition(".")[0] in hidden else PathFinder.find_spec(name, path, target)
sys.meta_path = [Base if one is PathFinder else one for one in sys.meta_path]
sys.argv = ["launch", "doctor", "-o", "json"]
from launcher.cli import run
code = run()
print("MODULES", code, *[name for name in ("torch", "google") if name in sys.modules], file=sys.stderr)
"""


def test_it_works_with_the_base_package_alone() -> None:
    """Without torch and Google's clients, their lines report that, and no check fails."""
    env = {"PATH": "/usr/bin:/bin", "CLOUDSDK_CORE_PROJECT": "my-project", "HOME": "/nonexistent"}
    done = subprocess.run([sys.executable, "-c", BASE], env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    found = json.loads(done.stdout)
    machine = {one["name"]: one for one in found["machine"]}
    assert (machine["torch"]["status"], machine["google"]["status"]) == ("warning", "warning")
    [project] = found["project"]
    assert (project["status"], project["fix"]) == ("unknown", 'pip install "gcp-launch[gcp]"')
    assert done.stderr.splitlines()[-1] == "MODULES 0"


@pytest.mark.slow
def test_the_command_never_imports_torch() -> None:
    code = "import sys; sys.argv = ['launch', 'doctor', '--only', 'machine']; from launcher.cli import run; run()"
    code += "; print('torch' in sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1] == "False"


@pytest.mark.parametrize("half", ["cloud", ""])
def test_an_unknown_half_is_refused(half: str) -> None:
    assert launch("doctor", "--only", half).code == 2
