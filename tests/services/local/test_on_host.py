"""What a rehearsal takes from this machine: its GPUs, its path and its endpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.services.local.on_host import host_env, image_env, visible_gpus, with_gpus, with_threads
from launcher.services.local.replicas import Replica


def replica(gpus: int) -> Replica:
    return Replica(name="r", image="", argv=("true",), env={}, gpus=gpus)


@pytest.mark.parametrize(
    ("gpus", "visible", "shares"),
    [
        ((2, 2), ("0", "1", "2", "3"), ["0,1", "2,3"]),
        ((2, 2), ("0", "1", "2"), ["", ""]),  # not enough for all: CPUs for all
        ((1, 1), ("GPU-a", "GPU-b"), ["GPU-a", "GPU-b"]),
        ((1,), ("0", "1"), ["0"]),
        ((0,), ("0",), [""]),
    ],
)
def test_each_replica_has_gpus_of_its_own(gpus: tuple[int, ...], visible: tuple[str, ...], shares: list[str]) -> None:
    found = with_gpus([replica(count) for count in gpus], visible)
    assert [one.env["CUDA_VISIBLE_DEVICES"] for one in found] == shares


@pytest.mark.parametrize(
    ("envs", "count", "threads"),
    [
        (({}, {}), 8, ["4", "4"]),
        (({"LAUNCH_PROCESSES": "1"}, {"OMP_NUM_THREADS": "3"}), 1, ["1", "3"]),
        (({"LAUNCH_PROCESSES": "2"}, {"LAUNCH_PROCESSES": "2"}), 8, [None, None]),  # torchrun decides
        (({},), 8, [None]),
    ],
)
def test_replicas_of_one_process_share_the_processors(
    envs: tuple[dict[str, str], ...], count: int, threads: list[str | None]
) -> None:
    found = with_threads([Replica(name="r", image="", argv=("true",), env=env, gpus=0) for env in envs], count)
    assert [one.env.get("OMP_NUM_THREADS") for one in found] == threads


def test_the_users_own_choice_of_gpus_holds() -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "3, 1"}) == ("3", "1")
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == ()


def test_nvidia_smi_lists_the_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nprintf '0\\n1\\n'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert visible_gpus({}) == ("0", "1")
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert visible_gpus({}) == ()


def test_path_home_and_endpoints_are_all_that_comes_along() -> None:
    world = {
        "PATH": "/bin",
        "HOME": "/home/me",
        "USER": "me",
        "STORAGE_EMULATOR_HOST": "http://127.0.0.1:1",
        "CANARY": "1",
    }
    found = host_env(world, Path("/a"), Path("/b"))
    assert found["PATH"] == "/a:/b:/bin"
    assert found["HOME"] == "/home/me"
    assert found["STORAGE_EMULATOR_HOST"] == "http://127.0.0.1:1"
    assert not {"USER", "CANARY"} & found.keys()


def test_the_image_has_our_package_alone_on_its_path(tmp_path: Path) -> None:
    env = image_env(tmp_path)
    assert env["PYTHONPATH"] == str(tmp_path)
    assert [one.name for one in tmp_path.iterdir()] == ["launch_train"]
    assert (tmp_path / "launch_train" / "node" / "__main__.py").is_file()


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("0,2", ("0", "2")),
        (" 1 , GPU-3f,MIG-1/2/3 ", ("1", "GPU-3f", "MIG-1/2/3")),
        ("-1", ()),
        ("0,-1,1", ("0",)),
        ("", ()),
        ("none", ()),
    ],
)
def test_cuda_stops_at_the_first_that_is_none(said: str, expected: tuple[str, ...]) -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": said}) == expected
