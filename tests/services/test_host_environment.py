"""The environment of a job on a host: real pip on OpenSSH's server, with wheels of the test's instead of an index."""

from __future__ import annotations

import ensurepip
import hashlib
import json
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from launch_train.host import environment
from launch_train.host.errors import RefusedError
from launcher.errors import LaunchError
from launcher.images.source_files import File
from launcher.inputs.gather import GatherOptions, Inputs, gather
from launcher.inputs.interpreter import Interpreter
from launcher.remote.agent import Agent
from launcher.remote.connection import connect_to
from launcher.services.hosts.environment import (
    NODE_PACKAGES,
    PROBE_ARGV,
    HostFacts,
    choose_base,
    facts_of,
    problem_of,
    provide_python,
)
from tests.command import ROOT
from tests.remote.hosts import NAME, a_host, launch
from tests.services.test_on_host import wait_until
from tests.ssh.server import SshServer

SPEC = """
name: tiny
run: {script: work.py, launcher: python}
image: {requirements: requirements.txt}
machine: {type: l4, gpus: 1}
"""
BARE_PYTHON = str(sys._base_executable)  # type: ignore[attr-defined]
"""Has no PyTorch."""


def make_wheel(folder: Path, name: str, version: str, code: str, needs: str = "") -> str:
    """Write a wheel with one module, and return its line in a lock file."""
    folder.mkdir(exist_ok=True)
    path, info = folder / f"{name}-{version}-py3-none-any.whl", f"{name}-{version}.dist-info"
    need = f"Requires-Dist: {needs}\n" if needs else ""
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{name}.py", code)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{need}")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    return f"{name}=={version} --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}\n"


def use_wheels(host: SshServer, wheels: Path) -> None:
    """Let pip on the host install from a folder alone."""
    settings = host.home / ".config" / "pip" / "pip.conf"
    settings.parent.mkdir(parents=True)
    settings.write_text(f"[global]\nno-index = true\nfind-links = {wheels}\n")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project whose script needs a package."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "job.yaml").write_text(SPEC)
    (folder / "work.py").write_text("import sys, tiny_greeting\nprint(tiny_greeting.TEXT, sys.prefix, flush=True)\n")
    (folder / "requirements.txt").write_text("tiny_greeting==1.0  # a comment\n")
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SshServer]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with a_host(tmp_path, monkeypatch, python=sys.executable) as server:
        make_wheel(tmp_path / "wheels", "tiny_greeting", "1.0", "TEXT = 'hello from a package'\n")
        use_wheels(server, tmp_path / "wheels")
        yield server


@pytest.mark.slow
def test_the_requirements_are_installed_once_beside_the_pytorch_of_the_host(host: SshServer, project: Path) -> None:
    planned_run = launch("on", NAME, "job.yaml", "--cpu", "--dry-run", "-o", "json", "--set", "image.setup=[echo]")
    assert "image.setup is not run on a host: echo" in json.loads(planned_run.stdout)["warnings"]
    request = json.loads(planned_run.stdout)["attempts"][0]["request"]
    assert request["packages"] == {"requirements": "tiny_greeting==1.0  # a comment\n"}
    ran = launch("on", NAME, "job.yaml", "--cpu")
    assert ran.returncode == 0, ran.stderr
    assert f"{NAME}: making the environment (requirements.txt, 1 package)…" in ran.stderr
    environments = environment.complete_environments(host.home / "launch")
    assert len(environments) == 1
    assert f"hello from a package {host.home}/launch/venvs/{environments[0]}" in ran.stdout + ran.stderr
    again = launch("on", NAME, "job.yaml", "--cpu", "--new")
    assert again.returncode == 0, again.stderr
    assert "making the environment" not in again.stderr
    python = launch("on", NAME, "job.yaml", "--cpu", "--new", "--python", sys.executable)
    assert python.returncode != 0
    assert "No module named 'tiny_greeting'" in python.stdout + python.stderr  # it is used as it is


@pytest.mark.slow
def test_a_package_that_pip_cannot_find_is_an_error_with_its_reason(host: SshServer, project: Path) -> None:
    (project / "requirements.txt").write_text("no_such_package==9.9\n")
    ran = launch("on", NAME, "job.yaml", "--cpu")
    assert ran.returncode == 1
    assert "No matching distribution found for no_such_package==9.9" in ran.stderr
    assert "--python PATH" in ran.stderr
    assert environment.complete_environments(host.home / "launch") == []
    assert not list((host.home / "launch").glob("jobs/*"))


