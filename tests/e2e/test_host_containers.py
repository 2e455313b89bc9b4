"""Jobs on a host in a container: a real Docker engine and, where it is installed, Apptainer, behind OpenSSH."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from launch_train.common.storage import LocalFolder
from launch_train.host import environment
from launch_train.host.container import RUN_LABEL, choose_runtime, provide_container
from launch_train.host.errors import RefusedError
from launch_train.runfolder.run import read_run
from launcher.testing.googlecloud import GoogleCloud
from tests.e2e.engine import Running
from tests.remote.hosts import NAME, a_host, launch, started
from tests.services.test_on_host import jobs_on, kill, processes_of, wait_until
from tests.ssh.server import SshServer

pytestmark = pytest.mark.e2e

RUNTIMES = ["docker", *(["apptainer"] if shutil.which("apptainer") else [])]
SPEC = """
name: tiny
run: {script: work.py, launcher: python, args: [SECONDS]}
machine: {type: l4, gpus: 1}
env: {PLACE: here}
"""
WORK = """
import json, os, pathlib, sys, time
import launch_train.metrics
facts = {"uid": os.getuid(), "id": pathlib.Path("/etc/image").read_text(), "folder": os.getcwd()}
facts |= {"path": os.environ["PATH"], "modules": os.environ["PYTHONPATH"], "groups": os.getgroups()}
facts |= {"place": os.environ["PLACE"], "data": os.listdir("/mnt/data"), "cuda": os.environ["CUDA_VISIBLE_DEVICES"]}
print("facts", json.dumps(facts), flush=True)
for step in range(int(sys.argv[1]) * 5):
    launch_train.metrics.log(step + 1, loss=1.0)
    time.sleep(0.2)
"""


class ContainerHost:
    """A host whose `runtime` runs `image`."""

    def __init__(self, server: SshServer, runtime: str, image: str, flags: list[str]) -> None:
        self.server, self.runtime, self.image, self.flags = server, runtime, image, flags

    def words(self, seconds: int) -> list[str]:
        """Return the words of a launch of a job of so many seconds."""
        Path("job.yaml").write_text(SPEC.replace("SECONDS", f'"{seconds}"'))
        return ["on", NAME, "job.yaml", "--cpu", *self.flags]

    def containers(self) -> list[str]:
        """Return Docker's containers of launch."""
        if self.runtime != "docker":
            return []
        words = [str(self.server.programs / "docker"), "ps", "--all", "--quiet", f"--filter=label={RUN_LABEL}"]
        output: str = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        return output.split()

    def output(self) -> str:
        """Return what the jobs have printed."""
        return "".join(path.read_text() for path in self.server.home.glob("launch/jobs/*/output.log"))


@pytest.fixture(scope="module")
def image(containers: Running, tmp_path_factory: pytest.TempPathFactory) -> str:
    """An image in the registry, with a file that tells it from this machine."""
    folder = tmp_path_factory.mktemp("image")
    (folder / "Dockerfile").write_text(
        f"FROM {containers.base}\nRUN echo yes > /etc/image && mkdir -p /mnt/data\nENV PYTHONPATH=/etc\n"
    )
    name, environ = f"{containers.registry}/lab/python:1", {**os.environ, **containers.environ, "DOCKER_BUILDKIT": "0"}
    for words in (
        ["build", "--quiet", "--tag", name, str(folder)],
        ["push", "--quiet", name],
        ["rmi", "--force", name],
    ):
        subprocess.run(["docker", *words], env=environ, check=True, capture_output=True)
    return name


