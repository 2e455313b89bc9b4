"""Google's own program `colab` (make .venv/colab/.installed) against a runtime on the loopback interface.

Its WebSocket ends at the tests' OpenSSH server, and takes one connection at a time, as Colab does.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from websockets.http11 import Request, Response
from websockets.sync.server import ServerConnection, serve

from launcher.errors import LaunchError, NotAuthorised, UnreachableError, UsageError
from launcher.remote.connection import CommandFailed, Connection, Host
from tests.remote.hosts import a_host
from tests.ssh.server import SshServer, make_key

pytestmark = pytest.mark.judges
COLAB = Path(__file__).parents[2] / ".venv/colab/bin/colab"
SESSION = f"run{os.getpid()}"
"""Another one in each process: their connections are in one folder, as the tests' own folders have long names."""
NAME = f"colab:{SESSION}"
LATER = "2099-01-01T00:00:00Z"
SPEC = """
name: tiny
run: {script: work.py}
machine: {type: l4, gpus: 1}
"""
WORK = """
import launch_train.metrics
for step in range(5):
    launch_train.metrics.log(step + 1, loss=1.0 / (step + 1))
"""


class Runtime:
    """A Colab runtime's SSH endpoint: bridges one WebSocket at a time to an SSH server, whose key the client names.

    `status`: the HTTP status that refuses every connection, 0: none."""

    def __init__(self, server: SshServer) -> None:
        self.server = server
        self.status = 0
        self.connections = 0
        self._busy = threading.Lock()
        self._listener = serve(self._bridge, "127.0.0.1", 0, process_request=self._answer, ping_interval=None)
        self.url = f"http://127.0.0.1:{self._listener.socket.getsockname()[1]}"
        threading.Thread(target=self._listener.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown()

    def _answer(self, connection: ServerConnection, request: Request) -> Response | None:
        key = request.headers.get("X-Colab-Ssh-Pubkey", "")
        if request.path != "/colab/ssh?colab-runtime-proxy-token=secret":
            return connection.respond(401, "")
        if self.status:
            return connection.respond(self.status, "")
        if key.startswith("ssh-rsa"):
            return connection.respond(400, "unsupported key type")
        if not self._busy.acquire(blocking=False):
            return connection.respond(429, "")
        (self.server.folder / "authorized_keys").write_text(f"{key}\n")
        return None

    def _bridge(self, websocket: ServerConnection) -> None:
        self.connections += 1
        with socket.create_connection(("127.0.0.1", self.server.port)) as sshd:

            def answer() -> None:
                with suppress(Exception):
                    while data := sshd.recv(65536):
                        websocket.send(data)
                websocket.close()

            threading.Thread(target=answer, daemon=True).start()
            with suppress(OSError):
                for message in websocket:
                    sshd.sendall(message if isinstance(message, bytes) else message.encode())
        self._busy.release()


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    if not COLAB.exists():
        pytest.skip("google-colab-cli is not installed: make .venv/colab/.installed")
    if os.getuid():
        pytest.skip("a Colab runtime's user is root, and so must be this one")
    home = tmp_path / "me"
    (home / ".config/colab-cli").mkdir(parents=True)
    (home / ".ssh").mkdir()
    make_key(home / ".ssh/id_ed25519")
    monkeypatch.setenv("HOME", str(home))
    for name in ("XDG_STATE_HOME", "CLOUDSDK_CONFIG"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    monkeypatch.setenv("NO_GCE_CHECK", "true")  # else google-auth asks the metadata server
    with a_host(tmp_path, monkeypatch, python=sys.executable) as server:
        with (tmp_path / "ssh_config").open("a") as settings:
            settings.write(f"Host colab-*\n  IdentityFile {home}/.ssh/id_ed25519\n  IdentitiesOnly yes\n")
        (tmp_path / "programs/colab").symlink_to(COLAB)
        (home / ".config/colab-cli/settings.json").write_text('{"enable_update_check": false}')
        runtime = Runtime(server)
        write_session(runtime)
        yield runtime
        Connection(Host(NAME)).close()
        runtime.close()


def write_session(runtime: Runtime, **changes: str | None) -> Path:
    """Write the list of sessions as `colab new` leaves it."""
    session = {"name": SESSION, "token": "secret", "url": runtime.url, "endpoint": "m-1", "token_expires_at": LATER}
    path = Path("~/.config/colab-cli/sessions.json").expanduser()
    path.write_text(json.dumps({SESSION: session | changes}))
    return path


def launch(*words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "launcher", *words]
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=180)


def test_a_run_on_a_colab_runtime(runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "work.py").write_text(WORK)
    (project / "job.yaml").write_text(SPEC)
    monkeypatch.chdir(project)
    ran = launch("on", NAME, "job.yaml", "--cpu", "-o", "json")
    assert ran.returncode == 0, ran.stderr
    document = json.loads(ran.stdout)
    assert (document["state"], document["region"], document["results"]["steps"]) == ("SUCCEEDED", NAME, 5)
    assert "the run folder is lost when the Colab runtime ends" in ran.stderr
    assert runtime.connections == 1
    for words in (("status", document["run"]), ("status", f"{NAME}:tiny"), ("runs", "--on", NAME)):
        assert document["run"] in launch(*words).stdout
    moved = launch("move", document["run"])
    assert moved.returncode == 0, moved.stderr
    assert (project / "runs" / document["run"] / "plan.json").exists()
    back = launch("move", f"runs/{document['run']}", f"ssh://{NAME}/~/launch/runs")
    assert back.returncode == 0, back.stderr
    assert document["run"] in launch("status", document["run"]).stdout
    assert runtime.connections == 1  # Colab takes no second one


def no_session(_runtime: Runtime) -> None:
    Path("~/.config/colab-cli/sessions.json").expanduser().write_text("{}")


def no_program(_runtime: Runtime) -> None:
    (Path(os.environ["PATH"].split(":")[0]) / "colab").unlink()


def other_connection(runtime: Runtime) -> None:
    runtime._busy.acquire()


def an_old_runtime(runtime: Runtime) -> None:
    runtime.status = 404


def an_expired_token(runtime: Runtime) -> None:
    write_session(runtime, token="old")


def an_rsa_key(_runtime: Runtime) -> None:
    key = Path("~/.ssh/id_ed25519.pub").expanduser()
    key.unlink()
    argv = ["ssh-keygen", "-q", "-t", "rsa", "-b", "2048", "-N", "", "-f", str(key.with_name("other"))]
    subprocess.run(argv, check=True)
    key.with_name("other.pub").rename(key)


def no_key(_runtime: Runtime) -> None:
    Path("~/.ssh/id_ed25519.pub").expanduser().unlink()


def another_key(_runtime: Runtime) -> None:
    other = make_key(Path("~/.ssh/other").expanduser())
    other.with_suffix(".pub").rename(Path("~/.ssh/id_ed25519.pub").expanduser())


def no_login(runtime: Runtime) -> None:
    write_session(runtime, token_expires_at=None)  # so it must be renewed


def no_runtime(runtime: Runtime) -> None:
    runtime.close()


@pytest.mark.parametrize(
    ("break_it", "error", "problem", "fix"),
    [
        (no_program, LaunchError, "Google's program colab is not installed", "uv tool install"),
        (no_session, UsageError, "the program colab has no session colab:run1", "colab new -s run1 --gpu T4"),
        (other_connection, UnreachableError, "another SSH connection to colab:run1 is open", "Close it"),
        (
            an_old_runtime,
            LaunchError,
            "older than Colab's support of SSH",
            "colab stop -s run1 && colab new -s run1",
        ),
        (an_rsa_key, NotAuthorised, "only Ed25519 and ECDSA keys", "ssh-keygen -t ed25519"),
        (no_key, NotAuthorised, "only Ed25519 and ECDSA keys", "ssh-keygen -t ed25519"),
        (another_key, NotAuthorised, "refuses the login", "ssh-add"),
        (an_expired_token, NotAuthorised, "may have expired", "colab new -s run1"),
        (no_login, NotAuthorised, "the program colab is not logged in", "colab sessions"),
        (no_runtime, UnreachableError, "WebSocket connection failed", "colab sessions"),
    ],
)
def test_an_error_says_what_to_do(
    runtime: Runtime, break_it: Callable[[Runtime], None], error: type[LaunchError], problem: str, fix: str
) -> None:
    break_it(runtime)
    with pytest.raises(error, match=problem.replace("run1", SESSION)) as raised:
        Connection(Host(NAME)).run("true")
    assert fix.replace("run1", SESSION) in raised.value.hint
    assert type(raised.value) is error


def test_a_failed_command_says_why_and_nothing_of_the_connection(runtime: Runtime) -> None:
    with pytest.raises(CommandFailed, match=f"^{NAME}: failed$"):
        Connection(Host(NAME)).run("echo failed >&2; exit 1")
    assert runtime.connections == 1


def test_no_runtime_is_taken_if_the_session_is_removed_meanwhile(runtime: Runtime, tmp_path: Path) -> None:
    """`colab ssh --proxy-mode` would make a session that it does not find, as the second command shows."""
    sessions = Path("~/.config/colab-cli/sessions.json").expanduser()
    program = tmp_path / "programs/colab"
    program.unlink()
    program.write_text(f'#!/bin/sh\necho "{{}}" > {sessions}\nexec {COLAB} "$@"\n')
    program.chmod(0o755)
    assert Connection(Host(NAME)).run("echo 1") == b"1\n"
    words = ["colab", "--auth", "adc", "ssh", "--proxy-mode", "-s", SESSION]
    ran = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60, stdin=subprocess.DEVNULL)
    assert f"Creating runtime '{SESSION}'" in ran.stderr
    assert ran.returncode