# --- What an environment consists of ----------------------------------------------------------------------------------


@pytest.fixture
def bare_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SshServer]:
    """A host without PyTorch, whose pip finds wheels that stand for it and for launch's packages."""
    with a_host(tmp_path, monkeypatch, python=BARE_PYTHON) as server:
        wheels = tmp_path / "wheels"
        make_wheel(wheels, "tiny_greeting", "1.0", "TEXT = 'hello'\n", needs="torch")
        make_wheel(wheels, "torch", "2.13.0+cpu", "__version__ = '2.13.0+cpu'\n")
        make_wheel(wheels, "torch", "2.14.0", "raise ImportError('it replaced the PyTorch of the base')\n")
        (tmp_path / "lock").write_text(make_wheel(wheels, "tiny_node", "3.0", ""))
        use_wheels(server, wheels)
        yield server


def inputs_of(tmp_path: Path) -> Inputs:
    inputs = gather("local", Path("job.yaml"), (), GatherOptions(docker=True))
    locks = tuple(File(name, tmp_path / "lock") for name in ("node.lock", "requirements.lock"))
    return replace(inputs, source=replace(inputs.source, locks=locks, recipe=()))


def python_for(inputs: Inputs, said: list[str], named: str = "", candidate: str = "python3") -> str:
    agent = Agent(connect_to(NAME))
    answer = agent.call("describe", {"pythons": [named or candidate], "probe": PROBE_ARGV})
    return provide_python(agent, facts_of(answer, inputs, 0, NAME), named, inputs, said.append)


def modules_of(python: str, *names: str) -> str:
    code = f"import {', '.join(names)}; print({names[0]}.__file__)"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.slow
def test_without_pytorch_on_the_host_all_specs_share_one_environment_with_it(
    bare_host: SshServer, project: Path, tmp_path: Path
) -> None:
    (project / "job.yaml").write_text(SPEC.replace(", launcher: python", ""))  # torchrun needs PyTorch
    said: list[str] = []
    python = python_for(inputs_of(tmp_path), said)
    assert said == [
        f"{NAME}: making the environment (torch 2.13.0+cpu, launch's packages)…",
        f"{NAME}: making the environment (requirements.txt, 1 package)…",
    ]
    modules_of(python, "tiny_greeting", "tiny_node")
    shared = modules_of(python, "torch")
    (project / "requirements.txt").write_text("tiny_greeting>=1\n")
    other = python_for(inputs_of(tmp_path), said)
    assert said[2:] == said[1:2]
    assert other != python
    assert modules_of(other, "torch") == shared
    (project / "requirements.txt").write_text("")
    assert shared.startswith(str(Path(python_for(inputs_of(tmp_path), said)).parents[1]))
    assert len(said) == 3


@pytest.mark.slow
def test_a_run_folder_in_a_bucket_needs_launchs_packages_alone(
    bare_host: SshServer, project: Path, tmp_path: Path
) -> None:
    (project / "job.yaml").write_text(SPEC.replace("image:", "output: gs://bucket/runs\n#"))
    said: list[str] = []
    modules_of(python_for(inputs_of(tmp_path), said), "tiny_node")
    assert said == [f"{NAME}: making the environment (launch's packages)…"]


@pytest.mark.slow
def test_launchs_packages_come_last_beside_a_pytorch_of_the_host(
    bare_host: SshServer, project: Path, tmp_path: Path
) -> None:
    (project / "job.yaml").write_text(SPEC.replace(", launcher: python", ""))
    wheels = tmp_path / "wheels"
    pip = 'PIP_CONFIG_FILE=/dev/null PIP_FIND_LINKS= "$VENV/bin/python" -m pip'
    install = f"{pip} install --no-index --find-links {wheels}"
    make_wheel(wheels, "tiny_node", "2.0", "")
    request = {"id": "base", "python": BARE_PYTHON, "files": {}, "secrets": {}}
    environment.make_environment(bare_host.home, {**request, "script": f"{install} torch==2.13.0 tiny_node==2.0"})
    candidate = "venvs/base/bin/python"  # from the home folder
    said: list[str] = []
    python = python_for(inputs_of(tmp_path), said, candidate=candidate)
    assert said == [f"{NAME}: making the environment (requirements.txt, 1 package)…"]
    modules_of(python, "tiny_greeting")
    base = str(bare_host.home / "venvs" / "base")
    assert modules_of(python, "torch").startswith(base)
    assert modules_of(python, "tiny_node").startswith(base)
    path = subprocess.run([python, "-c", "import sys; print(sys.path[-1])"], capture_output=True, text=True, check=True)
    assert Path(path.stdout.strip(), "tiny_node.py").exists()  # version 3.0, of the lock
    assert python_for(inputs_of(tmp_path), said, named=candidate) == f"{base}/bin/python"
    with pytest.raises(
        LaunchError, match=rf"{NAME}: .* has no torch, which torchrun .*\nOn {NAME}: .* pip install torch"
    ):
        python_for(inputs_of(tmp_path), said, named=BARE_PYTHON)


