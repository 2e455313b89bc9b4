"""A folder's files on a VM: OpenSSH's own server, rsync where it is, and the VM's side of it."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.errors import LaunchError, UsageError
from launcher.inputs.code_files import collect_code, without_secrets
from launcher.ssh import sync_remote
from launcher.ssh.session import Remote
from launcher.ssh.sync import parse_destination, push
from tests.ssh import SshServer
from tests.ssh.server import HANG_UP
from tests.ssh.vms import machine, target_of

ODD = ["a.py", "deep/er/b c.py", "ü.txt", "new\nline", "-rf", "$(id)", "quote'\"", "\udcff.bin"]
NEEDS_RSYNC = pytest.mark.skipif(shutil.which("rsync") is None, reason="rsync is not installed")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SshServer]:
    with SshServer(tmp_path / "server") as running:
        yield running


@pytest.fixture
def there(server: SshServer, tmp_path: Path) -> Remote:
    return Remote(machine(), target_of(server, tmp_path), "me@example.com")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source with space"
    for name in ODD:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"content of {name!r}")
    (folder / "a.py").chmod(0o755)
    (folder / "link").symlink_to("deep/er/b c.py")
    (folder / ".gitignore").write_text("data/\n")
    (folder / "data").mkdir()
    (folder / "data" / "huge").write_text("x")
    (folder / ".env").write_text("API_KEY=abcdefgh12345678\n")
    return folder


def sent(there: Remote, source: Path, destination: str = "code", *, delete: bool = False) -> tuple[str, list[str]]:
    said: list[str] = []
    done = push(there, source, without_secrets(collect_code(source)).files, destination, delete=delete, say=said.append)
    assert bool(said) is (done.by == "tar")
    return done.by, list(done.removed)


def files(folder: Path) -> dict[str, str]:
    """What lies there: names and contents."""
    paths = [path for path in folder.rglob("*") if not path.is_dir() or path.is_symlink()]
    return {str(path.relative_to(folder)): path.read_text() for path in paths if path.name != sync_remote.KEPT}


def check(source: Path, arrived: Path) -> None:
    """All of the code has arrived, and nothing else."""
    found = files(arrived)
    assert set(found) == {*ODD, "link", ".gitignore"}
    assert all(found[name] == f"content of {name!r}" for name in ODD)
    assert str((arrived / "link").readlink()) == "deep/er/b c.py"
    assert (arrived / "a.py").stat().st_mode & 0o777 == 0o755
    assert int((arrived / "a.py").stat().st_mtime) == int((source / "a.py").stat().st_mtime)


@NEEDS_RSYNC
def test_by_rsync(server: SshServer, there: Remote, source: Path) -> None:
    assert sent(there, source) == ("rsync", [])
    check(source, server.home / "code")
    (source / "a.py").write_text("newer and longer")
    assert sent(there, source, "~/code/") == ("rsync", [])
    assert (server.home / "code" / "a.py").read_text() == "newer and longer"


def test_by_tar_where_the_vm_has_no_rsync(tmp_path: Path, source: Path) -> None:
    needed = tmp_path / "bin"
    needed.mkdir()
    for name in ("sh", "tar", "gzip", "env"):
        (needed / name).symlink_to(shutil.which(name) or "")
    (needed / "python3").symlink_to(sys.executable)
    with SshServer(tmp_path / "bare", path=str(needed)) as bare:
        there = Remote(machine(), target_of(bare, tmp_path), "")
        assert sent(there, source) == ("tar", [])
        check(source, bare.home / "code")


def test_by_tar_without_rsync_here(
    server: SshServer, there: Remote, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ssh").symlink_to(shutil.which("ssh") or "")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert sent(there, source, "deep/place")[0] == "tar"
    check(source, server.home / "deep" / "place")


@pytest.mark.slow
def test_only_files_that_were_synced_are_removed(server: SshServer, there: Remote, source: Path) -> None:
    sent(there, source)
    arrived = server.home / "code"
    (arrived / "deep" / "result.csv").write_text("made there")
    for name in ("deep/er/b c.py", "ü.txt", "link"):
        (source / name).unlink()
    assert sent(there, source)[1] == [], "not unless it is asked for"
    assert (arrived / "ü.txt").exists()
    assert sent(there, source, delete=True)[1] == ["deep/er/b c.py", "link", "ü.txt"]
    assert not (arrived / "deep" / "er").exists()
    assert (arrived / "deep" / "result.csv").read_text() == "made there"
    assert sent(there, source, delete=True)[1] == []


def test_a_folder_that_cant_be_written(server: SshServer, there: Remote, source: Path) -> None:
    (server.home / "code").write_text("a file")
    with pytest.raises(LaunchError, match=r"can't write to code on dev: .*FileExistsError"):
        sent(there, source)


def test_no_python_there(server: SshServer, there: Remote, source: Path) -> None:
    server.program("python3", "exit 127")
    with pytest.raises(LaunchError, match="on dev: exit code 127"):
        sent(there, source)


@NEEDS_RSYNC
def test_rsync_that_fails(server: SshServer, there: Remote, source: Path) -> None:
    server.program("rsync", "echo out of space >&2; exit 11")
    with pytest.raises(LaunchError, match=r"rsync to dev failed: (.|\n)*out of space"):
        sent(there, source)


@NEEDS_RSYNC
def test_the_connection_is_lost_under_rsync(server: SshServer, there: Remote, source: Path) -> None:
    server.program("rsync", HANG_UP)
    with pytest.raises(LaunchError, match="the connection to dev was lost"):
        sent(there, source)


def test_the_connection_is_lost_under_tar(
    server: SshServer, there: Remote, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.program("tar", HANG_UP)
    which = shutil.which
    monkeypatch.setattr("launcher.ssh.sync.shutil.which", lambda name: None if name == "rsync" else which(name))
    (source / "large").write_bytes(os.urandom(4_000_000))
    with pytest.raises(LaunchError, match="the connection to dev was lost"):
        push(there, source, collect_code(source), "code", delete=False, say=lambda _: None)


@pytest.mark.parametrize(
    ("text", "path"), [("~/a", "a"), ("~", "."), ("a/b/", "a/b"), ("/data/x", "/data/x"), ("/", "/"), ("~/", ".")]
)
def test_destinations(text: str, path: str) -> None:
    assert parse_destination(text) == path


@pytest.mark.parametrize("text", ["a b", "$(id)", "-rf", "a;b", "a\nb", "~me/x", "ü", "a:b"])
def test_invalid_destinations(text: str) -> None:
    with pytest.raises(UsageError, match="invalid folder on the VM"):
        parse_destination(text)


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd-", "out/file", "folder"])
def test_nothing_else_is_removed(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whatever somebody has written into the list of what was brought."""
    top, outside = tmp_path / "top", tmp_path / "outside"
    (top / "folder").mkdir(parents=True)
    outside.mkdir()
    (outside / "file").touch()
    (top / "out").symlink_to(outside)
    (top / sync_remote.KEPT).write_bytes(os.fsencode(name) + b"\0")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    sync_remote.main(str(top), "delete")
    assert '"removed": []' in capfd.readouterr().out
    assert (outside / "file").exists()
    assert (top / "folder").exists()


def test_the_vms_side_needs_no_more_than_python(tmp_path: Path) -> None:
    """As on the VM: the file's text alone, with no site-packages and nothing of launch's on the path."""
    source = Path(sync_remote.__file__).read_text()
    argv = [sys.executable, "-I", "-S", "-c", source, str(tmp_path / "x"), "keep"]
    ran = subprocess.run(argv, input=b"a\0", capture_output=True, check=True)
    assert b'"removed": []' in ran.stdout


def test_a_shell_that_greets_everybody(there: Remote, server: SshServer, source: Path) -> None:
    server.program("python3", "echo Welcome\necho '{}'\n")
    with pytest.raises(LaunchError, match="the shell on dev prints 'Welcome'") as caught:
        sent(there, source)
    assert "~/.bashrc" in caught.value.hint
