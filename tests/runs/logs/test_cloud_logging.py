"""A job's lines out of Cloud Logging: each once, whatever happens on the way."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from launch_train.common.text import nanoseconds_text
from launcher.clock import Clock
from launcher.errors import LaunchError, NotAuthorised, UnreachableError
from launcher.gcp.api import retry_after, status_of
from launcher.jobs.job import Job
from launcher.runs.logs import cloud_logging
from launcher.runs.logs.cloud_logging import CloudLogReader, parse_entry, parse_rfc3339
from launcher.testing.googlecloud import FakeClock, Fault, GoogleCloud, Reset, Stalled, Status, Torn, Truncated
from launcher.testing.googlecloud.faults import Effect, Serve, Step
from launcher.testing.googlecloud.wire import Call, Response

LIST = "logging.entries.list"
BEGAN = 1_700_000_000.0
JOB = Job(name="projects/1/locations/us-central1/customJobs/7", region="us-central1", state="RUNNING", created=BEGAN)


@pytest.fixture
def log(cloud: GoogleCloud) -> CloudLogReader:
    return open_log(cloud)


def open_log(cloud: GoogleCloud, job: Job = JOB) -> CloudLogReader:
    """On a clock of its own: this machine's time has nothing to do with the cloud's."""
    ours = FakeClock(5.0)
    return CloudLogReader(job, "my-project", cloud.environ(), Clock(ours, ours.advance))


def write(cloud: GoogleCloud, *texts: str, **more: Any) -> None:
    for text in texts:
        cloud.logs.write("7", "workerpool0-0", text, **more)


def texts(lines: Any) -> list[str]:
    return [line.text for line in lines]


def test_lines_come_once_and_in_order(cloud: GoogleCloud, log: CloudLogReader, clock: FakeClock) -> None:
    assert log.read_new() == []
    write(cloud, "a", "b")
    cloud.logs.write("7", "workerpool1-0", "c", severity="ERROR", when=BEGAN + 0.25)
    cloud.logs.write("7", "service", "queued", when=BEGAN + 0.5, plain=True)
    cloud.logs.write("8", "workerpool0-0", "another job's")
    clock.advance(1)
    lines = log.read_new()
    assert texts(lines) == ["a", "b", "c", "queued"]
    assert [line.replica for line in lines[1:]] == ["workerpool0-0", "workerpool1-0", "service"]
    assert (lines[2].time, lines[2].severity) == (BEGAN + 0.25, "ERROR")
    for n in range(100):
        clock.advance(5)
        write(cloud, f"line {n}")
        assert texts(log.read_new()) == [f"line {n}"]
    clock.advance(1000)
    assert log.read_new() == []
    write(cloud, "z")
    assert texts(log.read_new()) == ["z"]


def test_the_request_is_as_gclouds(cloud: GoogleCloud, log: CloudLogReader) -> None:
    log.read_new()
    assert cloud.requests[-1].body == {
        "resourceNames": ["projects/my-project"],
        "filter": 'resource.type="ml_job" AND resource.labels.job_id="7" AND '
        'timestamp>="2023-11-14T22:12:15.000000000Z"',
        "orderBy": "timestamp asc",
        "pageSize": 1000,
    }


@pytest.mark.parametrize(("lateness", "chatter"), [(20.0, 0), (3.0, 3), (60.0, 3)])
def test_late_entries(
    cloud: GoogleCloud,
    clock: FakeClock,
    monkeypatch: pytest.MonkeyPatch,
    lateness: float,
    chatter: int,
) -> None:
    """Also where so much is written that not every look can go back as far."""
    monkeypatch.setattr(cloud_logging, "PAGE_SIZE", 10)
    log, found, due = open_log(cloud), list[str](), list[str]()
    for n in range(25):
        more = [f"{n}.{k}" for k in range(chatter)]
        write(cloud, *more)
        due += more
        write(cloud, f"late {n}", late=lateness)
        due.append(f"late {n}")
        clock.advance(5)
        found += texts(log.read_new())
    for _ in range(15):
        clock.advance(5)
        found += texts(log.read_new())
    assert sorted(found) == sorted(due)


EFFECTS: list[Effect] = [
    *(Reset(), Reset("after"), Status(503), Status(500), Status(429, retry_after=3), Status(408), Status(504)),
    *(Truncated(), Truncated(0), Truncated(1), Status(502)),
]


@pytest.mark.parametrize("effect", EFFECTS, ids=str)
@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_page_that_fails_is_read_again(
    cloud: GoogleCloud, monkeypatch: pytest.MonkeyPatch, effect: Effect, after: int
) -> None:
    monkeypatch.setattr(cloud_logging, "PAGE_SIZE", 10)
    write(cloud, *map(str, range(35)))
    cloud.faults.add(Fault(LIST, effect, after=after, times=2))
    found, failed, log = list[str](), 0, open_log(cloud)
    for _ in range(4):
        try:
            found += texts(log.read_new())
        except UnreachableError:
            failed += 1
    assert found == list(map(str, range(35)))
    assert failed == (2 if after == 0 else 1), "a failure is told unless there were lines before it"
    assert len([1 for request in cloud.requests if "pageToken" in request.body]) >= 3


def test_a_stalled_answer(cloud: GoogleCloud, monkeypatch: pytest.MonkeyPatch, log: CloudLogReader) -> None:
    monkeypatch.setattr("launcher.gcp.api.REQUEST_SECONDS", 0.2)
    write(cloud, "a")
    cloud.faults.add(Fault(LIST, Stalled("half")))
    with pytest.raises(UnreachableError):
        log.read_new()
    assert texts(log.read_new()) == ["a"]


def test_torn_bytes_break_nothing(cloud: GoogleCloud, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each bit of an answer may flip: the lines after it come all the same."""
    monkeypatch.setattr("launcher.gcp.api.REQUEST_SECONDS", 0.5)
    write(cloud, "first")
    for at in range(3, 450, 25):
        log = open_log(cloud)
        cloud.faults.clear()
        cloud.faults.add(Fault(LIST, Torn(at)))
        found = []
        for _ in range(3):
            try:
                found += log.read_new()
            except UnreachableError:
                continue
        assert len(found) >= 1, at


