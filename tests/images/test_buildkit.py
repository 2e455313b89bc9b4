"""The docker command as BuildKit's client: what it gets, what it must not get, and how its failures are reported."""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from launcher.errors import UsageError
from launcher.images.docker_engine import EngineError
from launcher.images.docker_engine import buildkit as build

TOKEN = "canary-51b0"


@pytest.fixture
def context() -> Iterator[IO[bytes]]:
    with tempfile.TemporaryFile() as file:
        file.write(b"context")
        file.seek(0)
        yield file


def docker(folder: Path, script: str) -> dict[str, str]:
    """An environment whose docker command is a script."""
    (folder / "bin").mkdir()
    program = folder / "bin" / "docker"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    home = folder / "home"
    (home / ".docker" / "cli-plugins").mkdir(parents=True)
    (home / ".docker" / "config.json").write_text('{"auths": {"x": {"auth": "canary"}}}')
    return {"PATH": f"{folder}/bin:{os.environ['PATH']}", "HOME": str(home), "TOKEN": TOKEN, "OTHER": "canary-other"}


def run(environ: dict[str, str], context: IO[bytes], secrets: tuple[str, ...] = ("TOKEN",)) -> list[str]:
    lines: list[str] = []
    build(context, ["--tag=x"], host="unix:///s", environ=environ, secrets=secrets, on_line=lines.append)
    return lines


def test_it_gets_the_context_the_secrets_and_nothing_else(tmp_path: Path, context: IO[bytes]) -> None:
    script = 'echo "$@"; cat; echo; env | sort; ls -a "$DOCKER_CONFIG"'
    first, second, *rest = run(docker(tmp_path, script), context)
    assert first == "build --progress=plain --tag=x --secret id=TOKEN,env=TOKEN -"
    assert second == "context"
    shown = "\n".join(rest)
    assert {"DOCKER_BUILDKIT=1", "DOCKER_HOST=unix:///s", "cli-plugins"} <= set(rest)
    assert "canary" not in shown
    assert "TOKEN=***" in rest


def test_a_failed_step_has_its_last_lines_without_the_secret(tmp_path: Path, context: IO[bytes]) -> None:
    with pytest.raises(EngineError) as error:
        run(docker(tmp_path, f"echo one; echo fetching https://me:{TOKEN}@host >&2; exit 3"), context)
    assert "exit code 3" in error.value.problem
    assert "https://me:***@host" in error.value.problem
    assert TOKEN not in str(error.value)


def test_without_buildx_or_docker_it_says_what_to_install(tmp_path: Path, context: IO[bytes]) -> None:
    with pytest.raises(EngineError, match="buildx") as error:
        run(docker(tmp_path, "echo 'ERROR: the buildx component is missing or broken.'; exit 1"), context)
    assert "docs.docker.com" in error.value.hint
    with pytest.raises(EngineError, match="not installed"):
        run({"PATH": "/no/such/folder", "TOKEN": TOKEN}, context)


def test_a_secret_that_is_not_set_is_refused_before_anything_runs() -> None:
    with pytest.raises(UsageError) as refused:
        run({"PATH": "/no/such/folder"}, io.BytesIO())
    assert refused.value.field == "image.build_secrets"
    assert "export TOKEN=" in refused.value.hint


def test_each_line_of_a_secret_is_masked_and_the_longest_first(tmp_path: Path, context: IO[bytes]) -> None:
    """A build prints lines, so a key of several lines never appears as a whole; and one secret may begin another."""
    environ = docker(tmp_path, 'printf "%s\\n" "$KEY" "$TOKEN"')
    environ |= {"KEY": f"-----BEGIN\n{TOKEN}-first\n{TOKEN}-second\n"}
    lines = run(environ, context, secrets=("TOKEN", "KEY"))
    assert lines[:3] == ["***", "***", "***"]
    assert lines[-1] == "***"