@pytest.fixture(params=RUNTIMES)
def host(
    request: pytest.FixtureRequest,
    containers: Running,
    image: str,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[ContainerHost]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    project, data = tmp_path / "project", tmp_path / "data"
    for folder in (project, data):
        folder.mkdir()
    (project / "work.py").write_text(WORK)
    (data / "tokens.bin").touch()
    (tmp_path / "scratch").mkdir()
    monkeypatch.chdir(project)
    with a_host(tmp_path, monkeypatch, python=sys.executable, sends_trainer=True) as server:
        if request.param == "docker":
            server.program("docker", f'DOCKER_HOST={containers.engine} exec /usr/bin/docker "$@"')
        else:
            image = unpacked(containers, image, tmp_path_factory)
            server.program("docker", "exit 1")
            # As root without all capabilities, Apptainer needs a namespace of its own.
            server.program("apptainer", f'APPTAINER_USERNS=1 exec {shutil.which("apptainer")} "$@"')
        (server.home / "scratch").symlink_to(tmp_path / "scratch")
        flags = ["--container", image, "--mount", f"{data}:/mnt/data", "--output", "~/scratch/runs"]
        host = ContainerHost(server, request.param, image, flags)
        yield host
    assert host.containers() == []


def unpacked(containers: Running, image: str, factory: pytest.TempPathFactory) -> str:
    """Return a folder with an image's files, which Apptainer runs as it does a .sif."""
    folder = factory.getbasetemp() / "unpacked"
    if not folder.exists():
        folder.mkdir()
        environ = {**os.environ, **containers.environ}
        words = ["docker", "create", image, "true"]
        name = subprocess.run(words, env=environ, check=True, capture_output=True, text=True).stdout.strip()
        export = f"docker export {name} | tar -x -C {folder}; docker rm {name}"
        subprocess.run(export, shell=True, env=environ, check=True, capture_output=True)
    return str(folder)


def facts_of(host: ContainerHost) -> Mapping[str, Any]:
    line = next(line for line in host.output().splitlines() if "facts {" in line)
    facts: Mapping[str, Any] = json.loads(line.partition("facts ")[2])
    return facts


def test_a_job_runs_in_the_container_and_its_rows_are_in_the_run_folder(host: ContainerHost) -> None:
    ran = launch(*host.words(1))
    assert ran.returncode == 0, ran.stderr + host.output()
    (job,) = jobs_on(host.server)
    home = host.server.home
    facts = facts_of(host)
    assert (facts["uid"], facts["id"], facts["place"], facts["cuda"]) == (os.getuid(), "yes\n", "here", "")
    assert facts["data"] == ["tokens.bin"]
    folder = home.joinpath("launch", "work", job["id"])
    assert facts["folder"] == str(folder / "workspace")
    assert str(facts["path"]).startswith(f"{folder / 'bin'}:")
    assert host.runtime != "docker" or str(facts["modules"]).endswith(":/etc")  # of the image
    assert {*facts["groups"]} >= {*os.getgroups()}
    assert str(sys.prefix) not in str(facts["path"])
    assert job["container"]["runtime"] == host.runtime
    pinned = host.image if host.runtime == "apptainer" else f"{host.image.rpartition(':')[0]}@sha256:"
    assert job["container"]["image"].startswith(pinned)
    (run,) = home.glob("scratch/runs/*")  # behind a link
    (start,) = read_run(LocalFolder(run)).starts
    assert len(start.rows.times) == 5
    again = launch(*host.words(1), "--new")
    assert again.returncode == 0, again.stderr


def test_a_killed_client_and_supervisor_leave_no_second_job(host: ContainerHost) -> None:
    """With Docker the container runs on, without a lock: a start of the run removes it, also one without a container.
    Apptainer's ends."""
    client = started(*host.words(60))
    wait_until(lambda: "facts" in host.output())
    client.kill()
    client.communicate()
    inside = nodes(host) if host.runtime == "docker" else []
    kill([pid for pid in processes_of(host.server) if pid not in inside])
    wait_until(lambda: nodes(host) == inside)
    assert len(host.containers()) == (host.runtime == "docker")
    words = host.words(60)
    client = started(*(words[:4] if host.runtime == "docker" else words))
    wait_until(lambda: len(list(host.server.home.glob("launch/jobs/*"))) == 2 and nodes(host) not in ([], inside))
    assert host.containers() == []
    assert len(nodes(host)) == 1
    assert launch("cancel", f"{NAME}:tiny").returncode == 0
    client.communicate(timeout=60)
    assert client.returncode
    assert not nodes(host)


def test_a_run_whose_supervisor_was_killed_is_said_to_have_ended_only_without_a_container(host: ContainerHost) -> None:
    client = started(*host.words(60))
    wait_until(lambda: "facts" in host.output())
    client.kill()
    client.communicate()
    inside = nodes(host) if host.runtime == "docker" else []
    kill([pid for pid in processes_of(host.server) if pid not in inside])
    wait_until(lambda: nodes(host) == inside)
    wait_until(lambda: "supervisor was killed" in launch("status", f"{NAME}:tiny").stdout)
    assert not nodes(host)
    assert host.containers() == []


def nodes(host: ContainerHost) -> list[int]:
    """Return the nodes' processes, those in containers too."""
    pids = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
            is_node = (
                b"launch_train.node" in words and b"-c" not in words and words[0].endswith((b"python", b"python3"))
            )
            if is_node and str(host.server.home).encode() in (process / "environ").read_bytes():
                pids.append(int(process.name))
        except OSError:
            continue
    return pids


def test_secrets_reach_a_job_in_a_container(
    host: ContainerHost, cloud: GoogleCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "canary-5b1f")
    Path("work.py").write_text("import os, sys\nprint('facts', os.environ['TOKEN'][::-1], repr(sys.stdin.read()))\n")
    spec = f"{SPEC}secrets: {{TOKEN: projects/p/secrets/token/versions/1}}\n"
    ran = launch(*host.words(1)[:2], write(spec), *host.words(1)[3:])
    assert ran.returncode == 0, ran.stderr + host.output()
    assert "facts f1b5-yranac ''" in host.output()
    assert b"canary-5b1f" not in b"".join(path.read_bytes() for path in host.server.home.rglob("*") if path.is_file())


def write(spec: str) -> str:
    Path("secret.yaml").write_text(spec.replace("SECONDS", '"1"'))
    return "secret.yaml"


def test_packages_are_installed_beside_the_image(host: ContainerHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its environment is made and used in the container, at the same place as outside."""
    monkeypatch.setenv("HOME", str(host.server.home))
    monkeypatch.setenv("PATH", f"{host.server.programs}:{os.environ['PATH']}")
    root = host.server.home / "launch"
    root.mkdir()
    look = {"pythons": ["python9", "python3"], "probe": ["-c", "print([[3, 11], {}, []])"], "gpus": 0, "slurm": False}
    container = provide_container(root, {"image": host.image, "mounts": [], **look}, "")
    (python,) = container.pop("pythons")
    assert python["answer"] == [[3, 11], {}, []]
    request = {"id": "a", "python": python["path"], "files": {"x.txt": "hello"}, "secrets": {"TOKEN": "t"}}
    script = 'test -f /etc/image && "$VENV/bin/python" -m pip --version && cat x.txt > "$VENV/$TOKEN"'
    made = environment.make_environment(root, {**request, "script": script, "container": container})
    assert made == f"{root}/venvs/a/bin/python"
    assert (root / "venvs" / "a" / "t").read_text() == "hello"
    script = "echo ERROR: no such package; exit 1"
    with pytest.raises(RefusedError, match="ERROR: no such package"):
        environment.make_environment(root, {**request, "id": "b", "script": script, "container": container})


def test_what_is_missing_is_refused_before_anything_starts(host: ContainerHost) -> None:
    words = host.words(1)[:4]
    for flags, problem in (
        (["--container", "/nonexistent/image.sif"], "box: /nonexistent/image.sif does not exist here"),
        ([*host.flags[:2], "--mount", "/nonexistent"], "box: /nonexistent does not exist here"),
        (["--container", f"{host.image}-none"], "none"),
    ):
        ran = launch(*words, *flags)
        assert ran.returncode == 1, ran.stderr
        assert problem in ran.stderr
    assert not (host.server.home / "launch" / "jobs").exists()


def test_an_account_that_may_not_use_docker_is_told_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    docker = tmp_path / "docker"
    docker.write_text("#!/bin/sh\necho 'docker: permission denied while trying to connect' >&2\nexit 1\n")
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RefusedError, match="Docker can't be used: docker version: permission denied") as refused:
        choose_runtime("", "", is_slurm=False)
    assert refused.value.fix == "sudo usermod -aG docker $USER"
    with pytest.raises(RefusedError, match=r"Apptainer, which runs an image from a file, is not installed"):
        choose_runtime("/images/x.sif", "", is_slurm=False)
