"""`launch push-code`: a folder's code, on a VM that is OpenSSH's server on loopback."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.place import Place
from tests.cli.vms import Vms
from tests.ssh import SshServer


@pytest.fixture
def place(vms: Vms, tmp_path: Path) -> Iterator[Place]:
    with SshServer(tmp_path / "server") as server:
        yield Place(vms, server, tmp_path)


@pytest.fixture
def source(vms: Vms) -> Path:
    folder = vms.folder / "project"
    folder.mkdir()
    for n in range(12):
        (folder / f"file{n:02}.py").write_text("x")
    (folder / ".gitignore").write_text("*.log\n")
    (folder / "a.log").write_text("x")
    (folder / "odd\x1b[31m.py").write_text("x")
    (folder / "id_rsa").write_text("-----BEGIN OPENSSH PRIVATE KEY-----\n")
    return folder


def test_a_dry_push_needs_no_cloud(place: Place, source: Path) -> None:
    before = len(place.vms.cloud.requests)
    out = place.launch("push-code", "dev", "project", "--dry-run").out
    assert "  file11.py\n" in out
    assert "  id_rsa not copied: it looks like a secret\n" in out
    assert "a.log" not in out
    assert "\x1b" not in out
    assert out.endswith("nothing was copied: 14 files, 19 B would be copied to dev:project\n")
    assert len(place.vms.cloud.requests) == before


def test_a_push(place: Place, source: Path) -> None:
    out = place.launch("push-code", "dev", "project", *place.there).out
    assert "  … and 4 more (--dry-run lists all)\n" in out
    assert out.endswith("copied 14 files, 19 B to dev:project\n")
    arrived = place.server.home / "project"
    assert (arrived / "file11.py").read_text() == "x"
    assert not (arrived / "id_rsa").exists()
    assert not (arrived / "a.log").exists()
    (source / "file11.py").unlink()
    out = place.launch("push-code", "dev", f"{source}:project", "--delete", *place.there).out
    assert "deleted on dev: file11.py\n" in out
    assert not (arrived / "file11.py").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nothing", "nothing is not a folder"),
        ("project:a b", "invalid folder on the VM"),
        ("/:", "/ has no name"),
        ("empty", "has no files to copy"),
    ],
)
def test_invalid_destinations_are_refused(place: Place, source: Path, text: str, words: str) -> None:
    (place.vms.folder / "empty").mkdir()
    assert words in place.launch("push-code", "dev", text, code=2).err


def test_a_folder_with_a_colon(place: Place, source: Path) -> None:
    shutil.copytree(source, place.vms.folder / "a:b")
    out = place.launch("push-code", "dev", "a:b:c", "--dry-run").out
    assert "would be copied to dev:c" in out
    assert "invalid folder on the VM: 'a:b'" in place.launch("push-code", "dev", "a:b", "--dry-run", code=2).err
