"""Runs on a real Slurm, through a login node that ssh reaches."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.recipe import likeness, steps
from tests.remote.hosts import NAME, a_host, launch, started
from tests.slurm import recipe
from tests.slurm.cluster import SlurmCluster, a_cluster, until_true
from tests.slurm.recipe import losses
from tests.ssh.server import SshServer

pytestmark = pytest.mark.slow

QUICK = """
name: quick
machine: {type: h100, gpus: 1}
run:
  config:
    model: {name: gpt, n_layer: 1, n_head: 2, n_embd: 32, block_size: 32}
    data: {path: text.txt}
    steps: 60
    batch_size: 8
    log_every: 1
"""


LOADING = """
import time
import launch_train
import torch
from torch.utils.data import DataLoader, Dataset

class Data(Dataset):
    def __len__(self):
        return 1000
    def __getitem__(self, index):
        time.sleep(0.1)
        return torch.tensor(float(index))

if __name__ == "__main__":
    run = launch_train.init(seed=1)
    run.state.update(model=torch.nn.Linear(1, 1))
    values = iter(DataLoader(Data(), batch_size=1, num_workers=2))
    for step in run.steps(150, minutes=60):
        run.log(step, loss=float(next(values)))
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with a_cluster(tmp_path_factory.mktemp("slurm") / "cluster") as cluster:
        yield cluster


