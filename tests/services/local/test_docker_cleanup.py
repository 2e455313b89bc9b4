"""What a killed launch leaves is found by its label and removed."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import docker.errors
import pytest

from launcher.images.docker_engine import EngineError
from launcher.services.local import docker_cleanup
from launcher.services.local.container_settings import LABEL
from launcher.services.local.in_docker import start_cleanup_process


class Engine:
    """Containers (id -> state) and networks of job 7; `stubborn` ones are being removed by someone else."""

    def __init__(self, stubborn: int = 0, **states: str) -> None:
        self.states = states
        self.stubborn = stubborn
        self.nets = ["net"]
        self.signals: list[tuple[str, str]] = []

    def containers(self, *, all: bool, filters: dict[str, str]) -> list[dict[str, Any]]:  # noqa: A002 -- Docker's word
        assert all
        assert filters["label"] == f"{LABEL}=7"
        status = filters.get("status")
        return [{"Id": one} for one, state in self.states.items() if status in (None, state)]

    def kill(self, one: str, name: str) -> None:
        self.signals.append((one, name))
        if self.states[one] != "running":
            raise docker.errors.APIError("409: it is not running")
        self.states[one] = "exited"

    def remove_container(self, one: str, *, force: bool, v: bool) -> None:
        assert force
        assert v
        if self.stubborn:
            self.stubborn -= 1
            raise docker.errors.APIError("409: removal is already in progress")
        del self.states[one]

    def networks(self, *, filters: dict[str, str]) -> list[dict[str, Any]]:
        assert filters == {"label": f"{LABEL}=7"}
        return [{"Id": one} for one in self.nets]

    def remove_network(self, one: str) -> None:
        assert not self.states, "a network with containers in it can't be removed"
        self.nets.remove(one)


def test_running_containers_have_time_to_save() -> None:
    engine = Engine(a="running", b="exited", c="running")
    docker_cleanup.end(engine, "7")
    assert set(engine.signals) >= {("a", "SIGTERM"), ("c", "SIGTERM")}
    assert set(engine.states.values()) == {"exited"}


def test_everything_is_removed_containers_first() -> None:
    engine = Engine(a="running", b="created", stubborn=2)
    assert docker_cleanup.clear(engine, "7")
    assert (engine.states, engine.nets) == ({}, [])


def test_a_removal_has_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docker_cleanup, "REMOVAL_SECONDS", 0.2)
    engine = Engine(a="dead", stubborn=1_000)
    engine.nets = []
    assert not docker_cleanup.clear(engine, "7")
    assert engine.states == {"a": "dead"}


def test_a_watcher_that_is_told_leaves_without_a_look() -> None:
    none = {"DOCKER_HOST": "unix:///no/such/socket"}
    with start_cleanup_process("7", none) as watcher:
        watcher.communicate(b"done", timeout=20)
    assert watcher.returncode == 0
    with start_cleanup_process("7", none) as watcher:
        assert watcher.stdin
        with pytest.raises(subprocess.TimeoutExpired):
            watcher.wait(0.5)
        watcher.stdin.close()
        with pytest.raises(subprocess.TimeoutExpired):  # it looks for an engine, which may come back
            watcher.wait(2)
        watcher.kill()


def test_an_engine_that_is_away_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/s")
    monkeypatch.setattr(docker_cleanup, "AWAY_SECONDS", 0)
    with pytest.raises(EngineError):
        docker_cleanup.engine()
    found, tries = object(), iter([EngineError("away"), EngineError("away"), None])

    def connect(_environ: Any) -> Any:
        if error := next(tries):
            raise error
        return found

    monkeypatch.setattr(docker_cleanup, "AWAY_SECONDS", 60)
    monkeypatch.setattr("launcher.images.docker_engine.Engine.connect", connect)
    monkeypatch.setattr("time.sleep", lambda _seconds: None)
    assert docker_cleanup.engine() is found


def test_a_network_that_cannot_be_removed_is_reported() -> None:
    class InUse(Engine):
        def remove_network(self, one: str) -> None:
            raise docker.errors.APIError(f"403: {one} has active endpoints")

    assert not docker_cleanup.clear(InUse(), "7")
