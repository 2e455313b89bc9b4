"""Finding the Docker engine, and what is said where there is none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from launcher.images.docker_engine import Engine, EngineError
from tests.images import scripted_engine
from tests.images.scripted_engine import failure


def test_no_socket_and_one_that_nobody_listens_at(tmp_path: Path) -> None:
    dead = tmp_path / "dead.sock"
    with scripted_engine.Engine(dead):
        pass
    for host in (f"unix://{tmp_path}/none.sock", f"unix://{dead}", "tcp://127.0.0.1:9"):
        with pytest.raises(EngineError) as error:
            Engine.connect({"DOCKER_HOST": host})
        assert f"no Docker engine is running at {host} (DOCKER_HOST)" in error.value.problem
        assert "systemctl start docker" in error.value.hint


def test_no_permission_on_the_socket(monkeypatch: pytest.MonkeyPatch, double: scripted_engine.Engine) -> None:
    """Root may always: here the door itself says no."""

    def refuse(_url: str) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("launcher.images.docker_engine.check_listens", refuse)
    with pytest.raises(EngineError, match="no permission to use the Docker engine") as error:
        Engine.connect({"DOCKER_HOST": double.host})
    assert "usermod -aG docker" in error.value.hint


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"DOCKER_HOST": "nonsense://x"}, "can't be used"),
        ({"DOCKER_HOST": "tcp://127.0.0.1:9", "DOCKER_TLS_VERIFY": "1", "DOCKER_CERT_PATH": "/no"}, "can't be used"),
    ],
)
def test_an_invalid_address(environ: dict[str, str], said: str) -> None:
    with pytest.raises(EngineError, match=said):
        Engine.connect(environ)


def test_something_that_listens_and_is_no_engine(double: scripted_engine.Engine) -> None:
    double.says("GET", "/version", failure("what?", 500))
    with pytest.raises(EngineError, match=r"can't be used: .*500"):
        Engine.connect({"DOCKER_HOST": double.host})


def test_the_usual_socket_is_asked_where_nothing_else_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, double: scripted_engine.Engine
) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.setattr("docker.constants.DEFAULT_UNIX_SOCKET", f"http+{tmp_path}")
    monkeypatch.setattr("docker.ContextAPI.kwargs_from_context", lambda environment: {"base_url": environment["WHERE"]})
    engine = Engine.connect({"WHERE": double.host})
    engine.api.close()
    assert double.asked[0].path == "/version"


def test_without_the_sdk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "docker", None)
    with pytest.raises(EngineError, match="Docker's SDK is not installed") as error:
        Engine.connect({})
    assert error.value.hint == 'pip install "gcp-launch[docker]"'