@pytest.fixture
def login(cluster: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SshServer]:
    """The cluster's login node, with a project in the working directory."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "text.txt").write_text("".join(f"{number} is followed by {number + 1}.\n" for number in range(3000)))
    (folder / "job.yaml").write_text(QUICK)
    with a_host(tmp_path, monkeypatch, python=sys.executable) as server:
        cluster.let_in(server)
        yield server


def wait_for_text(client: subprocess.Popen[str], text: str) -> str:
    """Read the messages of a client until one has this text, and return them."""
    said = ""
    for line in client.stderr or ():
        said += line
        if text in line:
            return said
    raise AssertionError(said)


def jobs_on(login: SshServer) -> list[dict[str, Any]]:
    """Return the jobs that launch has queued, each with the number of its Slurm job."""
    folders = sorted((login.home / "launch" / "jobs").iterdir())
    numbers = [json.loads((folder / "slurm.json").read_bytes())["number"] for folder in folders]
    return [
        {**json.loads((folder / "job.json").read_bytes()), "number": number}
        for folder, number in zip(folders, numbers, strict=True)
    ]


def output(login: SshServer) -> str:
    """Return what the batch scripts and the nodes printed."""
    return "".join(path.read_text() for path in login.home.glob("launch/jobs/*/output.log"))


def lines_of_launch(text: str) -> list[str]:
    """Return what launch itself printed, without its numbers."""
    text = text.replace(" is PENDING on ", " is RUNNING on ")  # by then it may have begun
    return [line for line in likeness(text) if not line.startswith("[")]


def slower(steps: int = 400) -> None:
    """Make the job of the working directory last some seconds."""
    Path("job.yaml").write_text(QUICK.replace("steps: 60", f"steps: {steps}"))


def trains(login: SshServer) -> bool:
    """Return whether a run has written a loss."""
    return any(b'"loss"' in path.read_bytes() for path in login.home.glob("launch/runs/*/metrics/*"))


@pytest.fixture
def undisturbed(tmp_path: Path) -> Callable[[], dict[int, float]]:
    """Return the function that runs the job here, without a disturbance, and returns its losses."""

    def run() -> dict[int, float]:
        whole = launch("local", "job.yaml", "--output", str(tmp_path / "undisturbed"))
        assert whole.returncode == 0, whole.stderr
        return losses(next((tmp_path / "undisturbed").iterdir()))

    return run


def test_two_nodes_train_with_the_gpus_that_slurm_gives(login: SshServer, cluster: SlurmCluster) -> None:
    Path("probe.py").write_text(
        "import os\nprint('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], "
        "'sees', os.environ['CUDA_VISIBLE_DEVICES'], os.environ['NCCL_IB_HCA'], os.environ['NCCL_SOCKET_IFNAME'])\n"
    )
    login.program("sbatch", f'NCCL_SOCKET_IFNAME=ib0 exec {cluster.programs / "sbatch"} "$@"')  # as a site's profile
    Path("probe.yaml").write_text(
        "name: probe\nmachine: {type: h100, gpus: 2, nodes: 2}\nrun: {script: probe.py}\nslurm: {partition: high}\n"
        "env: {NCCL_IB_HCA: mlx5_0}\n"
    )
    ran = launch("slurm", "probe.yaml", "--on", NAME, "-o", "json")
    assert ran.returncode == 0, ran.stderr + output(login)
    document = json.loads(ran.stdout)
    assert (document["state"], document["region"]) == ("SUCCEEDED", NAME)
    for rank in range(4):
        assert f"rank {rank} of 4 sees 0,1 mlx5_0 ib0" in ran.stderr
    (job,) = jobs_on(login)
    shown = cluster.run("scontrol", "show", "job", str(job["number"]))
    for text in ("JobState=COMPLETED", "Partition=high", f"JobName=launch-{job['run']}", "gpu:h100:2"):
        assert text in shown
    assert not list((login.home / "launch" / "work").iterdir())
    assert job["run"] in launch("runs", "--on", NAME).stdout
    again = launch("slurm", "probe.yaml", "--on", NAME)
    assert "has already succeeded" in again.stderr
    assert launch("rm", job["run"], "--yes").returncode == 0
    assert not list((login.home / "launch" / "runs").iterdir())


@pytest.mark.parametrize("cause", ["time limit", "preemption"])
def test_a_job_that_slurm_interrupts_saves_and_is_queued_again(
    login: SshServer, cluster: SlurmCluster, undisturbed: Callable[[], dict[int, float]], cause: str
) -> None:
    slower()
    client = started("slurm", "job.yaml", "--on", NAME, "--cpu", "--watch-for", "4m")
    until_true(lambda: trains(login), lambda: output(login))
    number = str(jobs_on(login)[0]["number"])
    if cause == "time limit":  # what Slurm does NOTICE_SECONDS before it
        cluster.run("scancel", "--batch", "--signal=USR1", number)
    else:
        cluster.run("sbatch", "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")
    said = wait_for_text(client, "it was queued again after a preemption")
    cluster.run("scontrol", "update", f"JobId={number}", "StartTime=now")  # Slurm would wait for two minutes
    _, errors = client.communicate(timeout=240)
    assert client.returncode == 0, said + errors + output(login)
    (job,) = jobs_on(login)
    folder = login.home / "launch" / "runs" / job["run"]
    assert cluster.states()[number] in ("COMPLETED", "PREEMPTED")  # 24.11 remembers an earlier preemption
    assert " Restarts=1 " in cluster.run("scontrol", "show", "job", number)
    starts = json.loads((login.home / "launch" / "jobs" / job["id"] / "starts.json").read_bytes())
    assert len(starts) == 2
    assert losses(folder) == undisturbed()


def test_a_script_with_loader_workers_loses_no_step_at_its_time_limit(login: SshServer, cluster: SlurmCluster) -> None:
    Path("work.py").write_text(LOADING)
    Path("job.yaml").write_text("name: loading\nmachine: {type: h100, gpus: 1}\nrun: {script: work.py}\n")
    client = started("slurm", "job.yaml", "--on", NAME, "--cpu", "--watch-for", "4m")
    until_true(lambda: trains(login), lambda: output(login))
    (job,) = jobs_on(login)
    cluster.run("scancel", "--batch", "--signal=USR1", str(job["number"]))
    said = wait_for_text(client, "it was queued again after a preemption")
    cluster.run("scontrol", "update", f"JobId={job['number']}", "StartTime=now")
    _, errors = client.communicate(timeout=240)
    assert client.returncode == 0, said + errors + output(login)
    assert "no step lost" in " ".join(launch("status", job["run"]).stdout.split())
    assert [*losses(login.home / "launch" / "runs" / job["run"])] == [*range(1, 151)]


@pytest.mark.parametrize("way", ["launch cancel", "scancel"])
def test_a_cancelled_run_saves_and_stays_cancelled(login: SshServer, cluster: SlurmCluster, way: str) -> None:
    slower(3000)
    assert launch("slurm", "job.yaml", "--on", NAME, "--cpu", "--detach").returncode == 0
    until_true(lambda: trains(login), lambda: output(login))
    (job,) = jobs_on(login)
    if way == "scancel":
        cluster.run("scancel", str(job["number"]))
        until_true(lambda: cluster.states()[str(job["number"])] == "CANCELLED")
    else:
        cancelled = launch("cancel", job["run"], "--yes")
        assert cancelled.returncode == 0, cancelled.stderr
    assert "cancelled after" in launch("status", job["run"]).stdout
    assert list((login.home / "launch" / "runs" / job["run"]).glob("checkpoints/*"))
    again = launch("slurm", "job.yaml", "--on", NAME, "--cpu")
    assert f"launch slurm SPEC --on {NAME} --resume {job['run']}" in again.stderr
    assert len(cluster.run("squeue", "--noheader", "--states=all", f"--name=launch-{job['run']}").splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ((), "no nodes are free (Resources)"),
        (("--partition", "short"), "it asks for more time than the partition allows: --set slurm.hours=H"),
    ],
)
def test_a_job_that_waits_says_why_and_is_cancelled_in_the_queue(
    login: SshServer, cluster: SlurmCluster, words: tuple[str, ...], reason: str
) -> None:
    full = cluster.run("sbatch", "--parsable", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 60")
    client = started("slurm", "job.yaml", "--on", NAME, "--cpu", "--watch-for", "4m", *words)
    wait_for_text(client, f"PENDING: {reason[:20]}")
    (job,) = jobs_on(login)
    assert reason in " ".join(launch("status", job["run"]).stdout.split())
    assert launch("cancel", job["run"], "--yes").returncode == 0
    client.communicate(timeout=60)
    assert cluster.states()[str(job["number"])] == "CANCELLED"
    assert "cancelled" in launch("status", job["run"]).stdout
    cluster.run("scancel", full)


def test_a_lost_answer_of_sbatch_makes_no_second_job(login: SshServer, cluster: SlurmCluster) -> None:
    sbatch = cluster.programs / "sbatch"
    lost = login.folder / "lost"
    lost.touch()
    login.program(
        "sbatch",
        f'if [ -e {lost} ]; then rm {lost}; {sbatch} "$@" >&2; '
        'echo "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation" >&2; exit 1; fi; '
        f'exec {sbatch} "$@"',
    )
    ran = launch("slurm", "job.yaml", "--on", NAME, "--cpu")
    assert ran.returncode == 0, ran.stderr + output(login)
    (job,) = jobs_on(login)
    assert len(cluster.run("squeue", "--noheader", "--states=all", f"--name=launch-{job['run']}").splitlines()) == 1


def test_a_second_slurm_job_of_a_submission_never_trains(login: SshServer, cluster: SlurmCluster) -> None:
    ran = launch("slurm", "job.yaml", "--on", NAME, "--cpu")
    assert ran.returncode == 0, ran.stderr
    (job,) = jobs_on(login)
    folder = login.home / "launch" / "jobs" / job["id"]
    before = output(login)
    with_home = f"--export=ALL,HOME={login.home}"
    cluster.run("sbatch", "--wait", with_home, f"--output={folder}/output.log", str(folder / "script"), str(folder))
    assert output(login)[len(before) :].startswith("launch: job ")
    assert "ends at once" in output(login)[len(before) :]


@pytest.mark.parametrize(
    ("words", "problem", "fix"),
    [
        (("--partition", "nosuch"), "invalid partition specified: nosuch", "sinfo -s"),
        (
            ("--set", "slurm.gpu_type=b200"),
            "Requested node configuration is not available",
            "--set slurm.gpu_type=NAME",
        ),
    ],
)
def test_what_slurm_refuses_is_told_with_its_fix(
    login: SshServer, words: tuple[str, ...], problem: str, fix: str
) -> None:
    for test in (("--test-only",), ()):
        refused = launch("slurm", "job.yaml", "--on", NAME, *words, *test)
        assert refused.returncode == 1, refused.stderr
        assert problem in refused.stderr
        assert fix in refused.stderr
    assert not list(login.home.glob("launch/jobs/*"))


def test_the_cluster_says_when_a_job_would_start(login: SshServer) -> None:
    asked = launch("slurm", "job.yaml", "--on", NAME, "--test-only")
    assert asked.returncode == 0, asked.stderr
    assert "to start at" in asked.stdout
    assert not list(login.home.glob("launch/jobs/*"))


def test_a_slurm_that_does_not_answer_is_said_before_anything_is_sent(login: SshServer) -> None:
    login.program("sinfo", "echo 'fatal: could not establish a configuration source' >&2; exit 1")
    refused = launch("slurm", "job.yaml", "--on", NAME, "--cpu")
    assert refused.returncode == 1
    assert "Slurm does not answer: fatal: could not establish a configuration source" in refused.stderr
    assert "--on LOGIN" in refused.stderr
    assert not [*login.home.glob("launch/jobs/*"), *login.home.glob("launch/code/*")]


def test_a_login_node_without_slurm_says_so(login: SshServer) -> None:
    login.program("sbatch", "exit 127")
    refused = launch("slurm", "job.yaml", "--on", NAME, "--cpu")
    assert "sbatch is not installed here" in refused.stderr


def test_the_page_on_one_run_in_three_places_is_what_happens(
    tmp_path: Path, undisturbed: Callable[[], dict[int, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = recipe.PAGE.read_text()
    shown = recipe.outputs(text, tmp_path)
    for step, output in zip(steps(text), shown, strict=True):
        assert lines_of_launch(output) == lines_of_launch(step[1]), step[0]
    monkeypatch.chdir(tmp_path / "project")
    Path("my_job.yaml").rename("job.yaml")
    whole = undisturbed()
    assert losses(next(Path("runs").iterdir())) == whole
    assert [*whole] == [*range(1, 1501)]
