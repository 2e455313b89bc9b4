"""Working directories of a local run: each start gives every replica a fresh copy of the code, as in a container.

The copy has exactly the files of the image and lies outside the source folder. It shares blocks with the source where
the file system supports that (copy_file_range: btrfs, XFS). It has no hard links: a script that writes to a file in
place would change the source.
"""

from __future__ import annotations

import fnmatch
import glob
import os
import posixpath
import shutil
import stat
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Final, NamedTuple

from launch_train.common import contract
from launch_train.common.scratch import temporary_folder
from launcher.errors import LaunchError
from launcher.images.archives import TIME, folders
from launcher.images.source_files import File
from launcher.plan.model import Plan
from launcher.text import relative, size_text

MOST_NAMED: Final = 3
"""Maximum number of files that a message names."""
MTIME_NS: Final = TIME * 10**9
"""Modification time of every copied file, as in the image's layer. A file with another one was written to."""


class WrittenFiles(NamedTuple):
    """The files that one start wrote to its working directories. A job in the cloud loses them with its container."""

    folder: Path | None
    """The folder to which the files were moved; None: they were removed."""
    files: dict[str, int]
    """REPLICA/PATH → bytes; for a replica's second start REPLICA.2/PATH."""
    problem: str = ""
    """Why some could not be moved and are lost."""


class Code(NamedTuple):
    """The user code that a local run uses in place of the image's /workspace."""

    files: Sequence[File] = ()
    in_place: Path | None = None
    """Use this folder as every replica's working directory; copy nothing."""
    installed: Mapping[str, str] = {}
    """Files of the installed projects in the code (launcher.images.source_files.Source)."""
    keep: Callable[[], Path] | None = None
    """Creates the folder for written files; None: they are removed, as with a container."""


@contextmanager
def working_directories(
    code: Code, scratch: Path, on_left: Callable[[WrittenFiles], None]
) -> Iterator[Callable[[str], Path]]:
    """Yield the function that makes the working directory of a replica's start, a fresh copy below `scratch`; at the
    end keep or remove the files written to all of them.

    The function raises LaunchError: the code can't be copied.
    """
    workdirs: dict[str, Path] = {}

    def make_workdir(replica: str) -> Path:
        if code.in_place:
            return code.in_place
        name = start_name(replica, workdirs)
        copy(code.files, scratch / name / "workspace")
        workdirs[name] = scratch / name / "workspace"
        return workdirs[name]

    try:
        yield make_workdir
    finally:
        files = {
            f"{name}/{path}": size
            for name, folder in workdirs.items()
            for path, size in written_files(code.files, folder)
        }
        if files:
            on_left(move_files(files, workdirs, code.keep) if code.keep else WrittenFiles(None, files))


def start_name(replica: str, known: Container[str]) -> str:
    """Return the name of a replica's next start: its own, then workerpool1-0.2, workerpool1-0.3 …"""
    return next(name for number in count(1) if (name := f"{replica}.{number}".removesuffix(".1")) not in known)


@contextmanager
def snapshot(code: Code) -> Iterator[Code]:
    """Copy the code for all starts: an edit of the source in between must not reach the later ones."""
    if code.in_place:
        yield code
        return
    with temporary_folder("code") as name:
        copy(code.files, Path(name) / "code")
        yield code._replace(files=[file._replace(path=Path(name) / "code" / file.name) for file in code.files])


def copy(files: Sequence[File], to: Path) -> None:
    """Copy files to a new folder, with the modes and times that the image gives them. Raises LaunchError."""
    file = None
    try:
        for name in ("", *folders(files)):
            (to / name).mkdir(parents=True)
        for file in files:
            if file.link is not None:
                (to / file.name).symlink_to(file.link)
            else:
                copy_file(file.path, f"{to}/{file.name}")
    except OSError as error:
        raise LaunchError(
            f"can't copy the code to {to}: {error.filename or (file and file.path)}: {error.strerror}",
            "Free space there, or choose another folder (TMPDIR=DIR), or run in the source folder: --in-place",
        ) from error


