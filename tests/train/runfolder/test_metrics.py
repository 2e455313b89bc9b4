"""Reading a run's metrics."""

from __future__ import annotations

import json
from typing import Any

import pytest

from launch_train.runfolder.starts import Resumption, RunMetrics, parse_metrics


def rows(first: int, last: int, loss: float = 0.0) -> list[dict[str, Any]]:
    """The rows of the steps from `first` to `last`."""
    return [{"step": step, "loss": loss} for step in range(first, last + 1)]


def event(kind: str, **more: Any) -> dict[str, Any]:
    return {"event": kind, **more}


def read(*starts: tuple[str, list[dict[str, Any]]]) -> RunMetrics:
    """RunMetrics of starts: `<attempt>-<generation>`, and its records."""
    parts = {}
    for start, records in starts:
        attempt, generation = map(int, start.split("-"))
        name = f"metrics/{attempt:04d}-{generation:04d}-0000-000001.jsonl"
        parts[name] = "".join(f"{json.dumps(record)}\n" for record in records).encode()
    return parse_metrics(parts)


def losses(found: RunMetrics) -> dict[int, float]:
    assert [row["step"] for row in found.rows] == sorted({row["step"] for row in found.rows})
    return {row["step"]: row["loss"] for row in found.rows}


def test_the_newest_attempt_and_generation_of_each_step_wins() -> None:
    found = parse_metrics(
        {
            "metrics/0002-0000-0000-000001.jsonl": b'{"step": 2, "loss": 1.0}\n{"step": 3, "loss": 0.5}\n',
            "metrics/0001-0000-0000-000001.jsonl": b'{"step": 1, "loss": 3.0}\n{"step": 2, "loss": 2.0}\n',
            "metrics/0001-0001-0000-000001.jsonl": b'{"step": 2, "loss": 9.0}\n',
        }
    )
    assert losses(found) == {1: 3.0, 2: 1.0, 3: 0.5}


def test_numbers_count_as_numbers() -> None:
    """The ten-thousandth generation is newer than the second, though its name sorts before it."""
    found = read(("1-10000", rows(1, 1, 2.0)), ("1-2", rows(1, 1, 1.0)))
    assert losses(found) == {1: 2.0}


def test_a_part_whose_name_was_taken_is_read_behind_the_one_that_has_it() -> None:
    order = ("000000", "000000-2", "000000-10", "000001")
    for upto in range(1, len(order) + 1):
        parts = {
            f"metrics/0001-0000-0000-{number}.jsonl": b'{"step": 1, "loss": %d}\n{"step": %d, "loss": 0}\n' % (n, n + 2)
            for n, number in reversed(list(enumerate(order[:upto])))
        }
        assert losses(parse_metrics(parts)) == {1: upto - 1, **dict.fromkeys(range(2, upto + 2), 0)}


def test_other_names_are_passed_over() -> None:
    assert parse_metrics({"metrics/readme.jsonl": b'{"step": 1, "loss": 1.0}\n'}).rows == ()


def test_a_line_that_no_parser_can_read_is_passed_over() -> None:
    text = b"[" * 200_000 + b'\n{"step": 1, "loss": 1.0}\n{"step": 2'
    assert losses(parse_metrics({"metrics/0001-0000-0000-000001.jsonl": text})) == {1: 1.0}


