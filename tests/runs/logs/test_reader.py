"""The lines of a job from wherever they may be read, and what is made of them for a terminal."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch_train import runfolder
from launch_train.common.errors import OutputError
from launch_train.common.storage import LocalFolder
from launch_train.common.storage import UnreachableError as AwayError
from launcher.clock import Clock
from launcher.errors import LaunchError, NotAuthorised, UnreachableError
from launcher.jobs.job import Job
from launcher.runs.logs import folder_logs
from launcher.runs.logs.folder_logs import decode_line
from launcher.runs.logs.line import clean_text, split_lines
from launcher.runs.logs.reader import Line, LogReader
from launcher.testing.googlecloud import FakeClock, Fault, GoogleCloud, Reset, Status

LIST = "logging.entries.list"
BEGAN = 1_700_000_000.0
JOB = Job(name="projects/1/locations/us-central1/customJobs/7", region="us-central1", state="RUNNING", created=BEGAN)
DENIED = Status(403, message="Permission denied for all log views", info="IAM_PERMISSION_DENIED")
DISABLED = Status(403, message="Cloud Logging API has not been used in project", info="SERVICE_DISABLED")


class Said(list[str]):
    def __call__(self, text: str) -> None:
        self.append(text)


@pytest.fixture
def said() -> Said:
    return Said()


@pytest.fixture
def folder(tmp_path: Path) -> LocalFolder:
    return LocalFolder(tmp_path / "run")


def open_lines(
    cloud: GoogleCloud,
    said: Said,
    folder: LocalFolder | None = None,
    *,
    attempt: int | None = 1,
    since: float | None = None,
    tail: int | None = None,
) -> LogReader:
    ours = FakeClock(5.0)
    clock = Clock(ours, ours.advance)
    options = {"folder": folder, "attempt": attempt, "clock": clock, "since": since, "tail": tail}
    return LogReader(JOB, "my-project", cloud.environ(), say=said, **options)  # type: ignore[arg-type]  # options of LogReader


def part(folder: LocalFolder, number: int, data: bytes, *, attempt: int = 1, node: int = 0) -> None:
    folder.write(runfolder.text_part(attempt, node, number), data, create=True)


def texts(lines: list[Line]) -> list[str]:
    return [line.text for line in lines]


def test_cloud_logging_is_enough(cloud: GoogleCloud, said: Said, folder: LocalFolder) -> None:
    part(folder, 0, b"not this\n")
    cloud.logs.write("7", "workerpool0-0", "a")
    lines = open_lines(cloud, said, folder)
    assert texts(lines.read_new()) == ["a"]
    assert lines.read_new() == []
    assert said == []


@pytest.mark.parametrize(
    ("effect", "hint"),
    [
        (DENIED, "--role=roles/logging.viewer"),
        (DISABLED, "gcloud services enable logging.googleapis.com --project=my-project"),
        (Status(404), "Not Found"),
    ],
)
def test_a_denied_source_is_reported_once(
    cloud: GoogleCloud, said: Said, folder: LocalFolder, effect: Status, hint: str
) -> None:
    cloud.faults.add(Fault(LIST, effect, times=None))
    part(folder, 0, b"a\nb\n")
    lines = open_lines(cloud, said, folder)
    assert lines.read_new() == [Line(0.0, "workerpool0-0", text, "DEFAULT") for text in ("a", "b")]
    asked = len(cloud.requests)
    part(folder, 1, b"c\n")
    assert texts(lines.read_new()) == ["c"]
    assert lines.read_new() == []
    assert len(cloud.requests) == asked
    [told] = said
    assert hint in told
    assert told.endswith("reading the run folder instead")


def test_closed_and_no_folder(cloud: GoogleCloud, said: Said) -> None:
    cloud.faults.add(Fault(LIST, DENIED, times=None))
    lines = open_lines(cloud, said)
    assert lines.read_new() == lines.read_new() == list(lines.read_existing()) == []
    assert len(said) == 1
    assert said[0].endswith("log lines are not available")


@pytest.mark.parametrize("effect", [Reset(), Status(503), Status(429), Status(401), Status(400)])
def test_trouble_that_passes_or_is_ours_is_no_reason_to_turn(
    cloud: GoogleCloud, said: Said, folder: LocalFolder, effect: Status | Reset
) -> None:
    part(folder, 0, b"not this\n")
    cloud.logs.write("7", "workerpool0-0", "a")
    cloud.faults.add(Fault(LIST, effect))
    lines = open_lines(cloud, said, folder)
    with pytest.raises(LaunchError):
        lines.read_new()
    assert texts(lines.read_new()) == ["a"]
    assert said == []


def test_a_permission_that_is_taken_away_shows_nothing_twice(
    cloud: GoogleCloud, said: Said, folder: LocalFolder
) -> None:
    cloud.logs.write("7", "workerpool0-0", "a")
    part(folder, 0, b"a\n")
    lines = open_lines(cloud, said, folder)
    assert texts(lines.read_new()) == ["a"]
    cloud.logs.denied = True
    assert lines.read_new() == []
    part(folder, 1, b"b\n")
    assert texts(lines.read_new()) == ["b"]


def test_a_token_that_is_renewed(said: Said, clock: FakeClock) -> None:
    with GoogleCloud(clock=clock, tokens={"new"}) as cloud:
        cloud.let_in("old")
        lines = open_lines(cloud, said)
        cloud.logs.write("7", "workerpool0-0", "a")
        assert texts(lines.read_new()) == ["a"]
        cloud.tokens = {"new"}
        with pytest.raises(NotAuthorised, match="was rejected, and the file has no newer one"):
            lines.read_new()
        cloud.let_in("new")
        cloud.logs.write("7", "workerpool0-0", "b")
        assert texts(lines.read_new()) == ["b"]
    assert said == []


def test_no_credentials(cloud: GoogleCloud, said: Said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "none.json"))
    with pytest.raises(NotAuthorised, match="no credentials for Cloud Logging"):
        LogReader(JOB, "my-project", {}, say=said)


def test_past_and_what_follows(cloud: GoogleCloud, said: Said) -> None:
    for text in "abc":
        cloud.logs.write("7", "workerpool0-0", text)
    lines = open_lines(cloud, said, tail=2)
    assert texts(list(lines.read_existing())) == ["b", "c"]
    assert lines.read_new() == []
    cloud.logs.write("7", "workerpool0-0", "d")
    assert texts(lines.read_new()) == ["d"]
    assert texts(open_lines(cloud, said, tail=1).read_new()) == ["d"]
    assert texts(list(open_lines(cloud, said, since=BEGAN - 9).read_existing())) == list("abcd")
    assert list(open_lines(cloud, said, since=BEGAN + 9).read_existing()) == []


def test_read_existing_also_falls_back_to_the_run_folder(cloud: GoogleCloud, said: Said, folder: LocalFolder) -> None:
    cloud.logs.denied = True
    for number in range(20):
        part(folder, number, b"%d\n" % number)
    assert texts(list(open_lines(cloud, said, folder).read_existing())) == list(map(str, range(20)))
    lines = open_lines(cloud, said, folder, tail=2)
    assert texts(list(lines.read_existing())) == ["18", "19"]
    part(folder, 20, b"20\n")
    assert texts(lines.read_new()) == ["20"]
    assert texts(open_lines(cloud, said, folder, tail=0).read_new()) == []
    assert len(said) == 3


def test_parts_of_several_nodes_and_attempts(cloud: GoogleCloud, said: Said, folder: LocalFolder) -> None:
    cloud.logs.denied = True
    part(folder, 0, b"old\n", attempt=1)
    part(folder, 0, b"one li", attempt=2)
    part(folder, 0, b"other\r\n", attempt=2, node=1)
    part(folder, 0, b"third\n", attempt=2, node=2)
    part(folder, 1, b"ne\n\ncaf\xe9 \x1b[1mbold\x1b[0m\n", attempt=2)
    folder.write("text/0002-0000-000000-1.log", b"variant\n")
    folder.write("text/0002-notes", b"?")
    lines = open_lines(cloud, said, folder, attempt=2)
    assert [(line.replica, line.text) for line in lines.read_new()] == [
        ("workerpool1-0", "other"),
        ("workerpool1-1", "third"),
        ("workerpool0-0", "one livariant"),
        ("workerpool0-0", "ne"),
        ("workerpool0-0", ""),
        ("workerpool0-0", "caf\ufffd bold"),
    ]
    assert "old" in texts(open_lines(cloud, said, folder, attempt=None).read_new())


def test_a_line_without_an_end_is_shown_when_nothing_follows(
    cloud: GoogleCloud, said: Said, folder: LocalFolder
) -> None:
    cloud.logs.denied = True
    part(folder, 0, b"Password: ")
    lines = open_lines(cloud, said, folder)
    assert [texts(lines.read_new()) for _ in range(3)] == [[], ["Password: "], []]


def test_one_poll_reads_a_bounded_amount(cloud: GoogleCloud, said: Said, folder: LocalFolder) -> None:
    cloud.logs.denied = True
    for number in range(20):
        part(folder, number, b"%d\n" % number)
    lines = open_lines(cloud, said, folder)
    assert [len(lines.read_new()) for _ in range(4)] == [
        folder_logs.PARTS_PER_POLL,
        folder_logs.PARTS_PER_POLL,
        20 - 2 * folder_logs.PARTS_PER_POLL,
        0,
    ]


class Broken(LocalFolder):
    """Fails as it is told."""

    error: OutputError | None = None

    def within(self, seconds: float) -> Broken:
        return self

    def read(self, name: str) -> bytes:
        if self.error:
            raise self.error
        return super().read(name)


@pytest.mark.parametrize(
    ("error", "kind"), [(AwayError("away"), UnreachableError), (OutputError("forbidden"), LaunchError)]
)
def test_a_run_folder_in_trouble(
    cloud: GoogleCloud, said: Said, tmp_path: Path, error: OutputError, kind: type[LaunchError]
) -> None:
    cloud.logs.denied = True
    folder = Broken(tmp_path)
    part(folder, 0, b"a\n")
    folder.error = error
    lines = open_lines(cloud, said, folder)
    for _ in range(2):
        with pytest.raises(LaunchError) as raised:
            lines.read_new()
        assert type(raised.value) is kind
    folder.error = None
    assert texts(lines.read_new()) == ["a"], "a look that failed has lost nothing"
    assert len(said) == 1


@given(st.text(st.characters(codec=None)))
def test_any_text_is_fit_for_a_terminal(text: str) -> None:
    shown = clean_text(text)
    shown.encode("utf-8")
    assert not any((char < " " and char != "\t") or "\x7f" <= char <= "\x9f" for char in shown)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain é 漢 🙂", "plain é 漢 🙂"),
        ("\x1b[38;5;1mred\x1b[m", "red"),
        ("\x1b[2J\x1b]0;evil\x07", "\\x1b[2J\\x1b]0;evil\\x07"),
        ("10%\r20%", "10%\\r20%"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("a\tb\x00\x9b", "a\tb\\x00\\x9b"),
    ],
)
def test_control_characters(text: str, shown: str) -> None:
    assert clean_text(text) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("10%\r20%\r30%\r\n", "30%"),
        ("10%\r20%", "20%"),
        ("windows\r\n", "windows"),
        ("\r", ""),
        ("no\r\x1b[2J", "\\x1b[2J"),
    ],
)
def test_a_progress_bar_is_its_last_state(text: str, shown: str) -> None:
    assert list(split_lines(text)) == [shown]
    assert decode_line(0, text.removesuffix("\n").encode()).text == shown