def copy_file(source: Path, target: str) -> None:
    """Copy one file; on Linux without moving its data through this process. Raises OSError."""
    reading = os.open(source, os.O_RDONLY)
    try:
        mode = 0o755 if os.fstat(reading).st_mode & 0o100 else 0o644
        writing = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        try:
            copy_data(reading, writing)
            os.fchmod(writing, mode)  # os.open applies the umask
            os.utime(writing, ns=(MTIME_NS, MTIME_NS))
        finally:
            os.close(writing)
    finally:
        os.close(reading)


def copy_data(reading: int, writing: int) -> None:
    """Copy all bytes from one open file to another. Raises OSError."""
    try:
        while os.copy_file_range(reading, writing, 1 << 30):
            pass
    except (AttributeError, OSError):  # not Linux, or the filesystem can't
        with open(reading, "rb", closefd=False) as source, open(writing, "wb", closefd=False) as target:
            source.seek(0)
            target.seek(0)
            target.truncate()
            shutil.copyfileobj(source, target)


def written_files(files: Iterable[File], folder: Path) -> Iterator[tuple[str, int]]:
    """Yield name and size of the files that a job created or changed in a copy of `files`, except Python's caches."""
    own, top = {file.name for file in files}, str(folder)
    for parent, inside, names in os.walk(top):
        inside[:] = [name for name in inside if name != "__pycache__"]
        for name in inside:
            make_accessible(posixpath.join(parent, name))
        for name in names:
            path = posixpath.join(parent, name)
            status, relative = os.lstat(path), path[len(top) + 1 :]
            if relative in own and (stat.S_ISLNK(status.st_mode) or status.st_mtime_ns == MTIME_NS):
                continue
            if stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode):
                yield relative, status.st_size


def make_accessible(folder: str) -> None:
    """Give the owner all permissions on a folder, in case the job removed them: its files could not be moved."""
    with suppress(OSError):
        mode = os.lstat(folder).st_mode
        if stat.S_ISDIR(mode) and mode & stat.S_IRWXU != stat.S_IRWXU:  # not a link, which may point anywhere
            Path(folder).chmod(stat.S_IMODE(mode) | stat.S_IRWXU)


def move_files(files: dict[str, int], workdirs: dict[str, Path], keep: Callable[[], Path]) -> WrittenFiles:
    """Move files out of the working directories. Never raises: an error here must not hide how the job ended."""
    to = None
    try:
        to = keep()
        for name in files:
            replica, _, path = name.partition("/")
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.move(workdirs[replica] / path, to / name)
    except OSError as error:
        return WrittenFiles(to, files, f"{error.filename or to}: {error.strerror}")
    return WrittenFiles(to, files)


def left_text(left: WrittenFiles, plan: Plan | None = None) -> str:
    """Return `written to the working directory, which a job loses: out/ckpt.pt (10 MB); moved to runs/a/workdirs/1`.

    The event files that the plan uploads (run.metrics.tensorboard) are not lost. Empty if no others were left.
    """
    metrics = (plan.spec.get("run") or {}).get("metrics") if plan and plan.run_folder else None
    folder = (metrics or {}).get("tensorboard")
    uploaded = posixpath.normpath(posixpath.join("*", glob.escape(folder), contract.EVENT_FILES)) if folder else ""
    lost = [name for name in left.files if not fnmatch.fnmatch(name, uploaded)]
    largest = sorted(lost, key=lambda name: -left.files[name])[:MOST_NAMED]
    if not largest:
        return ""
    named = ", ".join(
        f"{os.fsencode(name).decode(errors='replace')} ({size_text(left.files[name])})" for name in largest
    )
    more = f" and {len(lost) - MOST_NAMED} more" if len(lost) > MOST_NAMED else ""
    where = f"moved to {relative(str(left.folder))}" if left.folder else "not kept"
    where += f", except some: {left.problem}" if left.problem else ""
    has_path = plan and plan.run_folder and not plan.run_folder.startswith("gs://")
    hint = "\nto resume from such a file, write it to $LAUNCH_RUN_PATH instead (docs/scripts.md)" if has_path else ""
    return f"written to the working directory, which a job loses: {named}{more}; {where}{hint}"


def make_numbered_folder(folder: Path) -> Path:
    """Create and return the first of FOLDER/1, FOLDER/2, … that does not exist. Raises OSError."""
    number = next(number for number in count(1) if not (folder / str(number)).exists())
    (folder / str(number)).mkdir(parents=True)
    return folder / str(number)
