"""`launch local --docker`: the replicas of a request as real containers, and nothing of them left."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import tarfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import docker
import pytest

from launch_train.common import contract
from launcher.services.local.container_settings import LABEL
from tests.e2e.engine import Running
from tests.e2e.running import run, started

pytestmark = [pytest.mark.e2e, pytest.mark.slow(turn=2)]

PREEMPTED = """
import os, signal, sys, time
from pathlib import Path
folder = Path(os.environ["LAUNCH_RUN_FOLDER"])
def told(*_):
    print("pid", os.getpid(), "saves", flush=True)
    (folder / "saved").write_text("")
    sys.exit(75)
signal.signal(signal.SIGTERM, told)
if (folder / "saved").exists():
    sys.exit(0)
print("ready", flush=True)
time.sleep(60)
"""

PRIMARY = """
import json, os, socket, sys, time
host, _, port = json.loads(os.environ["CLUSTER_SPEC"])["cluster"]["workerpool0"][0].rpartition(":")
"""

LISTENS = (
    PRIMARY
    + """
with socket.create_server(("", int(port))) as server:
    print("from", server.accept()[0].recv(99).decode(), "to", socket.gethostname())
"""
)

CONNECTS = (
    PRIMARY
    + """
deadline = time.monotonic() + 300
while True:
    try:
        with socket.create_connection((host, int(port)), 5) as peer:
            sys.exit(peer.sendall(socket.gethostname().encode()))
    except OSError:
        if time.monotonic() > deadline:
            raise
        time.sleep(0.1)
