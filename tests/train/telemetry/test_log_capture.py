"""The text's parts: what is kept, under which names, and what happens where nothing can be kept."""

from __future__ import annotations

import builtins
import shutil
import threading
import time
from collections import namedtuple
from pathlib import Path
from typing import NamedTuple

import pytest

from launch_train.common.errors import OutputError
from launch_train.common.storage import LocalFolder
from launch_train.telemetry import log_capture
from launch_train.telemetry.log_capture import BUFFER, PART, Buffer, LogWriter
from tests.train.nodes import until


class Flaky(LocalFolder):
    """A run folder that can be broken and repaired."""

    broken = False
    listed = threading.Event()
    listed.set()

    def list(self, prefix: str = "") -> builtins.list[str]:
        self.listed.wait()
        return super().list(prefix)

    def write(self, name: str, data: bytes | bytearray | memoryview, *, create: bool = False, crc32c: str = "") -> str:
        if self.broken:
            raise OutputError("the folder is broken")
        return super().write(name, data, create=create)


class Kept(NamedTuple):
    """A writer over a local run folder."""

    buffer: Buffer
    writer: LogWriter
    storage: Flaky
    said: list[str]

    def close(self, seconds: float = 20.0) -> None:
        end = time.monotonic() + seconds
        self.writer.close(lambda: end - time.monotonic())

    def parts(self) -> dict[str, bytes]:
        return {name: self.storage.read(name) for name in self.storage.list("text/")}


def kept(folder: Path, *, every: float = 0.05, attempt: int = 2, node: int = 3, broken: bool = False) -> Kept:
    storage, buffer, said = Flaky(folder), Buffer(every), list[str]()
    storage.broken = broken
    return Kept(buffer, LogWriter(buffer, storage, attempt, node, None, said.append), storage, said)


def test_parts_are_written_while_it_runs_and_the_rest_at_the_end(tmp_path: Path) -> None:
    it = kept(tmp_path)
    it.buffer.add(b"one \xff")
    until(lambda: it.parts() == {"text/0002-0003-000000.log": b"one \xff"}, "the first part", limit=5)
    it.buffer.add(b"two\n")
    until(lambda: len(it.parts()) == 2, "the second part", limit=5)
    it.buffer.add(b"three")
    it.close()
    assert b"".join(it.parts().values()) == b"one \xfftwo\nthree"
    assert it.said == []


def test_much_text_does_not_wait_for_its_time(tmp_path: Path) -> None:
    it = kept(tmp_path, every=1000)
    for _ in range(PART >> 10):
        it.buffer.add(b"x" * 1024)
    until(lambda: len(it.parts()) == 1, "a part", limit=5)
    it.buffer.add(b"y")
    it.buffer.hurry()
    until(lambda: len(it.parts()) == 2, "the part that was asked for", limit=5)
    it.close()
    assert [len(data) for data in it.parts().values()] == [PART, 1]


def test_the_numbers_go_on_after_the_parts_that_are_there(tmp_path: Path) -> None:
    old = LocalFolder(tmp_path)
    for name in ("0002-0003-000000", "0002-0003-000041", "0002-0003-000041-1", "0002-0004-000099", "0001-0003-000099"):
        old.write(f"text/{name}.log", b"old")
    it = kept(tmp_path)
    it.buffer.add(b"new")
    it.close()
    assert it.parts()["text/0002-0003-000042.log"] == b"new"


def test_a_folder_that_can_not_be_written_is_one_line_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_capture, "_AGAIN_S", 0.02)
    it = kept(tmp_path, broken=True)
    it.buffer.add(b"one\n")
    until(lambda: it.said != [], "a line", limit=5)
    it.buffer.add(b"two\n")
    time.sleep(0.1)
    assert it.said == ["log lines are not being stored, retrying: the folder is broken"]
    it.storage.broken = False
    until(lambda: len(it.said) == 2, "the other line", limit=5)
    it.close()
    assert it.said[1:] == ["log lines are stored again"]
    assert b"".join(it.parts().values()) == b"one\ntwo\n"


def test_text_leaves_room_on_a_disk_that_is_nearly_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**12, 10**12 - 10**9, 10**9))
    it = kept(tmp_path / "not" / "yet" / "there")
    it.buffer.add(b"one\n")
    it.close()
    assert it.parts() == {}
    assert "only 1.0 GB are free on the disk of " in it.said[0]


def test_what_does_not_fit_is_missed_and_a_line_says_so() -> None:
    buffer = Buffer(every=1000, size=10)
    for data in (b"12345\n", b"6789\n", b"A"):
        buffer.add(data)
    buffer.hurry()
    assert buffer.take() == b"12345\nlaunch: 6 bytes of text are missing here: they could not be stored in time\n"
    buffer.add(b"again\n")
    buffer.close()
    assert buffer.take() == b"again\n"
    assert buffer.take() is None


def test_adding_never_waits() -> None:
    buffer, block = Buffer(every=1000), b"x" * (1 << 16)
    start = time.monotonic()
    for _ in range(2 * BUFFER // len(block)):
        buffer.add(block)
    assert time.monotonic() - start < 10
    taken = buffer.take()
    assert taken
    assert BUFFER < len(taken) < BUFFER + 200
