"""Jobs of Slurm in containers: Pyxis's and Apptainer's, where they are installed (conftest.py)."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.remote.hosts import NAME, a_host, launch
from tests.slurm.cluster import SlurmCluster, a_cluster
from tests.slurm.conftest import APPTAINER, IMAGES, PYXIS
from tests.slurm.test_slurm import jobs_on, output
from tests.ssh.server import SshServer

JOB = """
name: tiny
machine: {type: h100, gpus: 1}
run: {script: work.py, launcher: python}
"""
WORK = """
import os, time
import launch_train.metrics
print("facts", os.path.exists("/opt/image"), os.getcwd(), os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
for step in range(200):
    launch_train.metrics.log(step + 1, loss=1.0)
    time.sleep(0.2 if os.path.exists("slow") else 0.01)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    folder = tmp_path_factory.mktemp("slurm")
    more = ""
    if PYXIS:
        plugins = folder / "plugstack.conf"
        plugins.write_text(f"required {PYXIS}/spank_pyxis.so runtime_path={folder}/pyxis\n")
        more = f"PlugStackConfig={plugins}"
        os.environ["PATH"] = f"{PYXIS}/enroot/bin:{os.environ['PATH']}"  # of slurmd
    with a_cluster(folder / "cluster", more=more) as cluster:
        yield cluster


@pytest.fixture
def login(cluster: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SshServer]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "job.yaml").write_text(JOB)
    (folder / "work.py").write_text(WORK)
    with a_host(tmp_path, monkeypatch, python=sys.executable, sends_trainer=True) as server:
        cluster.let_in(server)
        if APPTAINER:
            server.program("apptainer", f'APPTAINER_USERNS=1 exec {shutil.which("apptainer")} "$@"')
        yield server


def cpu(image: str) -> list[str]:
    """Return the words of a job without GPUs: those of the cluster are none for Enroot."""
    return ["--cpu"] if image.endswith(".sqsh") else []


@pytest.mark.slow
@pytest.mark.parametrize("image", IMAGES)
def test_a_job_runs_in_a_container(login: SshServer, image: str) -> None:
    ran = launch("slurm", "job.yaml", "--on", NAME, "--container", image, "--mount", str(Path.cwd()), *cpu(image))
    assert ran.returncode == 0, ran.stderr + output(login)
    assert "facts True" in output(login)
    assert jobs_on(login)[0]["container"]["runtime"] == ("pyxis" if image.endswith(".sqsh") else "apptainer")
    assert f"workspace {'' if cpu(image) else 0}\n" in output(login)
    bad = launch("slurm", "job.yaml", "--on", NAME, "--container", image, "--mount", "/nonexistent", "--new")
    assert "/nonexistent does not exist here" in bad.stderr


@pytest.mark.slow
@pytest.mark.parametrize("image", IMAGES)
def test_a_cancelled_job_in_a_container_ends(cluster: SlurmCluster, login: SshServer, image: str) -> None:
    Path("slow").touch()
    ran = launch("slurm", "job.yaml", "--on", NAME, "--container", image, "--detach", *cpu(image))
    assert ran.returncode == 0, ran.stderr
    until = time.monotonic() + 60
    while "facts" not in output(login):
        assert time.monotonic() < until, output(login)
        time.sleep(0.2)
    assert launch("cancel", f"{NAME}:tiny").returncode == 0
    while set(cluster.states().values()) & {"RUNNING", "COMPLETING"}:
        assert time.monotonic() < until
        time.sleep(0.2)
    assert "cancelled" in launch("status", f"{NAME}:tiny").stdout