"""
)

ASKS = """
import os, urllib.request
print(urllib.request.urlopen(os.environ["STORAGE_EMULATOR_HOST"]).read().decode(), end=" ", flush=True)
print(open(os.environ["GOOGLE_APPLICATION_CREDENTIALS"]).read(), flush=True)
"""


class Docker:
    """The engine, what it has of any job's, and a folder to run `launch` in."""

    def __init__(self, env: Mapping[str, str], image: str, folder: Path) -> None:
        self.env = dict(env)
        self.image = image
        self.folder = folder
        self.api: Any = docker.APIClient(version="auto", base_url=env["DOCKER_HOST"])

    def left(self) -> list[str]:
        """Containers and networks of jobs."""
        filters = {"label": LABEL}
        containers = [one["Names"][0] for one in self.api.containers(all=True, filters=filters)]
        return [*containers, *(one["Name"] for one in self.api.networks(filters=filters))]

    def request(self, *codes: str, image: str = "", output: Path | None = None, **container: Any) -> Path:
        """A request with a pool for each line of Python; the first has one replica, as have the others."""
        pools = [
            {"containerSpec": {"imageUri": image or self.image, "command": ["python3", "-uc", code], **container}}
            for code in codes
        ]
        spec: dict[str, Any] = {"workerPoolSpecs": pools}
        if output:
            spec["baseOutputDirectory"] = {"outputUriPrefix": str(output)}
            for pool in pools:
                pool["containerSpec"]["env"] = [{"name": "LAUNCH_RUN_FOLDER", "value": str(output)}]
        path = self.folder / "request.json"
        path.write_text(json.dumps({"displayName": "job", "jobSpec": spec}))
        return path

    def local(
        self, request: Path, *flags: str, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        return run("local", "--docker", "--request", request, *flags, cwd=self.folder, env={**self.env, **(env or {})})

    def start(self, request: Path) -> subprocess.Popen[str]:
        return started("local", "--docker", "--request", request, cwd=self.folder, env=self.env)

    def changed(self, *changes: str, files: Mapping[str, bytes] | None = None) -> str:
        """The image with changes (`USER 1000`) and executable files in /; its id."""
        made = self.api.create_container(self.image, ["true"])
        try:
            if files:
                self.api.put_archive(made, "/", archive(files))
            return str(self.api.commit(made, changes=list(changes))["Id"])
        finally:
            self.api.remove_container(made)


def archive(files: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), 0o755
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


@pytest.fixture
def engine(containers: Running, tmp_path: Path) -> Iterator[Docker]:
    """The engine, of which all jobs have gone at the end."""
    made = Docker(containers.environ, containers.base, tmp_path)
    with contextlib.closing(made.api):
        yield made
        assert made.left() == []


def until(true: Callable[[], Any], seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.1)


def test_two_replicas_see_each_other_by_their_names(engine: Docker) -> None:
    ran = engine.local(engine.request(LISTENS, CONNECTS))
    assert ran.returncode == 0, ran.stderr
    assert "[workerpool0-0] from workerpool1-0 to workerpool0-0" in ran.stderr
    assert f"running in containers of {engine.image}\n" in ran.stderr
    assert f"image     {engine.image}" in ran.stdout


def test_two_jobs_beside_each_other(engine: Docker) -> None:
    request = engine.request(LISTENS, CONNECTS)
    running = [engine.start(request) for _ in range(2)]
    for process in running:
        _, err = process.communicate(timeout=3000)
        assert process.returncode == 0, err


def test_it_is_as_in_a_container_of_vertex(engine: Docker) -> None:
    code = "import os, shutil; print('I', os.getpid(), shutil.disk_usage('/dev/shm').total >> 20, *sorted(os.environ))"
    image = engine.changed("ENV OWN=1", "USER 1000:1000", 'ENTRYPOINT ["python3", "-c"]', f"CMD {json.dumps([code])}")
    ran = engine.local(engine.request("", image=image, command=[]), env={"CANARY": "1"})
    assert ran.returncode == 0, ran.stderr
    (line,) = [line for line in ran.stderr.splitlines() if line.startswith("[workerpool0-0] I ")]
    pid, shm, *names = line.split()[2:]
    assert pid == "1"
    assert int(shm) > 1000
    assert set(names) >= {"CLUSTER_SPEC", "CLOUD_ML_JOB_ID", "OWN", "PATH"}
    assert not {"CANARY", "DOCKER_HOST", "CLOUDSDK_CORE_PROJECT"} & set(names)


def test_a_replica_that_fails(engine: Docker) -> None:
    ran = engine.local(engine.request("import time; time.sleep(1)", "raise SystemExit(7)"), "-o", "json")
    assert ran.returncode == 3
    assert json.loads(ran.stdout)["exit_codes"] == {"workerpool0-0": 0, "workerpool1-0": 7}
    assert "workerpool1-0 exited with 7" in ran.stderr


def test_a_preemption_reaches_pid_1_which_saves_as_who_asked(engine: Docker, tmp_path: Path) -> None:
    """The image's own user could not write here, and nobody else could remove what it wrote."""
    folder, image = tmp_path / "out" / "run", engine.changed("USER 1000:1000")
    ran = engine.local(engine.request(PREEMPTED, image=image, output=folder), "--preempt-after", "6s")
    assert ran.returncode == 0, ran.stderr
    assert "[workerpool0-0] pid 1 saves" in ran.stderr
    assert "workerpool0-0 exited with 75 (checkpoint saved)" in ran.stderr
    assert (folder / "saved").stat().st_uid == os.getuid()
    assert (folder / "saved").stat().st_gid == os.getgid()
    assert "preempted after 6 s" in ran.stdout


WAITS_AT_FIRST = """
import os, sys, time
from pathlib import Path
folder = Path(os.environ["LAUNCH_RUN_FOLDER"])
print("of the start before:", Path("/tmp/start").exists(), flush=True)
Path("/tmp/start").touch()
if not (folder / "started").exists():
    (folder / "started").touch()
    print("ready", flush=True)
    time.sleep(60)
"""


def test_a_killed_container_is_replaced_by_another_that_its_peers_find(engine: Docker, tmp_path: Path) -> None:
    request = engine.request(WAITS_AT_FIRST + LISTENS, CONNECTS, output=tmp_path / "out")
    lines = []
    with engine.start(request) as process:
        for line in process.stderr or ():
            lines.append(line)
            if line.endswith(" ready\n"):
                (killed,) = engine.api.containers(filters={"label": LABEL, "name": "workerpool0-0"})
                engine.api.kill(killed, "SIGKILL")
    assert process.returncode == 0, "".join(lines)
    assert "launch: workerpool0-0 was killed (SIGKILL); restarting it (1 of 5)\n" in lines
    assert lines.count("[workerpool0-0] of the start before: False\n") == 2
    assert "[workerpool0-0] from workerpool1-0 to workerpool0-0\n" in lines


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_whatever_ends_launch_nothing_is_left(engine: Docker, tmp_path: Path, signum: signal.Signals) -> None:
    folder = tmp_path / "out" / "run"
    process = engine.start(engine.request(PREEMPTED, output=folder))
    assert process.stderr
    lines = iter(process.stderr.readline, "")
    assert any("[workerpool0-0] ready" in line for line in lines)
    assert len(engine.left()) == 2
    process.send_signal(signum)
    process.communicate(timeout=300)
    assert process.returncode == (-9 if signum == signal.SIGKILL else 128 + signum)
    until(lambda: not engine.left())
    assert (folder / "saved").exists()


WRITES = """
import helper, os, other
from pathlib import Path
print("found", helper.MINE, other.MINE, sorted(os.listdir(".")))
Path("out").mkdir()
Path("out/ckpt.pt").write_text("12345")
Path("other.py").write_text("MINE = 'changed'")
"""


def test_a_script_runs_as_without_an_image(engine: Docker) -> None:
    """It finds its neighbours and the code, and what it writes into its working directory is named."""
    package = Path(contract.__file__).parents[1]
    ours = {f"opt/launch/launch_train/{path.relative_to(package)}": path.read_bytes() for path in package.rglob("*.py")}
    code = {"src/main.py": WRITES, "src/helper.py": "MINE = 'beside'", "other.py": "MINE = 'of the code'"}
    files = ours | {f"workspace/{name}": text.encode() for name, text in code.items()}
    variables = ("PYTHONPATH=/opt/launch", "PYTHONSAFEPATH=1", "PYTHONDONTWRITEBYTECODE=1")
    command = ["python3", "-m", "launch_train.node", "--launcher", "python", "--script", "src/main.py"]
    image = engine.changed(*(f"ENV {one}" for one in variables), "WORKDIR /workspace", files=files)
    ran = engine.local(engine.request("", image=image, command=command), "-o", "json")
    assert ran.returncode == 0, ran.stderr
    assert "[workerpool0-0] found beside of the code ['other.py', 'src']\n" in ran.stderr
    left = {"folder": None, "files": {"workerpool0-0/other.py": 16, "workerpool0-0/out/ckpt.pt": 5}}
    assert json.loads(ran.stdout)["left_behind"] == [left]


class Answers(BaseHTTPRequestHandler):
    """Plays an endpoint."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"hello")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 -- the base class's name
        pass


def test_an_endpoint_on_loopback_is_reached(engine: Docker, tmp_path: Path) -> None:
    key = tmp_path / "key.json"
    key.write_text("the key")
    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        place = f"http://127.0.0.1:{server.server_port}"
        env = {"STORAGE_EMULATOR_HOST": place, "GOOGLE_APPLICATION_CREDENTIALS": "key.json"}
        ran = engine.local(engine.request(ASKS + LISTENS, ASKS + CONNECTS), env=env)
        server.shutdown()
    assert ran.returncode == 0, ran.stderr
    assert "[workerpool0-0] hello the key" in ran.stderr
    assert "[workerpool1-0] hello the key" in ran.stderr


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["no-such-program"], "no-such-program: no such command in the image"),
        (["/etc/passwd"], "/etc/passwd: not executable in the image"),
        (["/foreign"], "exec format error"),
    ],
)
def test_what_the_image_can_not_run(engine: Docker, command: list[str], words: str) -> None:
    image = engine.changed(files={"foreign": b"\x01no program of this machine"})
    ran = engine.local(engine.request("", image=image, command=command))
    assert ran.returncode == 1
    assert "workerpool0-0" in ran.stderr
    assert words in ran.stderr
    assert "Traceback" not in ran.stderr
