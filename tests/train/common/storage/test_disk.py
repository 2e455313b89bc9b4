"""A disk that is full: a clear message, what was there before intact, and nothing left over."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from launch_train.common.errors import OutputError
from launch_train.common.storage import LocalFolder
from launch_train.telemetry.upload_queue import Spool, new_folder

SIZE = 4 << 20


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file system of SIZE bytes; where this process may not mount one, writing fails as on such."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "none", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        monkeypatch.setattr("io.open", limited(open, disk))
        yield disk
    else:
        yield disk
        subprocess.run(["umount", "-l", str(disk)], check=True)


def limited(real: Any, disk: Path) -> Callable[..., Any]:
    """`open` whose files in `disk` take no more than SIZE bytes together."""

    def opened(file: Any, *args: Any, **options: Any) -> Any:
        stream = real(file, *args, **options)
        if str(file).startswith(str(disk)) and stream.writable():
            write = stream.write

            def checked(data: Any) -> Any:
                if len(data) + sum(path.stat().st_size for path in disk.rglob("*") if path.is_file()) > SIZE:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return write(data)

            stream = _Wrapped(stream, checked)
        return stream

    return opened


class _Wrapped:
    def __init__(self, stream: Any, write: Callable[[Any], Any]) -> None:
        self._stream, self.write = stream, write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __enter__(self) -> _Wrapped:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stream.close()


FULL = r"the disk is full \([\d.,]+ MB of [\d.,]+ MB are free at /.*\): free some space, or use another disk"


def test_a_full_disk_is_said_and_nothing_is_half_written(disk: Path, tmp_path: Path) -> None:
    folder = LocalFolder(disk / "run")
    version = folder.write("LATEST", b"1")
    (tmp_path / "big").write_bytes(bytes(SIZE))
    uses: dict[str, Callable[[], object]] = {
        "c/2": lambda: folder.write("c/2", bytes(SIZE)),
        "c/3": lambda: folder.write("c/3", bytes(SIZE), create=True),
        "c/4": lambda: folder.write_file("c/4", tmp_path / "big"),
        "LATEST": lambda: folder.swap("LATEST", bytes(SIZE), version),
    }
    for name, use in uses.items():
        with pytest.raises(OutputError, match=rf"{name} can't be written: {FULL}"):
            use()
    assert folder.read_version("LATEST") == (b"1", version)
    assert [path.name for path in disk.rglob("*") if path.is_file() and not path.name.endswith("lock")] == ["LATEST"]
    folder.write("c/5", b"small again")


def test_a_full_spool_is_said_by_who_puts(disk: Path) -> None:
    class Away(LocalFolder):
        """Takes nothing."""

        def write(self, name: str, data: Any, *, create: bool = False, crc32c: str = "") -> str:
            raise OutputError("away")

        def write_file(self, name: str, path: Path) -> None:
            raise OutputError("away")

    spool = Spool(Away(disk / "run"), new_folder(str(disk / "spool"), "gs://b/x"))
    spool.put("metrics/1", b"row\n")
    with pytest.raises(OutputError, match=rf"metrics/2 can't be kept in .*: {FULL}"):
        spool.put("metrics/2", bytes(SIZE))
    spool.put("metrics/2", b"row\n")
    with pytest.raises(OutputError, match="2 objects"):
        spool.close(0)
    assert sorted(path.stat().st_size for path in disk.rglob("*.new.*")) == [4, 4]