def test_an_environment_that_was_killed_half_way_is_made_again(tmp_path: Path) -> None:
    request = {"id": "half", "python": BARE_PYTHON, "files": {}, "secrets": {}}
    marker = tmp_path / "begun"
    hanging = json.dumps({**request, "script": f'touch "$VENV/half" {marker}; sleep 60'})
    process = subprocess.Popen(
        [sys.executable, "-m", "launch_train.host", str(tmp_path), "environment"],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdin is not None
    process.stdin.write(hanging.encode())
    process.stdin.close()
    wait_until(marker.exists)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert (tmp_path / "venvs" / "half" / "half").exists()
    assert environment.complete_environments(tmp_path) == []
    python = environment.make_environment(tmp_path, {**request, "script": 'test ! -e "$VENV/half"'})
    assert Path(python).exists()
    assert environment.complete_environments(tmp_path) == ["half"]
    environment.make_environment(tmp_path, {**request, "script": "exit 1"})  # it is there


def test_a_python_that_cannot_add_pip_to_an_environment_gets_one_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    debian = tmp_path / "python3"  # without the package python3-venv
    debian.write_text(f'#!/bin/sh\n[ "$2 $#" = "venv 3" ] && echo no ensurepip && exit 1\nexec {BARE_PYTHON} "$@"\n')
    debian.chmod(0o755)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(Path(ensurepip.__file__).parent / "_bundled"))
    request = {"id": "a", "python": str(debian), "files": {}, "secrets": {}}
    environment.make_environment(tmp_path, {**request, "script": '"$VENV/bin/python" -m pip --version'})
    monkeypatch.setenv("PIP_FIND_LINKS", "/nonexistent")
    monkeypatch.setenv("PATH", "/nonexistent:/usr/bin:/bin")  # without uv
    with pytest.raises(RefusedError, match="can't make a virtual environment: no ensurepip") as refused:
        environment.make_environment(tmp_path, {**request, "id": "b", "script": "true"})
    assert "python3-venv" in refused.value.fix


@pytest.mark.slow
def test_two_launches_make_an_environment_once(tmp_path: Path) -> None:
    request = {"id": "one", "python": BARE_PYTHON, "files": {}, "secrets": {}, "script": f"echo x >> {tmp_path}/count"}
    argv = [sys.executable, "-m", "launch_train.host", str(tmp_path), "environment"]
    processes = [subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(2)]
    answers = [process.communicate(json.dumps(request).encode())[0] for process in processes]
    assert answers[0] == answers[1]
    assert (tmp_path / "count").read_text() == "x\n"


@pytest.mark.slow
def test_an_environment_is_finished_although_the_connection_is_lost(bare_host: SshServer, tmp_path: Path) -> None:
    script = f"echo x >> {tmp_path}/count; until test -e {tmp_path}/go; do sleep 0.1; done"
    request = {"id": "lost", "python": BARE_PYTHON, "files": {}, "secrets": {}, "script": script}
    code = "import json, sys; from launcher.remote import agent, connection as c; "
    code += f"agent.Agent(c.connect_to('{NAME}')).call('environment', json.load(sys.stdin))"
    client = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, start_new_session=True)
    assert client.stdin is not None
    client.stdin.write(json.dumps(request).encode())
    client.stdin.close()
    wait_until((tmp_path / "count").exists)
    os.killpg(client.pid, signal.SIGKILL)
    client.wait()
    (tmp_path / "go").touch()
    assert Agent(connect_to(NAME)).call("environment", request)["python"].endswith("venvs/lost/bin/python")
    assert (tmp_path / "count").read_text() == "x\n"


def test_a_value_of_build_secrets_is_neither_in_the_log_nor_in_the_error(tmp_path: Path) -> None:
    script = 'echo "ERROR: index https://user:$INDEX_TOKEN@example.com"; exit 1'
    request = {"id": "a", "python": BARE_PYTHON, "files": {}, "secrets": {"INDEX_TOKEN": "s3cr3t"}, "script": script}
    with pytest.raises(RefusedError, match=r"ERROR: index https://user:\*\*\*@example.com"):
        environment.make_environment(tmp_path, request)
    assert b"s3cr3t" not in b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


