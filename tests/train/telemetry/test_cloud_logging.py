"""What is printed on a VM, in Cloud Logging: each line once, and nobody waits for it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch_train.telemetry import cloud_logging
from launch_train.telemetry.cloud_logging import (
    Chunk,
    Entries,
    LogSource,
    LogUploader,
)
from launcher.testing.googlecloud import Fault, GoogleCloud, Reset, Slow, Stalled, Status
from launcher.testing.googlecloud.logs import WRITE
from tests.train.nodes import until

RESOURCE = {"project_id": "my-project", "instance_id": "4242", "zone": "us-central1-a"}
SOURCE = LogSource(RESOURCE, {"launch-run": "demo-1", "task_name": "workerpool1-0"})
LONG = 30.0


class Writer:
    """An uploader, and what it says."""

    def __init__(self, cloud: GoogleCloud) -> None:
        self.cloud = cloud
        self.said: list[str] = []
        self.uploader = LogUploader(SOURCE, cloud.environ(), self.said.append, every=0.05)

    def write(self, text: str, number: int = 1) -> None:
        self.uploader.add(text.encode(), number)

    def close(self, seconds: float = LONG) -> float:
        """How long it took."""
        began = time.monotonic()
        until_ = began + seconds
        self.uploader.close(lambda: until_ - time.monotonic())
        return time.monotonic() - began

    def texts(self) -> list[str]:
        return [entry.text for entry in sorted(self.cloud.logs.entries, key=lambda entry: entry.place)]


@pytest.fixture
def writer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Writer]:
    """On a clock that runs: entries have the time at which they were printed."""
    monkeypatch.setattr(cloud_logging, "AGAIN_S", 0.02)
    monkeypatch.setattr(cloud_logging, "AGAIN_CLOSED_S", 0.02)
    with GoogleCloud() as cloud:
        found = Writer(cloud)
        yield found
        cloud.faults.clear()
        found.close()


def test_an_entry(writer: Writer) -> None:
    before = time.time_ns()
    writer.write("step 1\ncafé \x1b[1m\n")
    writer.write("warning\n", 2)
    writer.close()
    first, _, third = writer.cloud.logs.entries
    assert writer.texts() == ["step 1", "café \x1b[1m", "warning"]
    assert first.shown["logName"] == "projects/my-project/logs/launch"
    assert first.shown["resource"] == {"type": "gce_instance", "labels": RESOURCE}
    assert first.shown["labels"] == {"launch-run": "demo-1", "task_name": "workerpool1-0"}
    assert (first.shown["severity"], third.shown["severity"]) == ("INFO", "ERROR")
    assert before <= first.timestamp <= third.timestamp <= time.time_ns()
    assert writer.said == []


@pytest.mark.parametrize(
    "fault",
    [
        Fault(WRITE, Status(503), times=3),
        Fault(WRITE, Status(429), times=2),
        Fault(WRITE, Reset(), times=3),
        Fault(WRITE, Reset("after"), times=2),
    ],
    ids=["503", "429", "reset", "answer lost"],
)
def test_each_line_once_whatever_happens(writer: Writer, fault: Fault) -> None:
    writer.cloud.faults.add(fault)
    for n in range(50):
        writer.write(f"{n}\n")
    writer.close()
    assert writer.texts() == [str(n) for n in range(50)]
    assert writer.said == []


@pytest.mark.parametrize(
    ("effect", "hint"),
    [
        (
            Status(403, message="Permission denied", info="IAM_PERMISSION_DENIED"),
            "gcloud projects add-iam-policy-binding my-project --member=serviceAccount:ACCOUNT "
            "--role=roles/logging.logWriter",
        ),
        (
            Status(403, message="Cloud Logging API has not been used", info="SERVICE_DISABLED"),
            "gcloud services enable logging.googleapis.com --project=my-project",
        ),
        (Status(403, message="too narrow", info="ACCESS_TOKEN_SCOPE_INSUFFICIENT"), ": too narrow"),
        (Status(404, message="no such project"), ": no such project"),
    ],
)
def test_what_is_closed_is_told_once_and_left_alone(writer: Writer, effect: Status, hint: str) -> None:
    writer.cloud.faults.add(Fault(WRITE, effect, times=None))
    writer.write("a\n")
    until(lambda: bool(writer.said), "the word", limit=10)
    asked = len(writer.cloud.requests)
    writer.write("b\n" * 10)
    assert writer.close() < 5
    assert len(writer.cloud.requests) == asked == 1
    [line] = writer.said
    assert line.startswith("logging to Cloud Logging has stopped: ")
    assert line.endswith(hint)
    assert not writer.uploader._chunks


def test_lines_that_are_refused_are_told_and_the_others_come(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cloud_logging, "PIECE", 10**6)
    writer.write("a\n" + "x" * 300_000 + "\nb\n")
    writer.close()
    assert writer.texts() == ["a", "b"]
    assert writer.said == [
        "Cloud Logging refuses some lines: Log entry with size 293.3K exceeds maximum size of 256.0K"
    ]


def test_a_slow_answer_holds_up_nobody(writer: Writer) -> None:
    writer.cloud.faults.add(Fault(WRITE, Slow(3.0)))
    writer.write("first\n")
    until(lambda: bool(writer.cloud.requests), "the request", limit=10)
    began = time.monotonic()
    for n in range(3_000):
        writer.write(f"{n}\n")
    assert time.monotonic() - began < 2.5
    writer.close()
    assert len(writer.texts()) == 3_001


def test_the_end_waits_no_longer_than_it_may(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cloud_logging, "ANSWER_S", 1.0)
    writer.cloud.faults.add(Fault(WRITE, Stalled(), times=None))
    writer.write("a\n")
    assert 0.2 <= writer.close(0.3) < 2
    assert writer.said == ["the last lines did not reach Cloud Logging"]


def test_memory_is_bounded_and_the_oldest_lines_go(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cloud_logging, "BUFFER", 1000)
    writer.cloud.faults.add(Fault(WRITE, Slow(0.5)))
    writer.write("first\n")
    until(lambda: bool(writer.cloud.requests), "the request", limit=10)
    for n in range(100):
        writer.write(f"{n:099d}\n")
    writer.close()
    texts = writer.texts()
    assert [text for text in texts if text.isdecimal()] == [f"{n:099d}" for n in range(90, 100)]
    assert any("90 lines are missing here" in text for text in texts)


def test_a_bug_ends_the_journal_and_not_the_run(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer.uploader._client, "send", lambda entries: 1 / 0)
    writer.write("a\n")
    until(lambda: bool(writer.said), "the word", limit=10)
    assert writer.said == ["logging to Cloud Logging has stopped: ZeroDivisionError: division by zero"]
    assert writer.close() < 1


# --- Lines ------------------------------------------------------------------------------------------------------------


def sent(entries: Entries, *datas: bytes, number: int = 1, last: bool = True) -> list[dict[str, Any]]:
    chunks = [Chunk(time.time_ns(), number, data) for data in datas]
    return [json.loads(entry) for entry in entries.from_chunks(chunks, last=last)]


def messages(found: list[dict[str, Any]]) -> list[str]:
    return [entry["jsonPayload"]["message"] for entry in found]


@pytest.mark.parametrize(
    ("datas", "lines"),
    [
        ((b"a\nb\n",), ["a", "b"]),
        ((b"a", b"b\nc"), ["ab", "c"]),
        ((b"\n\n",), ["", ""]),
        ((b"a\r\nb\r\n",), ["a", "b"]),
        ((b"\r 10%", b"\r 20%", b"\r100%\n"), ["100%"]),
        ((b"caf\xe9 \x00\n",), ["caf\ufffd \x00"]),
        ((b"caf\xc3", b"\xa9\n"), ["café"]),
        ((), []),
    ],
)
def test_lines(datas: tuple[bytes, ...], lines: list[str]) -> None:
    assert messages(sent(Entries("x"), *datas)) == lines


def test_the_beginning_of_a_line_waits_for_its_end() -> None:
    entries = Entries("x")
    assert sent(entries, b"begin", last=False) == []
    assert messages(sent(entries, b"ning\nnext", last=False)) == ["beginning"]
    assert messages(sent(entries)) == ["next"]


def test_a_very_long_line_goes_on_in_another_entry() -> None:
    line = "é" * (2 * cloud_logging.PIECE + 5)
    found = sent(Entries("x"), line.encode() + b"\n")
    assert "".join(messages(found)) == line
    assert len(found) == 3
    assert max(len(json.dumps(entry, ensure_ascii=False).encode()) for entry in found) < 250_000


@given(st.lists(st.binary(max_size=40), max_size=20))
def test_no_line_is_lost_and_ids_are_in_order(datas: list[bytes]) -> None:
    entries = Entries("x")
    found = [entry for data in datas for entry in sent(entries, data, last=False)] + sent(entries)
    whole = b"".join(datas)
    lines = (whole[:-1] if whole.endswith(b"\n") else whole).split(b"\n") if whole else []
    assert messages(found) == [line.rstrip(b"\r").rpartition(b"\r")[2].decode("utf-8", "replace") for line in lines]
    ids = [entry["insertId"] for entry in found]
    assert ids == sorted(set(ids))
