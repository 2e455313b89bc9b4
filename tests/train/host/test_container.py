"""The options by which Pyxis, Docker and Apptainer run a job."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launch_train.host import container as module
from launch_train.host.container import binds_of, command_in_container, mark_of, pyxis_options, remove_containers
from launch_train.host.errors import RefusedError
from launch_train.host.job import node_command


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
            "--container-mounts=/home/me:/home/me,/runs/tiny:/runs/tiny,/scratch/launch:/scratch/launch,/data:/data,/a:/b",
            "--container-workdir=/scratch/launch",
        ]
    assert pyxis_options({}, Path("/")) == []


def test_the_words_of_docker_and_apptainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("DOCKER_", "APPTAINER_", "XDG_"))]:
        monkeypatch.delenv(name)
    for name, value in {"HOME": "/home/me", "PATH": "/bin", "DOCKER_HOST": "unix:///x.sock"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(module, "answer_of_program", lambda *_words, **_more: "[name=seccomp]")
    monkeypatch.setattr("os.getgroups", lambda: [7, 8])
    env = {"PATH": "/job/bin", "A": "b"}
    container = {"runtime": "docker", "image": "a@sha256:0", "mounts": ["/data"]}
    words, client = command_in_container(
        container, ["python", "-V"], env, tmp_path, Path("/job"), gpus=2, label="1/run/0"
    )
    assert words[-6:] == ["a@sha256:0", "sh", "-c", module.SET_VARIABLES, "python", "-V"]
    options = {"--gpus=all", f"--user={os.getuid()}:{os.getgid()}", "--group-add=7", "--label=launch-run=1/run/0"}
    assert options <= {*words}
    assert "--mount=type=bind,source=/data,target=/data" in words
    assert {word for word in words if word.startswith("--env")} == {
        *("--env=LAUNCHENV_PATH", "--env=LAUNCHENV_A", "--env=LAUNCHENV_HOME", "--env=LAUNCHENV_PYTHONNOUSERSITE"),
        "--env=LAUNCH_NAMES",
    }
    assert "--interactive" not in words
    assert client["DOCKER_HOST"] == "unix:///x.sock"
    assert (client["PATH"], client["LAUNCHENV_PATH"]) == ("/bin", "/job/bin")
    assert mark_of(tmp_path, "1/run/0").exists()
    container = {"runtime": "apptainer", "image": "/x.sif", "mounts": []}
    words, client = command_in_container(container, ["python", "-V"], env, Path("/root"), Path("/job"), gpus=2)
    assert words[:7] == ["apptainer", "--quiet", "exec", "--home", "/home/me", "--pwd", "/job"]
    assert words[-7:] == ["--nv", "/x.sif", "sh", "-c", module.SET_VARIABLES, "python", "-V"]
    assert "DOCKER_HOST" not in client


def test_variables_win_in_a_container_and_folders_are_added() -> None:
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": "/image", "A": "image", "LAUNCH_NAMES": "PYTHONPATH A B"}
    env |= {"LAUNCHENV_PYTHONPATH": "/job", "LAUNCHENV_A": "it's $A", "LAUNCHENV_B": "1\n2"}
    wanted = ["/job:/image", "it's $A", "1\n2", None, None]
    names = ("PYTHONPATH", "A", "B", "LAUNCHENV_A", "LAUNCH_NAMES")
    code = f"import os; print([os.environ.get(name) for name in {names}] == {wanted})"
    words = ["sh", "-c", module.SET_VARIABLES, sys.executable, "-c", code]
    ran = subprocess.run(words, env=env, capture_output=True, check=True)
    assert ran.stdout == b"True\n", ran.stdout


def test_folders_behind_links_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, scratch = tmp_path / "home", tmp_path / "scratch"
    home.mkdir()
    scratch.mkdir()
    (home / "runs").symlink_to(scratch)
    monkeypatch.setenv("HOME", str(home))
    binds = binds_of({"mounts": ["/a"]}, home / "launch", ["~/runs/tiny", "gs://bucket", ""])
    places = [home, home / "launch", scratch / "tiny"]
    assert binds == [*((str(place), str(place)) for place in places), ("/a", "/a")]
    with pytest.raises(RefusedError, match="a colon or comma"):
        binds_of({"mounts": []}, home, ["/runs/a,b"])


def test_a_start_is_refused_while_an_earlier_container_may_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one of a job without a container: the run is the same."""
    monkeypatch.setattr(module, "REMOVE_SECONDS", 0)
    answers = {"ps": "", "stop": ""}

    def docker(*words: str, **_: object) -> str:
        if answers[words[1]] == "fails":
            raise RefusedError("docker ps: no answer")
        if words[1] == "stop":
            answers["ps"] = ""
        return answers[words[1]]

    monkeypatch.setattr(module, "answer_of_program", docker)
    assert not remove_containers(tmp_path, "1/run/0")
    mark = mark_of(tmp_path, "1/run/0")
    mark.parent.mkdir()
    mark.touch()
    answers["ps"] = "fails"
    with pytest.raises(RefusedError, match="may still run"):
        remove_containers(tmp_path, "1/run/0")
    answers["ps"] = "0123"
    assert remove_containers(tmp_path, "1/run/0")
    assert not mark.exists()


def test_a_container_gets_the_jobs_variables_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"HOME": "/home/me", "LD_LIBRARY_PATH": "/login/lib", "TOKEN": "of the login"}.items():
        monkeypatch.setenv(name, value)
    job = {"python": "/opt/bin/python3", "trainer": "t", "gpus": 0, "folder": "/runs/tiny"}
    job["container"] = {"runtime": "apptainer", "image": "/x.sif", "mounts": []}
    (tmp_path / "work").mkdir()
    _, env = node_command(tmp_path, job, tmp_path / "work", ["python"], {"A": "b", "PYTHONPATH": "/spec"})
    assert env["LAUNCHENV_A"] == "b"
    assert env["LAUNCHENV_PATH"] == f"{tmp_path}/bin:/opt/bin"
    assert env["LAUNCHENV_PYTHONPATH"] == f"{tmp_path}/trainer/t:/spec"
    assert not {"LAUNCHENV_LD_LIBRARY_PATH", "LAUNCHENV_TOKEN", "TOKEN"} & {*env}
