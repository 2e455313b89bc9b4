"""Failures of a service must not affect training: it is down, slow, refuses, or never answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from launch_train.common.masking import HIDDEN
from launch_train.loggers import feed as feeds
from launch_train.loggers.feed import LoggerFeed, RefusedError, Service, State
from launch_train.telemetry.rows import Row

WITHIN = 10.0
"""Seconds; nothing here takes as long."""


class Recorded:
    """A service that records its calls; `before` runs before each."""

    def __init__(self, before: Callable[[str], object] = lambda call: None) -> None:
        self.before = before
        self.steps: list[int] = []
        self.config: dict[str, Any] = {}
        self.state: State | None = None

    def configure(self, config: Mapping[str, Any]) -> None:
        self.before("configure")
        self.config |= config

    def log(self, rows: Sequence[Row]) -> None:
        self.before("log")
        self.steps += [row["step"] for row in rows]

    def finish(self, state: State) -> None:
        self.before("finish")
        self.state = state


class Failing:
    """Raises the errors in turn, then nothing."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = [*errors]

    def __call__(self, call: str) -> None:
        if self.errors:
            raise self.errors.pop(0)


@pytest.fixture(autouse=True)
def _without_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FIRST_WAIT", "LONGEST_WAIT", "LAST_WAIT"):
        monkeypatch.setattr(feeds, name, 0.001)


def feed(service: Service | Callable[[], Service], env: Mapping[str, str] | None = None) -> LoggerFeed:
    return LoggerFeed("wandb", service if callable(service) else lambda: service, env or {})


def ended(one: LoggerFeed, state: State = "finished", seconds: float = WITHIN) -> None:
    one.end(state)
    one.join(time.monotonic() + seconds)


def test_rows_come_in_order_and_the_config_once() -> None:
    service = Recorded()
    one = feed(service)
    one.put({"event": "start", "config": {"steps": 3, "api_token": "canary"}})
    for step in range(1, 1501):
        one.put({"step": step, "loss": 0.5})
    one.put({"event": "eval", "step": 1500, "loss": 0.4})
    one.put({"event": "checkpoint", "step": 1500, "seconds": 1.0})
    one.put({"event": "eval", "step": "late", "loss": 0.4})  # a script may log anything
    ended(one)
    assert service.steps == [*range(1, 1501), 1500]
    assert (service.config, service.state) == ({"steps": 3, "api_token": HIDDEN}, "finished")


def test_an_outage_loses_no_row_and_prints_one_warning(capsys: pytest.CaptureFixture[str]) -> None:
    service = Recorded(Failing(ConnectionError("https://user:pw@host/api: refused"), TimeoutError(), OSError("x")))
    one = feed(service)
    one.put({"step": 1, "loss": 0.5})
    ended(one)
    said = capsys.readouterr().err
    assert service.steps == [1]
    assert said.count("\n") == 1
    assert "refused" in said
    assert "pw" not in said


def test_a_service_that_opens_late_gets_all_rows(capsys: pytest.CaptureFixture[str]) -> None:
    service, failing = Recorded(), Failing(ConnectionError("down"), ConnectionError("down"))

    def opening() -> Service:
        failing("open")
        return service

    one = feed(opening)
    one.put({"step": 1, "loss": 0.5})
    ended(one, "failed")
    assert (service.steps, service.state) == ([1], "failed")
    assert "not logged" not in capsys.readouterr().err


def test_refused_rows_are_counted_and_the_next_ones_logged(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feeds, "BLOCK_ROWS", 2)
    service, ready = Recorded(Failing(RefusedError("names"))), threading.Event()

    def opening() -> Service:
        ready.wait(WITHIN)
        return service

    one = feed(opening)
    for step in (1, 2, 3):
        one.put({"step": step, "loss": 0.5})
    ready.set()
    ended(one)
    assert service.steps == [3]
    assert "wandb: 2 rows not logged" in capsys.readouterr().err


def test_a_missing_package_is_reported_once_and_not_retried(capsys: pytest.CaptureFixture[str]) -> None:
    opened = []

    def opening() -> Service:
        opened.append(1)
        raise ImportError("the image has no package wandb")

    one = feed(opening)
    for step in (1, 2):
        one.put({"step": step, "loss": 0.5})
    ended(one)
    said = capsys.readouterr().err
    assert opened == [1]
    assert said.count("no package wandb") == 1
    assert "2 rows not logged" in said


def test_a_server_that_never_answers_drops_the_oldest_rows_and_ends_in_time(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feeds, "QUEUE_ROWS", 10)
    never = threading.Event()
    one = feed(Recorded(lambda call: never.wait(WITHIN)))
    for step in range(1, 101):
        one.put({"step": step, "loss": 0.5})
    began = time.monotonic()
    ended(one, seconds=0.05)
    assert time.monotonic() - began < 5
    assert "100 rows not logged" in capsys.readouterr().err  # dropped, waiting, and with the service
    never.set()


def test_a_server_that_stays_down_ends_before_its_time(capsys: pytest.CaptureFixture[str]) -> None:
    service = Recorded(Failing(*[ConnectionError("down")] * 99))
    one, began = feed(service), time.monotonic()
    one.put({"step": 1, "loss": 0.5})
    ended(one, seconds=60.0)
    assert time.monotonic() - began < 30
    assert "wandb: 1 row not logged" in capsys.readouterr().err


def test_messages_contain_no_secret_of_the_environment(capsys: pytest.CaptureFixture[str]) -> None:
    one = feed(Recorded(Failing(PermissionError("key s3cr3t-value is invalid"))), {"WANDB_API_KEY": "s3cr3t-value"})
    one.put({"step": 1, "loss": 0.5})
    ended(one)
    said = capsys.readouterr().err
    assert "is invalid" in said
    assert "s3cr3t" not in said