def test_pages_without_entries_are_not_the_end(cloud: GoogleCloud, log: CloudLogReader) -> None:
    write(cloud, "a")
    cloud.logs.empty_pages = 3
    assert texts(log.read_new()) == ["a"]


def test_an_expired_page_token(cloud: GoogleCloud, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cloud_logging, "PAGE_SIZE", 10)
    write(cloud, *map(str, range(35)))
    cloud.faults.add(Fault(LIST, Status(400, message="page_token is invalid"), step="page", after=1))
    log = open_log(cloud)
    assert texts([*log.read_new(), *log.read_new()]) == list(map(str, range(35)))


def test_a_refusal_without_a_token_is_one(cloud: GoogleCloud, log: CloudLogReader) -> None:
    cloud.faults.add(Fault(LIST, Status(400, message="Unparseable filter"), times=None))
    with pytest.raises(LaunchError, match="Unparseable filter") as raised:
        log.read_new()
    assert status_of(raised.value) == 400


def test_too_many_reads(cloud: GoogleCloud, log: CloudLogReader) -> None:
    cloud.faults.add(Fault(LIST, Status(429, retry_after=30)))
    with pytest.raises(UnreachableError) as raised:
        log.read_new()
    assert retry_after(raised.value.__cause__) == 30


@pytest.mark.parametrize("body", [b'{"error": "nope"}', b"[]", b'"x"', b"\xff<html>", b""])
@pytest.mark.parametrize("status", [403, 503])
def test_malformed_refusals(cloud: GoogleCloud, log: CloudLogReader, body: bytes, status: int) -> None:
    cloud.faults.add(Fault(LIST, Say(body, status)))
    with pytest.raises(NotAuthorised if status == 403 else UnreachableError):
        log.read_new()


@pytest.mark.parametrize("body", [b"[]", b"null", b'{"entries": {}}', b'{"entries": [1, {}, {"timestamp": 5}]}'])
def test_malformed_responses(cloud: GoogleCloud, log: CloudLogReader, body: bytes) -> None:
    cloud.faults.add(Fault(LIST, Say(body)))
    write(cloud, "a")
    assert log.read_new() == []
    assert texts(log.read_new()) == ["a"]


