"""Copy a folder's files to a VM: by rsync if both sides have it, else as a tar through ssh."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from launch_train.common.scratch import temporary_folder
from launcher.errors import LaunchError, UsageError
from launcher.images.source_files import File
from launcher.ssh import command
from launcher.ssh.errors import FAILED, explain, relevant_lines
from launcher.ssh.session import Remote

REMOTE_SCRIPT: Final = Path(__file__).with_name("sync_remote.py")
"""Runs on the VM."""
PREPARE_SECONDS: Final = 300.0
CONNECTION_LOST: Final = (12, FAILED)
"""rsync's exit codes if ssh ends (rsync(1): an error in the protocol's data stream)."""

GENERIC: Final = re.compile(r"rsync: connection unexpectedly closed|rsync error: ")
"""rsync's messages about any lost connection, whatever the cause."""


class Pushed(NamedTuple):
    """The result of a push."""

    by: str
    """`rsync` or `tar`."""
    removed: tuple[str, ...] = ()


def push(
    remote: Remote, folder: Path, files: Sequence[File], destination: str, *, delete: bool, say: Callable[[str], None]
) -> Pushed:
    """Copy the files of a folder to a folder on the VM. Files with the same time and size are skipped.

    With `delete`, files of earlier pushes that are not among `files` are removed there.

    Raises LaunchError: it failed; some files may have been copied, and the same push completes them.
    """
    names = b"".join(os.fsencode(file.name) + b"\0" for file in files)
    answer = prepare(remote, destination, names, delete)
    by = "rsync" if answer["rsync"] and shutil.which("rsync") else "tar"
    if by == "tar":
        where = "on this machine" if answer["rsync"] else f"on {remote.machine.name}"
        say(f"rsync is not installed {where}: sending all files as a tar")
        push_by_tar(remote, files, destination)
    else:
        push_by_rsync(remote, folder, names, destination)
    return Pushed(by, tuple(answer["removed"]))


def prepare(remote: Remote, destination: str, names: bytes, delete: bool) -> dict[str, Any]:
    """Create the folder on the VM, remove files if asked to, and return the script's answer. Raises LaunchError."""
    source = REMOTE_SCRIPT.read_text(encoding="utf-8")
    argv = ["python3", "-c", source, destination, "delete" if delete else "keep"]
    answer = remote.run(argv, stdin=names, seconds=PREPARE_SECONDS)
    if answer.fault:
        raise answer.fault.error
    if answer.code:
        reason = (answer.err.strip().splitlines() or [f"exit code {answer.code}"])[-1]
        raise LaunchError(f"can't write to {destination} on {remote.machine.name}: {reason}")
    try:
        data: dict[str, Any] = json.loads(answer.out)
    except ValueError:
        first = (answer.out.splitlines() or [""])[0][:60]
        raise LaunchError(
            f"the shell on {remote.machine.name} prints {first!r} before the command's output",
            "Its ~/.bashrc must print nothing in non-interactive shells: case $- in *i*) …;; esac",
        ) from None
    return data


def push_by_rsync(remote: Remote, folder: Path, file_names: bytes, destination: str) -> None:
    """Send the files that differ. Raises LaunchError."""
    with temporary_folder("ssh") as place:
        log, settings, names = (Path(place, name) for name in ("log", "config", "names"))
        settings.write_text(command.host_block([remote.target.alias], remote.target, log=log), encoding="utf-8")
        names.write_bytes(file_names)
        argv = command.rsync(settings, log, names, folder, remote.target, destination)
        ran = subprocess.run(argv, stderr=subprocess.PIPE, text=True, errors="replace", check=False)
        check_exit(remote, "rsync", ran.returncode, ran.stderr, log)


def push_by_tar(remote: Remote, files: Sequence[File], destination: str) -> None:
    """Send all files. Raises LaunchError, and UsageError: one can't be read."""
    with temporary_folder("ssh") as place:
        log, archive = Path(place, "log"), Path(place, "files.tar.gz")
        try:
            with tarfile.open(archive, "w:gz", format=tarfile.PAX_FORMAT) as tar:
                for file in files:
                    add_file(tar, file)
        except OSError as error:
            failed = f"read {error.filename}" if error.filename else "pack the files"
            raise UsageError(f"can't {failed}: {error.strerror or error}") from error
        argv = command.command(remote.target, ["tar", "-xzf", "-", "-C", destination], log=log)
        with archive.open("rb") as stdin:
            ran = subprocess.run(argv, stdin=stdin, stderr=subprocess.PIPE, text=True, errors="replace", check=False)
        check_exit(remote, "tar", ran.returncode, ran.stderr, log)


def add_file(tar: tarfile.TarFile, file: File) -> None:
    """Add one file or link. Raises OSError."""
    entry = tar.gettarinfo(file.path, arcname=file.name)
    if file.link is not None:
        entry.linkname = file.link
        tar.addfile(entry)
        return
    entry.type = tarfile.REGTYPE  # send hard links as separate files
    with file.path.open("rb") as content:
        entry.size = os.fstat(content.fileno()).st_size
        tar.addfile(entry, content)


def check_exit(remote: Remote, program: str, code: int, stderr: str, log: Path) -> None:
    """Raise LaunchError if a program failed. Its stderr is needed too: ssh does not log that the other side closed the
    connection."""
    if not code:
        return
    ssh_log = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    own = [line for line in stderr.splitlines() if line.strip() and not GENERIC.match(line)]
    is_lost = code in CONNECTION_LOST and (relevant_lines(ssh_log) or not own or "closed by remote host" in stderr)
    if is_lost and (fault := explain("\n".join([ssh_log, *own]), remote.machine, remote.facts)):
        raise fault.error
    message = "\n".join(stderr.strip().splitlines()[-3:]) or f"exit code {code}"
    hint = "Repeat the command: it sends only what is missing."
    raise LaunchError(f"{program} to {remote.machine.name} failed: {message}", hint)


def parse_destination(text: str) -> str:
    """Return a folder on the VM, relative to the user's home there. Raises UsageError: it has characters that rsync or
    a shell would interpret."""
    path = re.sub(r"^~(/|$)", "", text).rstrip("/") or ("/" if text.startswith("/") else ".")
    if not re.fullmatch(r"[\w./+@%=-]+", path, re.ASCII) or path.startswith("-"):
        raise UsageError(
            f"invalid folder on the VM: {text!r}", "Use letters, digits and . _ - + @ % = /, for example DIR:DEST"
        )
    return path
