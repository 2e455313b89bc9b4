"""What dead processes left is sent, and nothing that happens to it ends a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from launch_train.common.storage import Buffer, LocalFolder, UnreachableError
from launch_train.telemetry.upload_queue import PREFIX, Leftovers


class Away(LocalFolder):
    """A run folder that no spool is needed for, and that can't be reached."""

    def write(self, name: str, data: Buffer, *, create: bool = False, crc32c: str = "") -> str:
        raise UnreachableError("no answer")


@pytest.fixture
def spools(tmp_path: Path) -> Path:
    """One object that a dead process has left."""
    spool = tmp_path / "spools" / f"{PREFIX}dead"
    spool.mkdir(parents=True)
    (spool / "lock").write_text(LocalFolder(tmp_path / "run").url)
    (spool / "000000000000.new.metrics%2Fa").write_bytes(b"row")
    return spool.parent


def counting(*seconds: float) -> Callable[[], float]:
    left = iter(seconds)
    return lambda: next(left)


def test_what_was_left_is_sent(tmp_path: Path, spools: Path) -> None:
    storage, said = LocalFolder(tmp_path / "run"), list[str]()
    assert Leftovers(spools, storage, said.append).send(lambda: 5.0) == 0
    assert (storage.read("metrics/a"), said) == (b"row", [])


def test_time_that_is_up_meanwhile_is_no_error(tmp_path: Path, spools: Path) -> None:
    leftovers = Leftovers(spools, Away(tmp_path / "run"), print)
    assert leftovers.send(counting(0.1, 0.01, -1.0, -1.0, -1.0)) == 1


def test_a_disk_that_fails_is_one_line(tmp_path: Path, spools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(path: Path) -> bytes:
        raise OSError(5, "Input/output error", str(path))

    said = list[str]()
    monkeypatch.setattr(Path, "read_bytes", fails)
    Leftovers(spools, LocalFolder(tmp_path / "run"), said.append).close(lambda: 5.0)
    assert "Input/output error" in "".join(said)
    assert said[-1].endswith(f"{spools}: keep this machine's disk")
