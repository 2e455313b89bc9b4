"""A replica in a container: whole lines, exit codes, and an engine that goes away."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import docker.errors
import pytest
import requests
from docker.utils.socket import SocketError
from hypothesis import given
from hypothesis import strategies as st

from launcher.errors import LaunchError
from launcher.images.docker_engine import docker_errors
from launcher.services.local import docker_replica as module
from launcher.services.local.docker_replica import ContainerReplica, LineSplitter


class Output:
    """What the engine streams: parts of stdout and stderr."""

    def __init__(self, *parts: tuple[bytes | None, bytes | None]) -> None:
        self.parts = parts
        self.is_closed = False

    def __iter__(self) -> Iterator[tuple[bytes | None, bytes | None]]:
        return iter(self.parts)

    def close(self) -> None:
        self.is_closed = True


class Engine:
    """One container, which ends when it is killed or by `end`."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.code: int | Exception = 0
        self.signals: list[str] = []
        self.is_gone = False

    def end(self, code: int | Exception) -> None:
        self.code = code
        self.ended.set()

    def wait(self, number: str, timeout: float | None) -> dict[str, Any]:
        assert timeout is None, "a job takes as long as it takes"
        assert self.ended.wait(10)
        if isinstance(self.code, Exception):
            raise self.code
        return {"StatusCode": self.code}

    def kill(self, number: str, name: str) -> None:
        self.signals.append(name)
        if self.is_gone:
            self.end(7)
            raise docker.errors.APIError("409: Container 1 is not running")
        if name == "SIGKILL":
            self.end(137)


def contained(
    engine: Engine, *parts: tuple[bytes | None, bytes | None]
) -> tuple[ContainerReplica, list[tuple[str, str]]]:
    lines: list[tuple[str, str]] = []
    output = Output(*parts)
    one = ContainerReplica("r", engine, "1", output, lambda *line: lines.append(line))
    one.drain()
    assert output.is_closed
    return one, lines


def settled(one: ContainerReplica) -> int | None:
    """Its exit code, once the thread that waits for it has it."""
    one._waiter.join(10)
    return one.poll()


def test_lines_of_both_streams_are_whole() -> None:
    engine = Engine()
    one, lines = contained(engine, (b"a", None), (None, b"err\xff\r\n"), (b"b\nc\n\nno", None), (b" end", None))
    assert lines == [("r", text) for text in ("err\ufffd", "ab", "c", "", "no end")]
    assert one.poll() is None
    engine.end(7)
    assert settled(one) == 7


@given(st.binary(max_size=50), st.lists(st.integers(0, 50), max_size=5))
def test_lines_are_the_same_however_they_come(data: bytes, cuts: list[int]) -> None:
    lines, edges = LineSplitter(), sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    found = [line for start, end in pairwise(edges) for line in lines.feed(data[start:end])]
    whole = data.decode("latin-1").split("\n")
    expected = [
        one.encode("latin-1").decode(errors="replace").rstrip("\r") for one in (whole if whole[-1] else whole[:-1])
    ]
    assert [*found, *lines.rest()] == expected


def test_signals_go_to_what_still_runs() -> None:
    engine = Engine()
    one, _ = contained(engine)
    one.terminate()
    one.kill()
    assert (engine.signals, one.poll()) == (["SIGTERM", "SIGKILL"], 137)
    one.terminate()
    one.kill()
    assert engine.signals == ["SIGTERM", "SIGKILL"]


def test_one_that_has_ended_unheard_is_fine() -> None:
    engine = Engine()
    one, _ = contained(engine)
    engine.is_gone = True
    one.kill()
    assert (engine.signals, one.poll()) == (["SIGKILL"], 7)


def test_an_engine_that_goes_away_is_no_success() -> None:
    engine = Engine()
    one, _ = contained(engine)
    engine.end(requests.exceptions.ConnectionError("reset"))
    one._waiter.join(10)
    with pytest.raises(LaunchError, match=r"can't wait for the end of r: .*reset") as raised:
        one.poll()
    assert "docker info" in raised.value.hint


@pytest.mark.parametrize(
    ("line", "foreign"),
    [
        (b"exec /usr/bin/python: exec format error\n", True),
        (b"standard_init_linux.go:228: exec user process caused: exec format error\n", True),
        (b"OSError: [Errno 8] Exec format error: './tool'\n", False),
        (b"my log: exec format error\n", False),
    ],
)
def test_a_program_for_another_processor(line: bytes, foreign: bool) -> None:
    engine = Engine()
    engine.end(1)
    assert contained(engine, (None, line))[0].is_wrong_platform is foreign


def test_the_engines_message_is_part_of_the_error() -> None:
    with pytest.raises(LaunchError, match=r"^the network: no more addresses"), docker_errors("the network"):
        raise docker.errors.APIError("500", explanation="no more addresses\n")
    with pytest.raises(LaunchError, match=r"^the network: .*refused"), docker_errors("the network"):
        raise ConnectionRefusedError("refused")


def test_a_container_that_survives_a_kill_is_still_running(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KILL_SECONDS", 0.1)
    engine = Engine()
    one, _ = contained(engine)
    engine.kill = lambda *_: None  # type: ignore[method-assign]  # hangs in a driver
    one.kill()
    assert one.poll() is None
    engine.end(0)


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("error", [ConnectionResetError("reset"), SocketError("Unexpected EOF while reading")])
def test_interrupted_output_is_printed_as_far_as_it_came(error: Exception) -> None:
    class BreaksOff(Output):
        def __iter__(self) -> Iterator[tuple[bytes | None, bytes | None]]:
            yield from self.parts
            raise error

    lines: list[tuple[str, str]] = []
    engine, output = Engine(), BreaksOff((b"a\nb", None))
    one = ContainerReplica("r", engine, "1", output, lambda *line: lines.append(line))
    one.drain()
    assert (lines, output.is_closed) == ([("r", "a"), ("r", "b")], True)
    engine.end(0)
