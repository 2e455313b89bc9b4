"""Jobs of Slurm in containers: Apptainer's and Pyxis's, where they are installed; the options of both everywhere."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch_train.host.container import binds_of, contained, pyxis_options
from tests.remote.hosts import NAME, a_host, launch
from tests.slurm.cluster import SlurmCluster, a_cluster
from tests.slurm.test_slurm import output
from tests.ssh.server import SshServer

PYXIS = os.environ.get("LAUNCH_TEST_PYXIS", "")
"""A folder with enroot/bin, spank_pyxis.so and box.sqsh, an image with Python (docs/testing.md)."""
APPTAINER = os.environ.get("LAUNCH_TEST_APPTAINER_IMAGE", "")
"""An image with Python that the installed apptainer runs."""
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


IMAGES = [*([f"{PYXIS}/box.sqsh"] if PYXIS else []), *([APPTAINER] if APPTAINER else [])]


@pytest.mark.slow
@pytest.mark.parametrize("image", IMAGES)
def test_a_job_runs_in_a_container(login: SshServer, image: str) -> None:
    ran = launch("slurm", "job.yaml", "--on", NAME, "--container", image, "--mount", str(Path.cwd()))
    assert ran.returncode == 0, ran.stderr + output(login)
    assert "facts True" in output(login)
    assert "workspace 0" in output(login)
    bad = launch("slurm", "job.yaml", "--on", NAME, "--container", image, "--mount", "/nonexistent", "--new")
    assert "/nonexistent does not exist here" in bad.stderr


@pytest.mark.slow
@pytest.mark.parametrize("image", IMAGES)
def test_a_cancelled_job_in_a_container_ends(cluster: SlurmCluster, login: SshServer, image: str) -> None:
    Path("slow").touch()
    ran = launch("slurm", "job.yaml", "--on", NAME, "--container", image, "--detach")
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


def test_the_options_of_pyxis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    digest = "sha256:" + "0" * 64
    for image, word in {
        "/shared/x.sqsh": "/shared/x.sqsh",
        "nvcr.io/nvidia/pytorch:25.06-py3": "nvcr.io#nvidia/pytorch:25.06-py3",
        f"nvcr.io/nvidia/pytorch:25.06-py3@{digest}": f"nvcr.io#nvidia/pytorch:{digest}",
        f"localhost:5000/a@{digest}": f"localhost:5000#a:{digest}",
        "pytorch/pytorch:latest": "pytorch/pytorch:latest",
    }.items():
        container = {"runtime": "pyxis", "image": image, "mounts": ["/data", "/a:/b"]}
        options = pyxis_options({"container": container, "folder": "/runs/tiny"}, Path("/scratch/launch"))
        assert options == [
            f"--container-image={word}",
            "--container-mounts=/home/me:/home/me,/scratch/launch:/scratch/launch,/runs/tiny:/runs/tiny,/data:/data,/a:/b",
            "--container-workdir=/scratch/launch",
        ]
    assert pyxis_options({}, Path("/")) == []


def test_the_words_of_docker_and_apptainer(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("DOCKER_", "APPTAINER_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("PATH", "/bin")
    monkeypatch.setenv("DOCKER_HOST", "unix:///x.sock")
    inside = ["sh", "-c", 'export PATH="${0:+$0:}$PATH"; exec "$@"', "/work/bin", "python", "-V"]
    env = {"PATH": "/work/bin", "A": "b"}
    container = {"runtime": "docker", "image": "a@sha256:0", "mounts": ["/data"], "user": "1:1"}
    words, client = contained(container, ["python", "-V"], env, Path("/root"), Path("/work"), gpus=2, label="1/run/0")
    assert words[-len(inside) - 1 :] == ["a@sha256:0", *inside]
    assert {"--gpus=all", "--env=A", "--env=HOME", "--user=1:1", "--label=launch-run=1/run/0"} <= {*words}
    assert "--mount=type=bind,source=/data,target=/data" in words
    assert "--interactive" not in words
    assert "--env=PATH" not in words
    assert client == {"HOME": "/home/me", "A": "b", "PATH": "/bin", "DOCKER_HOST": "unix:///x.sock"}
    container = {"runtime": "apptainer", "image": "/x.sif", "mounts": []}
    words, _ = contained(container, ["python", "-V"], env, Path("/root"), Path("/work"), gpus=2)
    assert words[:7] == ["apptainer", "--quiet", "exec", "--home", "/home/me", "--pwd", "/work"]
    assert words[-len(inside) - 2 :] == ["--nv", "/x.sif", *inside]
    assert binds_of(container, Path("/home/me"), ["gs://bucket"]) == ["/home/me:/home/me"]