def test_a_long_history_is_read_over_several_looks_and_survives_trouble(
    cloud: GoogleCloud, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cloud_logging, "PAGE_SIZE", 20)
    monkeypatch.setattr(cloud_logging, "MAX_REMEMBERED", 50)
    for n in range(600):
        clock.advance(7)
        write(cloud, str(n))
    log, found, looks = open_log(cloud), list[str](), 0
    while len(found) < 600:
        looks += 1
        assert looks < 40
        if looks % 2:
            cloud.faults.add(Fault(LIST, Reset(), after=2))
        if looks % 3 == 0:
            cloud.faults.add(Fault(LIST, Status(400, message="page_token is invalid"), step="page"))
        before = len(cloud.requests)
        try:
            found += texts(log.read_new())
        except UnreachableError:
            continue
        assert len(cloud.requests) - before <= cloud_logging.PAGES_PER_POLL
        assert len(log._seen) <= 80
        clock.advance(5)
        cloud.faults.clear()
    assert found == list(map(str, range(600)))


def test_what_came_in_late_while_a_long_pass_was_read(
    cloud: GoogleCloud, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cloud_logging, "PAGE_SIZE", 2)
    write(cloud, *map(str, range(12)))
    clock.advance(59)
    log = open_log(cloud)
    assert len(log.read_new()) == 10
    clock.advance(1)
    write(cloud, "late", when=BEGAN, insert_id="0")  # before what was read already
    clock.advance(70)
    found = [text for _ in range(3) for text in texts(log.read_new())]
    assert found == ["10", "11", "late"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_none_lost_and_none_doubled(
    cloud: GoogleCloud, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Anything at once: bursts at one moment, late entries, faults on any page, tokens that go."""
    dice = random.Random(seed)
    monkeypatch.setattr(cloud_logging, "PAGE_SIZE", dice.choice([3, 10, 1000]))
    monkeypatch.setattr(cloud_logging, "PAGES_PER_POLL", 50)
    monkeypatch.setattr(cloud_logging, "MAX_REMEMBERED", 20)
    log, found, count = open_log(cloud), list[str](), 0
    effects = [*EFFECTS, Status(400, message="page_token is invalid")]
    for _ in range(40):
        for _ in range(dice.choice([0, 1, 5, 12])):
            when = clock() - dice.choice([0.0, 0.0, 0.0, 1.5, dice.uniform(0, 60)])
            write(cloud, str(count), when=when, late=max(0.0, dice.uniform(-40, when + 60 - clock())))
            count += 1
        if dice.random() < 0.4:
            effect = dice.choice(effects)
            cloud.faults.add(
                Fault(LIST, effect, step="page" if effect == effects[-1] else None, after=dice.choice([0, 0, 1, 3]))
            )
        try:
            found += texts(log.read_new())
        except UnreachableError:
            clock.advance(dice.choice([0, 40]))
        clock.advance(dice.choice([0.0, 0.5, 5.0, 30.0]))
    cloud.faults.clear()
    for _ in range(20):
        clock.advance(10)
        found += texts(log.read_new())
    assert sorted(found, key=int) == list(map(str, range(count)))


def test_a_node_whose_clock_is_ahead(cloud: GoogleCloud, log: CloudLogReader, clock: FakeClock) -> None:
    write(cloud, "from tomorrow", when=BEGAN + 86_400)
    assert texts(log.read_new()) == ["from tomorrow"]
    clock.advance(5)
    write(cloud, "from today")
    assert texts(log.read_new()) == ["from today"], "its entry hides nobody else's"
    clock.advance(5)
    assert log.read_new() == []


def test_the_date_is_missing(cloud: GoogleCloud, log: CloudLogReader, clock: FakeClock, monkeypatch: Any) -> None:
    monkeypatch.setattr(cloud_logging, "http_date", lambda text: None)
    for n in range(30):
        write(cloud, str(n))
        assert texts(log.read_new()) == [str(n)]
        clock.advance(20)


def test_a_chatty_job_stays_below_what_a_project_may_ask(
    cloud: GoogleCloud, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """10,000 lines a minute, scaled down: a fiftieth of the lines, on pages of a fiftieth."""
    monkeypatch.setattr(cloud_logging, "PAGE_SIZE", 20)
    log, found, count, first = open_log(cloud), 0, 0, 0
    for look in range(24):
        for _ in range(17):
            clock.advance(5 / 17)
            write(cloud, str(count))
            count += 1
        found += len(log.read_new())
        first = len(cloud.requests) if look < 12 else first
    assert len(cloud.requests) - first <= 45, "requests in the second minute"
    assert found >= count - 200, "it keeps up"
    for _ in range(10):
        found += len(log.read_new())
    assert found == count


def test_tail_and_what_follows(cloud: GoogleCloud, clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cloud_logging, "PAGE_SIZE", 4)
    for n in range(20):
        write(cloud, f"{n}\nand {n}")
        clock.advance(1)
    log = open_log(cloud)
    assert texts(log.read_tail(13)) == ["and 13", *(text for n in range(14, 20) for text in (f"{n}", f"and {n}"))]
    assert log.read_new() == []
    write(cloud, "new")
    assert texts(log.read_new()) == ["new"]
    clock.advance(30)
    assert log.read_new() == []


def test_tails_at_the_edges(cloud: GoogleCloud, clock: FakeClock) -> None:
    assert open_log(cloud).read_tail(5) == []
    write(cloud, "a", "b")
    everything, nothing = open_log(cloud), open_log(cloud)
    assert texts(everything.read_tail(5)) == ["a", "b"]
    assert nothing.read_tail(0) == []
    clock.advance(1)
    write(cloud, "c")
    assert texts(everything.read_new()) == texts(nothing.read_new()) == ["c"]


def test_since(cloud: GoogleCloud, clock: FakeClock) -> None:
    for n in range(20):
        write(cloud, str(n))
        clock.advance(10)
    log = open_log(cloud)
    log.start_at(BEGAN + 150)
    assert texts(log.read_existing()) == ["15", "16", "17", "18", "19"]
    assert log.read_new() == []


def test_past_is_patient(cloud: GoogleCloud, log: CloudLogReader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cloud_logging, "PAGE_SIZE", 2)
    write(cloud, *"abcdefg")
    cloud.faults.add(Fault(LIST, Status(503), times=3, after=1))
    assert texts(log.read_existing()) == list("abcdefg")
    cloud.faults.add(Fault(LIST, Status(503), times=None))
    with pytest.raises(UnreachableError):
        list(log.read_existing())


def test_what_a_line_may_hold(cloud: GoogleCloud, log: CloudLogReader) -> None:
    long = "é" * (1 << 17)
    write(cloud, "nul \0", "\x1b[1;31mred\x1b[0m", "tab\tbell\a\x1b]0;title\x07", long, "a\r\nb\n", "half \ud83d!", "")
    lines = texts(log.read_new())
    assert lines == ["nul \\x00", "red", "tab\tbell\\x07\\x1b]0;title\\x07", long, "a", "b", "half \ufffd!", ""]
    for line in lines:
        line.encode("utf-8")


def test_invalid_utf_8(cloud: GoogleCloud, log: CloudLogReader) -> None:
    entry = b'{"timestamp": "2023-11-14T22:13:20Z", "insertId": "1", "textPayload": "caf\xe9 \x01 \x00"}'
    cloud.faults.add(Fault(LIST, Say(b'{"entries": [' + entry + b"]}")))
    assert texts(log.read_new()) == ["caf\ufffd \\x01 \\x00"]


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ({"jsonPayload": {"message": "a"}}, "a"),
        ({"jsonPayload": {"message": {"b": 1}}}, '{"message": {"b": 1}}'),
        ({"jsonPayload": {"x": "é"}}, '{"x": "é"}'),
        ({"jsonPayload": ["x"]}, "{}"),
        ({"protoPayload": {"@type": "t"}}, '{"@type": "t"}'),
        ({"textPayload": ""}, ""),
        ({"textPayload": 5}, "{}"),
    ],
)
def test_payloads(raw: dict[str, Any], text: str) -> None:
    found = parse_entry({"receiveTimestamp": "2023-11-14T22:13:20.5Z", **raw})
    assert found
    assert (found.text, found.time, found.severity, found.replica) == (text, 1_700_000_000_500_000_000, "DEFAULT", "")


@pytest.mark.parametrize(
    ("text", "time"),
    [
        ("2023-11-14T22:13:20Z", 1_700_000_000_000_000_000),
        ("2023-11-14T22:13:20.000000001Z", 1_700_000_000_000_000_001),
        ("2023-11-14T23:13:20.123456789+01:00", 1_700_000_000_123_456_789),
        ("2023-13-14T22:13:20Z", None),
        ("yesterday", None),
        (5, None),
        (None, None),
    ],
)
def test_times(text: Any, time: int | None) -> None:
    assert parse_rfc3339(text) == time
    if time is not None:
        assert parse_rfc3339(nanoseconds_text(time)) == time


@dataclass(frozen=True)
class Say:
    """An answer of the test's own."""

    body: bytes
    status: int = 200
    step: ClassVar[Step | None] = None

    def __call__(self, call: Call, serve: Serve) -> Response:
        return Response(self.body, self.status, {"Content-Type": "application/json"})