@pytest.mark.parametrize(
    ("newer", "expected"),
    [
        ([event("start")], {1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0, 5: 1.0}),  # it may yet say that it goes on
        ([event("start"), event("resumed", step=3)], {1: 1.0, 2: 1.0, 3: 1.0}),
        ([event("start"), event("resumed", step=3), *rows(4, 4, 2.0)], {1: 1.0, 2: 1.0, 3: 1.0, 4: 2.0}),
        ([event("start"), event("resumed", step=5)], {1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0, 5: 1.0}),
        ([event("start"), *rows(1, 2, 2.0)], {1: 2.0, 2: 2.0}),  # it began from scratch
        (rows(4, 6, 2.0), {1: 1.0, 2: 1.0, 3: 1.0, 4: 2.0, 5: 2.0, 6: 2.0}),  # a script without events
        (rows(3, 3, 2.0), {1: 1.0, 2: 1.0, 3: 2.0}),
    ],
)
def test_what_lies_beyond_the_state_that_a_start_went_on_from_is_history(
    newer: list[dict[str, Any]], expected: dict[int, float]
) -> None:
    older = ("1-0", [event("start"), *rows(1, 5, 1.0)])
    assert losses(read(older, ("1-1", newer))) == expected
    assert losses(read(older, ("2-0", newer))) == expected


def test_rows_of_a_start_that_was_overtaken_twice() -> None:
    found = read(
        ("1-0", [event("start"), *rows(1, 9, 1.0)]),
        ("1-1", [event("start"), event("resumed", step=4), *rows(5, 6, 2.0)]),
        ("1-2", [event("start"), event("resumed", step=5), *rows(6, 6, 3.0)]),
    )
    assert losses(found) == {1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0, 5: 2.0, 6: 3.0}


def test_an_event_is_that_of_the_newest_start_and_all_are_kept() -> None:
    found = read(
        ("1-0", [event("start", n=1), event("preempted", step=3), event("end", n=1)]),
        ("2-0", [event("start", n=2), event("resumed", step=3)]),
    )
    assert found.event("start") == event("start", n=2)
    assert found.event("end") is None
    assert found.event("resumed") == event("resumed", step=3)
    assert [one["event"] for one in found.events] == ["start", "preempted", "end", "start", "resumed"]


def test_a_line_cut_off_by_a_crash_is_passed_over() -> None:
    found = parse_metrics({"metrics/0001-0000-0000-000001.jsonl": b'{"step": 1, "loss": 1.0}\n[1]\n{"step": 2, "lo'})
    assert [row["step"] for row in found.rows] == [1]


FIRST = ("1-0", [event("start"), *rows(1, 7), event("preempted", step=7)])
KILLED = ("1-0", [event("start"), *rows(1, 7)])


@pytest.mark.parametrize(
    ("starts", "stopped", "resumed", "lost"),
    [
        ([FIRST, ("1-1", [event("start"), event("resumed", step=7), *rows(8, 9)])], 7, 7, 0),
        ([FIRST, ("1-1", [event("start"), event("resumed", step=5), *rows(6, 9)])], 7, 5, 2),
        ([FIRST, ("1-1", [event("start"), *rows(1, 9)])], 7, 0, 7),
        ([FIRST, ("1-1", [event("start")])], 7, None, None),
        ([FIRST], 7, None, None),
        ([KILLED, ("1-1", [event("start"), event("resumed", step=4), *rows(5, 9)])], 7, 4, 3),
        ([KILLED, ("1-1", rows(1, 9))], 7, 0, 7),
        ([KILLED], None, None, None),
        ([("1-0", [event("start")]), ("1-1", rows(1, 9))], None, 0, None),
        ([], None, None, None),
        # a process failed before the preemption, and another after it
        (
            [
                ("1-0", rows(1, 3)),
                ("1-1", [event("resumed", step=2), *rows(3, 7), event("preempted", step=7)]),
                ("1-2", [event("resumed", step=7), *rows(8, 9)]),
                ("1-3", [event("resumed", step=8), *rows(9, 9)]),
            ],
            7,
            7,
            0,
        ),
    ],
)
def test_how_an_attempt_went_on(
    starts: list[tuple[str, list[dict[str, Any]]]], stopped: int | None, resumed: int | None, lost: int | None
) -> None:
    found = read(("2-0", rows(1, 99)), *starts).resumption(1)
    assert found == Resumption(stopped_at=stopped, resumed_from=resumed)
    assert found.lost == lost