def test_the_packages_that_a_python_may_lack_are_those_of_the_lock() -> None:
    lines = (ROOT / "containers" / "node.in").read_text().splitlines()
    names = [line.partition(">")[0] for line in lines if line and not line.startswith("#")]
    assert tuple(names) == NODE_PACKAGES


def facts_with_gpu(inputs: Inputs, driver: str, capability: float, version: str) -> HostFacts:
    python = {"path": "/usr/bin/python3", "answer": [[int(part) for part in version.split(".")], {}, []]}
    gpu = {"name": "NVIDIA GPU", "driver": driver, "capability": capability}
    answer = {"pythons": [python], "gpus": [gpu], "environments": [], "processor": "x86_64"}
    return facts_of(answer, inputs, 1, NAME)


@pytest.mark.parametrize(
    ("driver", "capability", "python", "requirements", "torch"),
    [
        ("550.54.15", 8.9, "3.12.3", "", "2.13.0+cu126"),
        ("580.65.06", 8.9, "3.12.3", "", "2.13.0+cu130"),
        ("580.65.06", 7.0, "3.12.3", "", "2.13.0+cu126"),  # CUDA 13 has no kernels for a V100
        ("580.65.06", 9.0, "3.12.3", "--extra-index-url https://download.pytorch.org/whl/cu126", "2.13.0+cu126"),
        ("570.86.15", 12.0, "3.12.3", "torch==2.9.1", "2.9.1+cu128"),
        ("[N/A]", 0.0, "3.12.3", "torch==2.9.1+cu128", "2.9.1+cu128"),
    ],
)
def test_the_build_of_pytorch_fits_the_driver_and_the_gpu(
    project: Path, tmp_path: Path, driver: str, capability: float, python: str, requirements: str, torch: str
) -> None:
    (project / "requirements.txt").write_text(requirements)
    inputs = inputs_of(tmp_path)
    recipe = choose_base(facts_with_gpu(inputs, driver, capability, python), inputs, NAME)[1]
    assert recipe.torch is not None
    assert f"{recipe.torch.version}+{recipe.torch.build}" == torch


@pytest.mark.parametrize(
    ("driver", "capability", "python", "requirements", "message"),
    [
        ("570.86.15", 12.0, "3.12.3", "", r"(?s)cu130 needs driver 580, and .* 570.*torch==2.11.0\+cu128 works"),
        ("470.1", 8.0, "3.12.3", "", r"cu126 needs driver 525, and the machine has 470"),
        ("550.54", 8.9, "3.15.0", "", r"torch 2.13.0 has no wheel for Python 3.15"),
        ("550.54", 8.9, "3.14.0", "torch==2.6.0", r"(?s)torch 2.6.0 has no wheel .* 3.14.*uv python install"),
        ("550.54", 8.9, "3.9.0", "", r"(?s)has no Python that can run this job.*python3-venv"),
    ],
)  # fmt: skip
def test_a_host_without_a_pytorch_that_runs_is_an_error_with_what_works(
    project: Path, tmp_path: Path, driver: str, capability: float, python: str, requirements: str, message: str
) -> None:
    (project / "requirements.txt").write_text(requirements)
    inputs = inputs_of(tmp_path)
    with pytest.raises(LaunchError, match=message):
        choose_base(facts_with_gpu(inputs, driver, capability, python), inputs, NAME)


def test_a_pytorch_of_the_host_that_the_requirements_exclude_is_no_base(project: Path, tmp_path: Path) -> None:
    python = Interpreter(path="/usr/bin/python3", origin=NAME, version=(3, 12, 3), installed={"torch": "2.13.0+cu130"})

    def problem(requirements: str) -> str:
        (project / "requirements.txt").write_text(requirements)
        return problem_of(python, inputs_of(tmp_path))

    assert problem("torch>=2.9\n") == problem("torch==2.13.0+cu130\n") == problem("einops\n") == ""
    place = project / "requirements.txt"
    assert problem("torch==2.9.1\n") == f"{place}:1 needs torch==2.9.1; it has 2.13.0+cu130"
    assert problem("torch==2.13.0+cu126\n") == f"{place}:1 needs torch==2.13.0+cu126; it has 2.13.0+cu130"
