"""Reading a run's metrics."""

from __future__ import annotations

from launcher.results import results


def test_the_newest_attempt_and_generation_of_each_step_wins() -> None:
    found = results(
        {
            "metrics/0002-0000-0000-000001.jsonl": b'{"step": 2, "loss": 1.0}\n{"step": 3, "loss": 0.5}\n',
            "metrics/0001-0000-0000-000001.jsonl": b'{"step": 1, "loss": 3.0}\n{"step": 2, "loss": 2.0}\n',
            "metrics/0001-0001-0000-000001.jsonl": b'{"step": 2, "loss": 9.0}\n',
        }
    )
    assert [(row["step"], row["loss"]) for row in found.rows] == [(1, 3.0), (2, 1.0), (3, 0.5)]


def test_events_are_those_of_the_newest_start() -> None:
    found = results(
        {
            "metrics/0001-0000-0000-000001.jsonl": b'{"event": "start", "n": 1}\n{"event": "end", "n": 1}\n',
            "metrics/0002-0000-0000-000001.jsonl": b'{"event": "start", "n": 2}\n',
        }
    )
    assert found.event("start") == {"event": "start", "n": 2}
    assert found.event("end") is None


def test_a_line_cut_off_by_a_crash_is_passed_over() -> None:
    found = results({"metrics/0001-0000-0000-000001.jsonl": b'{"step": 1, "loss": 1.0}\n[1]\n{"step": 2, "lo'})
    assert [row["step"] for row in found.rows] == [1]
