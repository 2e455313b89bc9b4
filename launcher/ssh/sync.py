"""A folder's files to a VM: by rsync where both sides have it, else as a tar through ssh."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

from launcher.errors import LaunchError, UsageError
from launcher.images.source_files import File
from launcher.ssh import command
from launcher.ssh.errors import FAILED, explained, relevant_lines
from launcher.ssh.keys import no_ssh
from launcher.ssh.session import Remote, scratch

THERE: Final = Path(__file__).with_name("sync_remote.py")
"""What runs on the VM."""
PREPARE_SECONDS: Final = 300.0
TORN: Final = (12, FAILED)
"""rsync's exit codes when ssh ends under it (rsync(1): an error in the protocol's data stream)."""

USUAL: Final = re.compile(r"rsync: connection unexpectedly closed|rsync error: ")
"""What rsync says of every connection that has ended too early."""


class Pushed(NamedTuple):
    """What a push has done."""

    by: str
    """rsync or tar."""
    removed: tuple[str, ...] = ()


def push(
    remote: Remote, folder: Path, files: Sequence[File], destination: str, *, delete: bool, say: Callable[[str], None]
) -> Pushed:
    """Copy the files of a folder into one of the VM's; what is there already is only compared (by time and size).

    With `delete` files that an earlier push brought, and that aren't among these, are removed there.

    Raises:
        LaunchError: it didn't work; the files may be there in part, and the same push again completes them.
    """
    listed = b"".join(os.fsencode(file.name) + b"\0" for file in files)
    answer = prepared(remote, destination, listed, delete)
    by = "rsync" if answer["rsync"] and shutil.which("rsync") else "tar"
    if by == "tar":
        say(f"rsync isn't {'here' if answer['rsync'] else f'on {remote.machine.name}'}: all files are sent, as a tar")
        by_tar(remote, files, destination)
    else:
        by_rsync(remote, folder, listed, destination)
    return Pushed(by, tuple(answer["removed"]))


def prepared(remote: Remote, destination: str, listed: bytes, delete: bool) -> dict[str, Any]:
    """Make the folder there, and learn what that side has. Raises LaunchError."""
    source = THERE.read_text(encoding="utf-8")
    argv = ["python3", "-c", source, destination, "delete" if delete else "keep"]
    answer = remote.asked(argv, sent=listed, seconds=PREPARE_SECONDS)
    if answer.fault:
        raise answer.fault.error
    if answer.code:
        said = (answer.err.strip().splitlines() or [f"exit code {answer.code}"])[-1]
        raise LaunchError(f"{destination} on {remote.machine.name} can't take files: {said}")
    try:
        found: dict[str, Any] = json.loads(answer.out)
    except ValueError:
        first = (answer.out.splitlines() or [""])[0][:60]
        raise LaunchError(
            f"the shell on {remote.machine.name} says {first!r} where only a command's output may be",
            "Its ~/.bashrc must print nothing when nobody sits there: case $- in *i*) …;; esac",
        ) from None
    return found


def by_rsync(remote: Remote, folder: Path, listed: bytes, destination: str) -> None:
    """All files, as far as they differ. Raises LaunchError."""
    with scratch() as place:
        log, settings, names = place / "log", place / "config", place / "names"
        settings.write_text(command.block([remote.target.alias], remote.target, log=log), encoding="utf-8")
        names.write_bytes(listed)
        argv = command.rsync(settings, log, names, folder, remote.target, destination)
        ran = subprocess.run(argv, stderr=subprocess.PIPE, text=True, errors="replace", check=False)
        refuse(remote, "rsync", ran.returncode, ran.stderr, log)


def by_tar(remote: Remote, files: Sequence[File], destination: str) -> None:
    """All files. Raises LaunchError."""
    unpack = ["tar", "-xzf", "-", "-C", destination]
    with scratch() as place:
        log, errors = place / "log", place / "errors"
        with errors.open("wb") as stderr:
            argv = command.command(remote.target, unpack, log=log)
            try:
                process = subprocess.Popen(argv, stdin=subprocess.PIPE, stderr=stderr, bufsize=0)
            except FileNotFoundError:
                raise no_ssh("ssh") from None
            with process:
                stream(files, Pipe(process.stdin))
        refuse(remote, "tar", process.returncode, errors.read_text(encoding="utf-8", errors="replace"), log)


class Pipe(io.RawIOBase):
    """A pipe to a program that may end before it has read everything; its exit code will say why."""

    def __init__(self, to: IO[bytes] | None) -> None:
        super().__init__()
        self._to = to
        self.is_open = to is not None

    def write(self, data: Any, /) -> int:
        """All of it, or as good as."""
        left = memoryview(data)
        try:
            while self._to and self.is_open and left:
                left = left[self._to.write(left) :]
        except BrokenPipeError:
            self.is_open = False
        return len(data)


def stream(files: Sequence[File], to: Pipe) -> None:
    """The files as a compressed tar. Raises UsageError: one can't be read."""
    try:
        with tarfile.open(fileobj=to, mode="w|gz", format=tarfile.PAX_FORMAT) as tar:
            for file in files:
                if to.is_open:
                    add(tar, file)
    except OSError as error:
        raise UsageError(f"{error.filename or 'a file'} can't be read: {error.strerror}") from error


def add(tar: tarfile.TarFile, file: File) -> None:
    """One file or link. Raises OSError."""
    entry = tar.gettarinfo(file.path, arcname=file.name)
    if file.link is not None:
        entry.linkname = file.link
        tar.addfile(entry)
        return
    entry.type = tarfile.REGTYPE  # one of two names of a file is no link there
    with file.path.open("rb") as content:
        entry.size = os.fstat(content.fileno()).st_size
        tar.addfile(entry, content)


def refuse(remote: Remote, program: str, code: int, stderr: str, log: Path) -> None:
    """Raises LaunchError: it failed. ssh tells the terminal alone of a connection that the other side has closed."""
    if not code:
        return
    said = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    own = [line for line in stderr.splitlines() if line.strip() and not USUAL.match(line)]
    torn = code in TORN and (relevant_lines(said) or not own or "closed by remote host" in stderr)
    if torn and (fault := explained("\n".join([said, *own]), remote.machine, remote.facts)):
        raise fault.error
    words = "\n".join(stderr.strip().splitlines()[-3:]) or f"exit code {code}"
    hint = "The same command again goes on from there."
    raise LaunchError(f"{program} to {remote.machine.name} failed: {words}", hint)


def destination_of(text: str) -> str:
    """A folder of the VM, relative to the user's home there. Raises UsageError: rsync and shells would not agree
    about it."""
    path = re.sub(r"^~(/|$)", "", text).rstrip("/") or ("/" if text.startswith("/") else ".")
    if not re.fullmatch(r"[\w./+@%=-]+", path, re.ASCII) or path.startswith("-"):
        raise UsageError(
            f"{text!r} can't be a folder on the VM here", "Letters, digits and . _ - + / will do: DIR:DEST"
        )
    return path
