"""launch_train.host on a host: sent there once, then called for each operation."""

from __future__ import annotations

import hashlib
import json
import shlex
import subprocess
from functools import cache
from pathlib import Path
from typing import Any, Final

from launch_train.common import contract
from launch_train.host.folder_server import MARK, NO_SLURM
from launcher.errors import LaunchError, UnreachableError
from launcher.remote.connection import CommandFailed, Connection

ROOT: Final = '"$HOME/launch"'
"""The folder on a host for everything that launch puts there, as a shell word."""
NO_TRAINER: Final = 97
NO_PYTHON: Final = 98
PYTHONS: Final = (
    *("python3", "python3.13", "python3.12", "python3.11", "python3.10", "python3.14", "python"),
    *("/opt/conda/bin/python", "/venv/main/bin/python", "~/.venv/bin/python", "~/miniconda3/bin/python"),
)
"""Candidates for a host's Python: names on PATH, then the paths that rented containers use."""


class HostRefused(LaunchError):
    """A host can't do what it was asked to, and has done nothing."""


class Agent:
    """Operations on one host. They raise as `Connection` does."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def call(self, operation: str, request: Any = None, *, seconds: float = 60.0) -> Any:
        """Carry out an operation of launch_train.host and return its answer. Raises HostRefused."""
        body = json.dumps(request or {}).encode()
        for is_sent in (False, True):
            try:
                output = self.connection.run(script(operation), stdin=body, seconds=seconds)
                break
            except CommandFailed as error:
                if error.code != NO_TRAINER or is_sent:
                    raise self.explained(error) from error
                self.send_trainer()
        _, mark, answer = output.partition(MARK)
        if not mark:
            raise UnreachableError(f"{self.connection.host.name} ended without an answer", "Try again in a moment.")
        data = json.loads(answer)
        if isinstance(data, dict) and "refused" in data:
            raise HostRefused(f"{self.connection.host.name}: {data['refused']}", data["fix"])
        return data

    def serve(self, path: str) -> subprocess.Popen[bytes]:
        """Start the process that serves a folder (absolute, or ~/…)."""
        folder = f'"$HOME"/{shlex.quote(path[2:])}' if path.startswith("~/") else shlex.quote(path)
        return self.connection.open(script(f"serve {folder}"))

    def send_trainer(self) -> None:
        """Send launch_train to the host."""
        package = Path(contract.__file__).resolve().parents[1]
        files = [(f"launch_train/{path.relative_to(package).as_posix()}", path) for path in trainer_files()]
        self.connection.send(files, f"{ROOT}/trainer/{trainer_digest()}")

    def explained(self, error: CommandFailed) -> LaunchError:
        """Return the error of an operation that failed before launch_train.host ran, or because of Slurm."""
        if error.code == NO_PYTHON:
            name = self.connection.host.name
            hint = "Install one: apt-get install python3, or uv python install (https://docs.astral.sh/uv)"
            return LaunchError(f"{name} has no Python 3.10 or later", hint)
        if error.code == NO_SLURM:
            return UnreachableError(error.problem, "Try again in a moment.")
        return error


def script(operation: str) -> str:
    """Return the script of `sh` that carries out an operation with the first suitable Python; it exits with NO_PYTHON
    or NO_TRAINER if that is missing."""
    program = (
        f"import sys; sys.version_info < (3, 10) and sys.exit({NO_PYTHON}); "
        "from launch_train.host.__main__ import main; main(sys.argv[1:])"
    )
    return f"""
root={ROOT}
cd "$root/trainer/{trainer_digest()}" 2>/dev/null || exit {NO_TRAINER}
for each in {" ".join(PYTHONS)}; do
  command -v "$each" >/dev/null || continue
  "$each" -c '{program}' "$root" {operation}
  code=$?; [ $code = {NO_PYTHON} ] || exit $code
done
exit {NO_PYTHON}
"""


@cache
def trainer_files() -> tuple[Path, ...]:
    """Return the files of launch_train, sorted."""
    package = Path(contract.__file__).resolve().parents[1]
    paths = (path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return tuple(sorted(paths))


@cache
def trainer_digest() -> str:
    """Return a digest of launch_train's files."""
    total = hashlib.sha256()
    for path in trainer_files():
        total.update(f"{path.name}\0".encode() + path.read_bytes())
    return total.hexdigest()[:16]
