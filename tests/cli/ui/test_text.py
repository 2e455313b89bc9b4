"""Times, columns, and the durations of flags."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from launch_train.common.text import elapsed
from launcher.cli.options import flag_seconds
from launcher.cli.ui.text import columns, local_moment
from launcher.errors import UsageError


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (42.4, "42 s"),
        (200, "3 min 20 s"),
        (3599.6, "1 h 0 min"),
        (18_600, "5 h 10 min"),
        (172_799, "2 d 0 h"),
        (4e5, "4 d 15 h"),
    ],
)
def test_elapsed_time(seconds: float, text: str) -> None:
    assert elapsed(seconds) == text


@pytest.mark.parametrize(("text", "seconds"), [("15s", 15), ("2m", 120), ("1h", 3600)])
def test_a_flag_takes_the_durations_of_the_spec(text: str, seconds: float) -> None:
    assert flag_seconds(text, "--lease") == seconds


@pytest.mark.parametrize("text", ["15", "", "0s", "-1s", "1.5s", "15 s", "s", "\u0663s", "99999999s"])
def test_other_durations_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--lease"):
        flag_seconds(text, "--lease")


@pytest.fixture
def _utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("_utc")
def test_times_of_day() -> None:
    now = 1_700_000_000.0  # Tuesday 14 November 2023, 22:13
    assert [local_moment(now + days * 86_400, now) for days in (0, 1, 6, 7, -1, -7)] == [
        "22:13",
        "Wed 22:13",
        "Mon 22:13",
        "21 Nov 22:13",
        "Mon 22:13",
        "7 Nov 22:13",
    ]


def test_columns() -> None:
    rows = [("A", "LONG"), ("abc", "d")]
    assert list(columns(rows)) == ["A    LONG", "abc  d"]
    assert list(columns(rows, ">")) == ["  A  LONG", "abc     d"]
