"""ssh, run against OpenSSH's own server on loopback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.errors import LaunchError, NotAuthorised
from launcher.ssh import keys
from launcher.ssh.session import Remote
from tests.ssh import SshServer
from tests.ssh.server import HANG_UP, free_port, make_key
from tests.ssh.vms import machine, target_of


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SshServer]:
    with SshServer(tmp_path / "server") as running:
        yield running


@pytest.fixture
def there(server: SshServer, tmp_path: Path) -> Remote:
    return Remote(machine(), target_of(server, tmp_path), "me@example.com")


def test_what_a_command_says_and_how_it_ends(there: Remote) -> None:
    answer = there.run(["sh", "-c", "cat; echo out; echo err >&2; exit 7"], stdin=b"in \xff\n")
    assert (answer.code, answer.out, answer.err, answer.fault) == (7, "in \ufffd\nout\n", "err\n", None)
    assert there.run(["printf", "%s|", "a b", "$(id)", "'", '"', ""]).out == "a b|$(id)|'|\"||"
    assert there.run(["echo a | tr a b"]).out == "b\n"


def test_a_command_may_end_with_sshs_own_code(there: Remote) -> None:
    """Even where it says on its stderr what ssh says when it fails."""
    words = "echo 'Permission denied (publickey).' >&2; exit 255"
    answer = there.run([words])
    assert (answer.code, answer.fault) == (255, None)
    assert there.run_attached([words]) == 255


def test_a_connection_that_is_lost(there: Remote) -> None:
    """ssh says that on the terminal alone; its log is silent."""
    with pytest.raises(LaunchError, match="the connection to dev was lost"):
        there.run_attached([HANG_UP])


def test_a_command_of_several_lines(there: Remote) -> None:
    """ssh's log has them all, and they say nothing about ssh."""
    text = "true\ndebug: Permission denied (publickey).\ntrue\n"
    assert there.run_attached([f": '{text}'\nexit 255"]) == 255
    with pytest.raises(LaunchError, match="the connection to dev was lost"):
        there.run_attached([f": '{text}'\n{HANG_UP}"])


def test_a_command_that_a_signal_has_ended(there: Remote) -> None:
    with pytest.raises(LaunchError, match="a signal killed the command on dev") as caught:
        there.run_attached(["kill -9 $$"])
    assert "dmesg" in caught.value.hint


def test_a_command_with_a_terminal(there: Remote) -> None:
    """As far as ssh asks for one: where there is none here, it doesn't."""
    from launcher.ssh.command import command

    argv = command(there.target, ["tty"], tty=True)
    assert "-t" in argv
    argv.insert(1, "-t")  # twice: also without a terminal here
    ran = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert ran.stdout.startswith("/dev/pts/")


def test_a_closed_ssh_port(server: SshServer, tmp_path: Path) -> None:
    there = Remote(machine(), target_of(server, tmp_path, port=free_port()), "me@example.com")
    with pytest.raises(LaunchError, match="dev refuses SSH connections"):
        there.run_attached(["true"])
    fault = there.run(["true"]).fault
    assert fault
    assert fault.passing


def test_a_key_that_the_vm_does_not_know(server: SshServer, tmp_path: Path) -> None:
    there = Remote(machine(), target_of(server, tmp_path, key=make_key(tmp_path / "other")), "me@example.com")
    with pytest.raises(NotAuthorised, match=r"dev refused the SSH key of \w+: permission denied"):
        there.run_attached(["true"])


def test_the_first_contact_decides_where_google_says_nothing(server: SshServer, tmp_path: Path) -> None:
    target = target_of(server, tmp_path)
    assert Remote(machine(), target, "").run(["true"]).code == 0
    assert target.known_hosts.read_text().startswith(target.alias)
    make_key(tmp_path / "another")
    kind, key, *_ = (tmp_path / "another.pub").read_text().split()
    target.known_hosts.write_text(f"{target.alias} {kind} {key}\n")
    with pytest.raises(LaunchError, match="the host key of dev has changed"):
        Remote(machine(), target, "").run_attached(["true"])


def test_host_keys_that_google_vouches_for(server: SshServer, tmp_path: Path) -> None:
    target = target_of(server, tmp_path, is_known=True)
    with pytest.raises(LaunchError, match="the host key of dev has changed"):
        Remote(machine(), target, "").run_attached(["true"])  # strict, and none is known
    offered = keys.host_keys(server.host_keys)
    assert keys.store_host_keys(tmp_path, target.alias, offered)
    assert Remote(machine(), target, "").run_attached(["true"]) == 0
    make_key(tmp_path / "another")
    kind, key, *_ = (tmp_path / "another.pub").read_text().split()
    keys.store_host_keys(tmp_path, target.alias, keys.host_keys({kind: key}))
    with pytest.raises(LaunchError, match="the host key of dev has changed"):
        Remote(machine(), target, "").run_attached(["true"])


def test_a_command_without_output_has_a_timeout(there: Remote) -> None:
    answer = there.run(["sleep 20"], seconds=1)
    assert answer.fault
    assert "no answer from dev for 1 s" in answer.fault.error.problem


def test_no_ssh_here(there: Remote, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for run in (there.run, there.run_attached):
        with pytest.raises(LaunchError, match="ssh is not installed"):
            run(["true"])


def test_ctrl_c_is_the_programs(tmp_path: Path) -> None:
    """The terminal sends SIGINT to both; this process must outlive it to say how the program ended."""
    code = "from launcher.ssh import session; raise SystemExit(session.run_in_foreground(['sh', '-c', "
    code += "'trap \"exit 9\" INT; echo on; while :; do sleep 0.05; done']))"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    with process:
        assert process.stdout
        assert process.stdout.readline() == b"on\n"
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(20) == 9


def test_a_forwarded_port(there: Remote) -> None:
    from launcher.ssh.command import Forward, command

    remote, local = free_port(), free_port()
    serve = f"{sys.executable} -c \"import socket; s = socket.create_server(('127.0.0.1', {remote})); print('on', "
    serve += "flush=True); c = s.accept()[0]; c.sendall(b'from there'); c.close()\""
    argv = command(there.target, [serve], forwards=[Forward(local, remote)])
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.readline() == b"on\n"
        assert heard(local) == b"from there"
        process.wait(20)


def heard(port: int) -> bytes:
    import socket

    with socket.create_connection(("127.0.0.1", port), timeout=10) as one:
        return one.recv(100)


def test_a_port_that_is_taken(there: Remote) -> None:
    import socket

    from launcher.ssh.command import Forward

    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(LaunchError, match="can't forward a port"):
        there.run_attached(["true"], forwards=[Forward(taken.getsockname()[1], 80)])


@pytest.mark.parametrize(
    ("account", "member"),
    [
        ("", "user:YOU@EXAMPLE.COM"),
        ("me@example.com", "user:me@example.com"),
        ("ci@p.iam.gserviceaccount.com", "serviceAccount:ci@p.iam.gserviceaccount.com"),
    ],
)
def test_the_member_of_a_grant(there: Remote, account: str, member: str) -> None:
    assert there._replace(account=account).facts["member"] == member
