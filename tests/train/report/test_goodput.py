"""The parts of a run's time: each second once, whatever the clocks and records say."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch_train.common.storage import LocalFolder
from launch_train.report import page
from launch_train.report.goodput import PARTS, attempt_times, goodput, total_usd
from launch_train.runfolder.run import AttemptRecord, RunData
from launch_train.runfolder.starts import Columns, Start
from launcher.diagnosis import Diagnosis
from launcher.runs.ledger import Ledger
from tests.train.report.folders import PLACE, T, preempted, read, rows, write


def test_a_preempted_run(tmp_path: Path) -> None:
    first, second = attempt_times(read(preempted(tmp_path)), T + 1000)
    assert first.parts["queue"] == pytest.approx(100)
    assert first.parts["startup"] == pytest.approx(60)  # to the beginning of the first step
    assert first.parts["train"] == pytest.approx(25)
    assert first.parts["lost"] == pytest.approx(5)
    assert first.paid == pytest.approx(100)
    assert second.parts["queue"] == pytest.approx(50)
    assert second.parts["startup"] == pytest.approx(70)
    assert second.parts["train"] == pytest.approx(30)
    assert second.parts["lost"] == 0
    assert second.parts["evaluate"] == pytest.approx(5)
    assert second.paid == pytest.approx(110)
    assert goodput((first, second)) == pytest.approx(55 / 210)
    assert total_usd((first, second)) == pytest.approx(210 / 3600 * 3.6)


def test_a_restart_within_an_attempt(tmp_path: Path) -> None:
    parts = {
        "attempts/0001.json": {"time": T},
        "metrics/0001-0000-0000-000000.jsonl": [{"event": "start", "time": T + 1}, *rows(range(1, 11), T + 10)],
        "metrics/0001-0001-0000-000000.jsonl": [
            {"event": "start", "time": T + 30},
            {"event": "resumed", "step": 8, "time": T + 31},
            *rows(range(9, 13), T + 40),
        ],
    }
    (one,) = attempt_times(read(write(tmp_path, parts)), T + 99)
    assert one.parts["restart"] == pytest.approx(20)
    assert one.parts["lost"] == pytest.approx(2)
    assert one.parts["train"] == pytest.approx(12)
    assert one.usd is None


def test_samples_are_part_of_their_evaluation(tmp_path: Path) -> None:
    found = [{"event": "eval", "step": 2, "loss": 1.0, "time": T + 5}, {"event": "samples", "step": 2, "time": T + 9}]
    parts = {"metrics/0001-0000-0000-000000.jsonl": [*rows([1, 2], T), *found, *rows([3], T + 9)]}
    (one,) = attempt_times(read(write(tmp_path, parts)), T + 99)
    assert one.parts["evaluate"] == pytest.approx(7)
    assert one.parts["other"] == 0


def test_what_a_save_costs_is_not_other(tmp_path: Path) -> None:
    saves = [{"event": "checkpoint", "step": 2, "time": T + 3, "blocked": 0.5}]
    late = rows([3], T + 3)
    parts = {"metrics/0001-0000-0000-000000.jsonl": [*rows([1, 2], T), *saves, *late]}
    (one,) = attempt_times(read(write(tmp_path, parts)), T + 99)
    assert one.parts["checkpoint"] == pytest.approx(0.5)
    assert one.parts["other"] == pytest.approx(0.5)


TIMES = st.one_of(st.just(float("nan")), st.floats(T - 50, T + 500))
STARTS = st.lists(st.lists(st.tuples(st.integers(1, 40), TIMES, st.floats(0, 30)), max_size=12), min_size=0, max_size=4)
ENDS = st.fixed_dictionaries({}, optional={"time": TIMES, "billed": st.floats(0, 900), "waited": st.floats(0, 900)})


@given(STARTS, ENDS, st.booleans())
def test_the_parts_add_up_to_the_paid_time(
    starts: list[list[tuple[int, float, float]]], end: dict[str, float], begun: bool
) -> None:
    made = []
    for number, each in enumerate(starts):
        columns = Columns()
        for step, time, seconds in each:
            columns.add({"step": step, "time": time, "step_s": seconds})
        columns.close()
        made.append(Start((1, number), columns, [{"event": "eval", "time": time} for _, time, _ in each[:2]]))
    attempt = AttemptRecord(1, {"time": T} if begun else {}, end)
    for one in attempt_times(RunData(tuple(made), attempts=(attempt,)), T + 50):
        assert all(seconds >= 0 for seconds in one.parts.values())
        assert one.paid == pytest.approx(sum(one.parts[part] for part in PARTS))
        spans = [span for span in one.spans if span.part != "queue"]
        assert all(span.end > span.begin for span in spans)
        length = sum(span.end - span.begin for span in spans)
        assert length <= max(one.paid, 1e-6) * 1.01 + 1e-3


def test_the_end_that_a_launcher_records(tmp_path: Path) -> None:
    """Noticed five hours late, on two nodes: what was billed and waited counts, not when it was noticed."""
    ledger = Ledger(LocalFolder(tmp_path))
    placement = {"region": "us-central1", "provisioning": "spot", "machine_type": "g2-standard-24", "usd_per_hour": 3.6}
    parts = {
        "plan.json": {"run": "a", "machine": {"nodes": 2}, "attempts": [placement]},
        "attempts/0001.json": {**PLACE, "time": T},
        "metrics/0001-0000-0000-000000.jsonl": [
            {"event": "start", "time": T + 700},
            *rows(range(1, 11), T + 800, 100.0),
        ],
    }
    write(tmp_path, parts)
    done = Diagnosis(kind="succeeded", scope="permanent", cause="")
    ledger.note_end(1, done, "SUCCEEDED", billed=3600.0, waited=600.0)
    (one,) = attempt_times(read(tmp_path), T + 99_999)
    assert one.parts["queue"] == pytest.approx(600)
    assert one.parts["startup"] == pytest.approx(200)
    assert one.parts["train"] == pytest.approx(1000)
    assert one.paid == pytest.approx(3600)
    assert one.usd == pytest.approx(7.2)
    assert "succeeded" in page([read(tmp_path)])


def test_the_time_before_a_scripts_first_row_is_its_start(tmp_path: Path) -> None:
    """Its rows don't say how long a step took."""
    times = [{"step": step, "loss": 1.0, "time": T + 1800 + 10 * step} for step in range(1, 4)]
    parts = {"attempts/0001.json": {"time": T}, "attempts/0001.end.json": {"time": T + 1830, "seconds": 1830}}
    (one,) = attempt_times(read(write(tmp_path, {**parts, "metrics/0001-0000-0000-000000.jsonl": times})), T)
    assert one.parts["startup"] == pytest.approx(1810)
    assert one.parts["train"] == pytest.approx(20)


def test_an_interrupted_local_attempt_started_at_once_and_was_not_queued(tmp_path: Path) -> None:
    parts = {
        "plan.json": {"run": "a", "target": "local"},
        "attempts/0001.json": {"time": T},
        "metrics/0001-0000-0000-000000.jsonl": [{"event": "start", "time": T + 9}, *rows([1, 2], T + 10)],
    }
    (attempt,) = attempt_times(read(write(tmp_path, parts)), T + 99)
    assert attempt.parts["queue"] == 0
    assert attempt.parts["startup"] == pytest.approx(10)
    assert attempt.paid == pytest.approx(12)
