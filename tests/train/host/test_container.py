"""The options by which Pyxis, Docker and Apptainer run a job."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from launch_train.host.container import binds_of, contained, pyxis_options


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
