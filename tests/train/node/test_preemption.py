"""Notices of the metadata server: each reaches the node as SIGTERM does, and nothing that is wrong with it does."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from launch_train.node.gce_vm import REPORT_AFTER, PreemptionListener
from launch_train.node.generation import StopRequest
from tests.train.node.metadata import Metadata
from tests.train.nodes import free_port, until

PREEMPTED, MAINTENANCE = "instance/preempted", "instance/maintenance-event"
TERMINATE = "TERMINATE_ON_HOST_MAINTENANCE"
Listen = Callable[..., "Heard"]


class Heard:
    """A node that listens."""

    def __init__(self, address: str, pause: float) -> None:
        self.stop = StopRequest()
        self.said: list[str] = []
        self.notices = PreemptionListener({"GCE_METADATA_HOST": address}, self.stop, self.said.append, pause)
        self.notices.start()

    def is_told(self) -> bool:
        return self.stop.signum == signal.SIGTERM and bool(self.said)


@pytest.fixture
def server() -> Iterator[Metadata]:
    with Metadata().serving() as found:
        yield found


@pytest.fixture
def listen(server: Metadata) -> Iterator[Listen]:
    with ExitStack() as stack:

        def begin(address: str = "", pause: float = 0.01) -> Heard:
            heard = Heard(address or server.address, pause)
            stack.callback(heard.notices.close)
            return heard

        yield begin


@pytest.mark.parametrize(
    ("key", "value", "meaning", "seconds"),
    [
        (PREEMPTED, "TRUE", "Compute Engine is preempting this VM", 30),
        (MAINTENANCE, TERMINATE, "Compute Engine is stopping this VM for host maintenance", 600),
    ],
)
def test_a_notice_is_a_signal(
    server: Metadata, listen: Listen, key: str, value: str, meaning: str, seconds: float
) -> None:
    heard = listen()
    until(lambda: server.requests.count(key) == 2, "a request that waits for a change")
    assert not heard.stop.signum
    before = time.time()
    server.set(key, value)
    until(heard.is_told, "the notice", limit=10)
    assert before <= heard.stop.when < before + 2
    assert heard.said == [f"{meaning} ({key} is {value}); saving a checkpoint"]
    assert not heard.stop.hurry
    assert heard.stop.until - heard.stop.since == pytest.approx(seconds, abs=0.1)


def test_a_notice_that_was_there_before(server: Metadata, listen: Listen) -> None:
    server.set(PREEMPTED, "TRUE")
    until(listen().is_told, "the notice", limit=10)


def test_a_migration_is_none(server: Metadata, listen: Listen) -> None:
    heard = listen()
    server.set(MAINTENANCE, "MIGRATE_ON_HOST_MAINTENANCE")
    until(lambda: server.requests.count(MAINTENANCE) >= 2, "the look after it")
    server.set(MAINTENANCE, "NONE")
    until(lambda: server.requests.count(MAINTENANCE) >= 3, "the look after that")
    assert not heard.stop.signum
    server.set(MAINTENANCE, TERMINATE)
    until(heard.is_told, "the notice", limit=10)


@pytest.mark.parametrize("fault", [404, 500, 503, "cut", "torn", "stranger", "reset", "noise"])
def test_an_answer_that_is_none_is_asked_for_again(server: Metadata, listen: Listen, fault: int | str) -> None:
    """Also when what was spoilt is the notice itself."""
    server.faults[PREEMPTED] = [fault] * (REPORT_AFTER - 1)
    server.set(PREEMPTED, "TRUE")
    heard = listen()
    until(heard.is_told, "the notice", limit=10)
    assert len(heard.said) == 1


def test_a_stranger_is_not_believed(server: Metadata, listen: Listen) -> None:
    server.faults[PREEMPTED] = ["stranger"] * 2
    heard = listen()
    until(lambda: server.requests.count(PREEMPTED) == 4, "the requests after it")
    assert not heard.stop.signum


def test_what_is_wrong_is_told_once(server: Metadata, listen: Listen) -> None:
    server.faults = {key: [503] * 12 for key in server.faults}
    heard = listen()
    until(lambda: min(map(server.requests.count, server.faults)) > 12, "the end of it", limit=10)
    [line] = heard.said
    assert line.endswith("HTTP Error 503: Service Unavailable; retrying")
    server.set(PREEMPTED, "TRUE")
    until(lambda: bool(heard.stop.signum), "the notice", limit=10)


@pytest.mark.parametrize("address", ["", "not a host", "127.0.0.1:port"])
def test_nobody_there(listen: Listen, address: str) -> None:
    heard = listen(address or f"127.0.0.1:{free_port()}")
    until(lambda: bool(heard.said), "the complaint", limit=10)
    assert not heard.stop.signum


def test_a_server_that_says_nothing_holds_up_nobody(listen: Listen) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began = time.monotonic()
        heard = listen(f"127.0.0.1:{silent.getsockname()[1]}")
        assert time.monotonic() - began < 10
        assert heard.said == []


@pytest.mark.parametrize("fault", [None, 503])
def test_no_busy_loop(server: Metadata, listen: Listen, fault: int | None) -> None:
    server.hold = False
    if fault:
        server.faults = {key: [fault] * 1000 for key in server.faults}
    began = time.monotonic()
    listen(pause=0.1)
    until(lambda: len(server.requests) >= 12, "the requests")
    assert len(server.requests) <= 4 + 2 * (time.monotonic() - began) / 0.1


def test_no_proxy_is_asked(server: Metadata, listen: Listen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("no_proxy")
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")
    server.set(PREEMPTED, "TRUE")
    until(listen().is_told, "the notice", limit=10)
