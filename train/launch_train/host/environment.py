"""The Pythons of this machine, and virtual environments for jobs: <root>/venvs/ID, made once and used by later jobs.

An environment is complete once its file COMPLETE exists, which is written last; without it, it is made again.
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import shutil
import subprocess
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial, reduce
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from launch_train.common.scratch import temporary_folder
from launch_train.host.container import LOGIN_ONLY, command_in_container, remove_containers
from launch_train.host.errors import RefusedError
from launch_train.host.job import KEPT

COMPLETE: Final = "launch.json"
PROBE_SECONDS: Final = 60.0
LAST_LINES, SHOWN_LINES = 12, 4
"""An error shows so many lines of a failed program, from the first among its last lines that says error."""
NO_VENV_FIX: Final = (
    "Install what makes one, on the host: sudo apt-get install python3-venv\nOr name a Python that has the packages: "
    "--python PATH"
)


def probe_pythons(candidates: Iterable[str], argv: list[str]) -> list[dict[str, Any]]:
    """Run a probe (`argv`: what follows the interpreter) in each candidate, all at once, and return their answers.

    `candidates` are names on PATH, or paths from the home folder. An answer has `path` and what the probe printed on
    its last line; a candidate that fails has none.
    """
    paths = dict[str, str]()
    for candidate in candidates:
        name = os.path.expanduser(candidate)  # noqa: PTH111 - also a name on PATH
        path = shutil.which(str(Path.home() / name) if "/" in name else name)
        if path:  # python, python3 and python3.12 of one environment are the same
            paths.setdefault(f"{Path(path).parent} {os.path.realpath(path)}", path)
    options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    processes = []
    for path in paths.values():
        try:
            processes.append((path, subprocess.Popen([path, *argv], cwd="/", **options)))
        except OSError:  # it is no program
            continue
    answers = []
    for path, process in processes:
        try:
            output = process.communicate(timeout=PROBE_SECONDS)[0]
            answers.append({"path": path, "answer": json.loads(output.rstrip().rpartition(b"\n")[2])})
        except (subprocess.TimeoutExpired, ValueError):
            process.kill()
    return answers


def complete_environments(root: Path) -> list[str]:
    """Return the IDs of the environments that can be used."""
    return sorted(path.parent.name for path in (root / "venvs").glob(f"*/{COMPLETE}"))


def make_environment(root: Path, request: Mapping[str, Any]) -> str:
    """Return the Python of an environment, which is made unless it exists. Waits while another process makes it.

    The request has its `id`, the Python that it is made by, the `script` of `sh` that installs the packages, the
    `files` that this reads, by name, the `secrets` among its variables, and the `container` (null: none) in which it is
    made.

    Raises RefusedError: it can't be made; nothing is left of it but its log.
    """
    venv = root / "venvs" / str(request["id"])
    venv.parent.mkdir(parents=True, exist_ok=True)
    with (venv.parent / f"{venv.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (venv / COMPLETE).exists():
            Path(f"{venv}.log").unlink(missing_ok=True)
            try:
                label = f"{os.getuid()}/venv/{request['id']}"
                remove_containers(root, label)  # of a start that was killed: it would install there too
                run = partial(run_script, root=root, container=request.get("container"), label=label)
                create_venv(str(request["python"]), venv, run)
                install_packages(venv, request, run)
                remove_containers(root, label)
                (venv / COMPLETE).write_text(json.dumps({"python": request["python"], "script": request["script"]}))
            except OSError as error:
                shutil.rmtree(venv, ignore_errors=True)
                problem = f"the environment {venv} can't be made: {error.strerror}"
                raise RefusedError(problem, "Free some space there.") from error
            except BaseException:
                shutil.rmtree(venv, ignore_errors=True)
                raise
    return str(venv / "bin" / "python")


def create_venv(python: str, venv: Path, run: Callable[..., str]) -> None:
    """Create an empty virtual environment with pip, by `run` (`run_script`). Raises RefusedError: no tool for that
    works; OSError."""
    problem = ""
    for script in (
        '"$PYTHON" -m venv "$VENV"',
        # Debian's python3 can't add pip to an environment without the package python3-venv.
        '"$PYTHON" -m venv --without-pip "$VENV" && "$PYTHON" -m pip install --target "$("$VENV/bin/python" -c '
        "'import site; print(site.getsitepackages()[0])')\" pip",
        'uv venv --seed --python "$PYTHON" "$VENV"',
    ):
        shutil.rmtree(venv, ignore_errors=True)
        failure = run(script, venv.parent, {"PYTHON": python, "VENV": str(venv)}, Path(f"{venv}.log"))
        if not failure:
            return
        problem = problem or failure
    raise RefusedError(f"{python} can't make a virtual environment: {problem}", NO_VENV_FIX)


def install_packages(venv: Path, request: Mapping[str, Any], run: Callable[..., str]) -> None:
    """Install the packages of a request into its environment. Raises RefusedError with the installer's reason."""
    secrets: Mapping[str, str] = request["secrets"]
    env = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_PROGRESS_BAR": "off", "PIP_NO_INPUT": "1"}
    env |= {"PYTHON": str(request["python"]), "VENV": str(venv)}
    log = Path(f"{venv}.log")
    with temporary_folder("environment") as folder:
        for name, text in request["files"].items():
            Path(folder, name).write_text(text, encoding="utf-8")
        if failure := run(str(request["script"]), Path(folder), env, log, secrets):
            fix = f"The whole output, on the host: {log}\nOr name a Python that has the packages: --python PATH"
            raise RefusedError(f"the packages can't be installed: {failure}", fix)


def run_script(
    script: str,
    folder: Path,
    env: Mapping[str, str],
    log: Path,
    secrets: Mapping[str, str] = MappingProxyType({}),
    *,
    root: Path,
    container: Mapping[str, Any] | None,
    label: str,
) -> str:
    """Run a script of `sh` with the variables `env` and `secrets`, in a container if there is one, which gets the
    label; its output, without the secrets, goes to a file. Return why it failed (empty: it did not)."""
    lines = deque[str](maxlen=100)
    # Secrets come by its input: Docker keeps a container's variables in a file.
    words = ["sh", "-c", 'eval "$(cat)"; exec sh -c "$0" </dev/null', script]
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | dict(env)
    if container:
        variables = {name: os.environ[name] for name in KEPT - LOGIN_ONLY if name in os.environ} | dict(env)
        words, variables = command_in_container(
            container, words, variables, root, folder, places=[str(folder)], label=label, stdin=True
        )
    process = subprocess.Popen(
        words,
        cwd=folder,
        env=variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    assert process.stdin  # noqa: S101 - it is a pipe
    with suppress(BrokenPipeError):
        process.stdin.write("".join(f"export {name}={shlex.quote(value)}\n" for name, value in secrets.items()))
        process.stdin.close()
    with process, log.open("a", encoding="utf-8") as output:
        for text in process.stdout or ():
            line = reduce(lambda line, secret: line.replace(secret, "***"), secrets.values(), text)
            lines.append(line.strip())
            output.write(line)
            output.flush()
    if not process.returncode:
        return ""
    last = [line for line in lines if line][-LAST_LINES:]
    starts = [number for number, line in enumerate(last) if line.lower().startswith(("error", "fatal", "×"))]
    begin = starts[0] if starts else -SHOWN_LINES
    return "\n  ".join(last[begin:][:SHOWN_LINES]) or f"exit code {process.returncode}"
