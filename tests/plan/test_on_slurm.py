"""`launch slurm --dry-run`: the batch script, without a cluster."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher.services.hosts.service import queue_reason, state_on_host
from tests.command import Ran, launch

SPEC = """
name: tiny
machine: {type: a3-highgpu-2g, nodes: 2}
run: {script: work.py}
slurm: {login: login.example.edu, partition: gpu, options: ["--qos=long", "--exclusive"]}
"""


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "work.py").write_text("print(1)\n")
    (tmp_path / "job.yaml").write_text(SPEC)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "job.yaml"


def dry_run(*words: str) -> Ran:
    return launch("slurm", "job.yaml", "--dry-run", *words, cwd=Path.cwd())


def script_lines(*words: str) -> list[str]:
    ran = dry_run("-o", "sh", *words)
    assert ran.code == 0, ran.err
    return ran.out.splitlines()


def test_the_batch_script_is_the_one_of_the_request(spec: Path) -> None:
    lines = script_lines()
    document = json.loads(dry_run("-o", "json").out)
    assert document["attempts"][0]["request"]["script"].splitlines() == lines
    assert document["run_folder"].startswith("ssh://login.example.edu/~/launch/runs/tiny-")
    for option in (
        f"job-name=launch-{document['run']}",
        "dependency=singleton",
        "requeue",
        "nodes=2",
        "ntasks-per-node=1",
        "gpus-per-node=h100:2",
        "partition=gpu",
        "signal=B:USR1@90",
        "qos=long",
        "exclusive",
    ):
        assert f"#SBATCH --{option}" in lines


@pytest.mark.parametrize(
    ("words", "option"),
    [
        ((), "--time=1450"),  # limits.hours and ten minutes, in which launch ends the run itself
        (("--hours", "2"), "--time=130"),
        (("--hours", "48", "--set", "slurm.hours=12"), "--time=720"),
        (("--set", "slurm.gpu_type=nvidia_h100"), "--gpus-per-node=nvidia_h100:2"),
        (("--set", 'slurm.gpu_type=""'), "--gpus-per-node=2"),
        (("--partition", "short"), "--partition=short"),
        (("--account", "lab"), "--account=lab"),
    ],
)
def test_a_setting_and_its_option(spec: Path, words: tuple[str, ...], option: str) -> None:
    assert f"#SBATCH {option}" in script_lines(*words)


def test_without_gpus_none_are_asked_for(spec: Path) -> None:
    lines = script_lines("--cpu", "--set", "slurm.options=[--cpus-per-gpu=8, --gpu-freq=low, --qos=long]")
    assert not [line for line in lines if "gpu" in line and "partition" not in line]
    assert "#SBATCH --qos=long" in lines
    assert "2 nodes without GPUs, partition gpu" in dry_run("--cpu").out


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--on", "job.yaml"), "Name both: launch slurm job.yaml --on LOGIN"),
        (("--on", "colab:train"), "has no Slurm"),
        (("--usd", "5"), "Or remove the limit: --set limits.usd=null"),
        (("--set", "slurm.hours=0.01"), "use a number from 0.05"),
    ],
)
def test_an_error_says_what_to_do(spec: Path, words: tuple[str, ...], problem: str) -> None:
    ran = dry_run(*words)
    assert (ran.code, problem in ran.err) == (2, True), ran.err


def test_an_unused_spec_is_named_with_this_command(spec: Path) -> None:
    assert "To run it: launch slurm job.yaml" in launch("slurm", "--dry-run", cwd=Path.cwd()).out


def test_the_run_is_the_same_on_every_partition_and_on_a_host(spec: Path) -> None:
    runs = {json.loads(dry_run("-o", "json", *words).out)["run"] for words in ((), ("--partition", "short"))}
    spec.write_text(SPEC.replace("nodes: 2", "nodes: 1"))
    runs |= {json.loads(dry_run("-o", "json").out)["run"]}
    on_host = launch("on", "box", "job.yaml", "--dry-run", "-o", "json", cwd=Path.cwd())
    assert json.loads(on_host.out)["run"] in runs
    assert len(runs) == 2


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--set", "slurm.options=[--nodes=3]"), "that launch does not set itself"),
        (("--set", "slurm.options=['--qos=a b']"), "without spaces"),
        (("--spot",), "--spot"),
        (("--set", "secrets={TOKEN: projects/p/secrets/s/versions/1}"), "a job in Slurm gets no secrets"),
        (("--test-only",), "--test-only"),
    ],
)
def test_what_cannot_be_queued_is_refused_before(spec: Path, words: tuple[str, ...], problem: str) -> None:
    ran = dry_run(*words)
    assert ran.code == 2
    assert problem in " ".join(ran.err.split())


def test_the_plan_names_the_cluster_and_its_limit(spec: Path) -> None:
    text = dry_run().out
    assert "on the Slurm cluster of login.example.edu" in text
    assert "2 nodes with 2 GPUs (h100) each, partition gpu" in text


@pytest.mark.parametrize(
    ("slurm", "end", "state", "message"),
    [
        ("COMPLETED", {"code": 0, "stopped": ""}, "SUCCEEDED", None),
        ("FAILED", {"code": 1, "stopped": ""}, "FAILED", "non-zero status of 1"),
        ("FAILED", {"code": 1, "stopped": "", "problem": "Invalid gres"}, "FAILED", "start the nodes: Invalid gres"),
        ("CANCELLED", {"code": 75, "stopped": "interrupted"}, "CANCELLED", None),
        ("CANCELLED", None, "CANCELLED", None),
        ("COMPLETED", {"code": 75, "stopped": "expired"}, "EXPIRED", None),
        ("NODE_FAIL", None, "FAILED", "Slurm stopped the job (NODE_FAIL)"),
        ("TIMEOUT", {"code": 75, "stopped": "interrupted"}, "FAILED", "Slurm stopped the job (TIMEOUT)"),
        ("OUT_OF_MEMORY", None, "FAILED", "more memory"),
        ("FAILED", None, "FAILED", "the compute nodes need the home folder of the login node and /p/python"),
    ],
)
def test_the_end_of_a_job_by_slurms_state_and_what_was_recorded(
    slurm: str, end: dict[str, object] | None, state: str, message: str | None
) -> None:
    data = {"running": False, "end": end, "slurm": slurm, "cancelled": False, "request": {"python": "/p/python"}}
    assert state_on_host(data, "login")[0] == state
    error = state_on_host(data, "login")[1]
    assert (message is None and error is None) or (error and message and message in error.message)


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        ("Priority", "other jobs come first (Priority)"),
        ("ReqNodeNotAvail, UnavailableNodes:n1", "its nodes are down, drained or reserved"),
        ("QOSMaxGRESPerUser", "QOSMaxGRESPerUser"),
        ("AssocGrpGRESLimit", "a limit of your account or its QOS is reached"),
        ("None", ""),
    ],
)
def test_why_a_job_waits(reason: str, text: str) -> None:
    assert queue_reason(reason).startswith(text)
