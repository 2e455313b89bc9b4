"""How a run went: attempts from its folder and from its job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from launch_train.common.storage import LocalFolder
from launch_train.runfolder.run import RunData, read_run
from launcher.cli.ui.story_text import attempt_text, cost_text, resumed_text
from launcher.jobs.job import Job
from launcher.runs.cloud import open_cloud
from launcher.runs.run_story import story_of_job
from launcher.runs.story import AttemptSummary, Resumed, cap_usd, summarize_attempts, total_usd
from tests.train.report.folders import PLACE, T, preempted, rows, write


def read(folder: Path) -> RunData:
    return read_run(LocalFolder(folder), ends_only=True)


def test_a_preempted_run_that_finished(tmp_path: Path) -> None:
    found = summarize_attempts(read(preempted(tmp_path)), T + 1000)
    first, second = found
    assert (first.kind, first.reached, first.resumed, first.place) == ("preempted", 30, None, "spot in us-central1")
    assert [first.waited, first.ran, first.usd] == pytest.approx([100, 100, 0.1])
    assert (second.resumed, second.kind, second.reached) == (
        Resumed(stopped_at=30, resumed_from=25, was_preempted=True),
        "succeeded",
        50,
    )
    assert second.lost_usd == pytest.approx(5 / 3600 * 3.6)
    assert total_usd(found) == pytest.approx(0.21)
    assert attempt_text(first) == (
        "Queued 1 min 40 s, ran 1 min 40 s on g2-standard-24 (spot in us-central1), preempted at step 30"
    )
    assert attempt_text(second).startswith("Queued 50 s, resumed from step 25 (5 steps lost), ran 1 min 50 s")
    assert (
        resumed_text(Resumed(stopped_at=4200, resumed_from=4000), 1.3)
        == "resumed from step 4,000 (200 steps lost, ≈$1.30)"
    )
    assert cost_text(found, 3.0) == "≈$0.21 of at most $3.00"


def test_an_attempt_that_runs_or_waits(tmp_path: Path) -> None:
    folder = preempted(tmp_path)
    (folder / "attempts" / "0002.verdict.json").unlink()
    run = read(folder)
    live = AttemptSummary(number=2, machine="", place="", state="running", waited=100, ran=600)
    second = summarize_attempts(run, T + 1000, live)[1]
    assert second.state == "running"
    assert [second.waited, second.ran, second.usd] == pytest.approx([100, 600, 0.6])
    assert "running for 10 min 0 s on g2-standard-24" in attempt_text(second)
    assert cost_text((second,), None) == "≈$0.60 so far"
    third = summarize_attempts(run, T + 1000, AttemptSummary(number=3, machine="", place="", state="waiting"))[2]
    assert (third.state, third.ran) == ("waiting", 0)
    assert attempt_text(third).startswith("Waiting for ")
    assert summarize_attempts(run, T + 1000)[1].state == "interrupted"  # a local run without a process
    refused = AttemptSummary(
        number=4, machine="m", place="spot in x", state="ended", kind="stockout", cause="no capacity"
    )
    assert attempt_text(refused) == "Refused (spot in x): no capacity"
    requested = replace(refused, state="interrupted", kind="")
    assert attempt_text(requested) == "Requested (spot in x), no job is recorded"


def test_restarts_and_refusals(tmp_path: Path) -> None:
    end = {"state": None, "kind": "stockout", "cause": "no capacity", "fix": "", "time": T + 20}
    parts = {
        "plan.json": {"run": "r", "machine": {"nodes": 2}, "limits": {"usd": None, "usd_at_most": 12.5}},
        "attempts/0001.json": {**PLACE, "time": T},
        "attempts/0001.verdict.json": end,
        "attempts/0002.json": {**PLACE, "time": T + 30},
        "metrics/0002-0000-0000-000000.jsonl": [{"event": "start", "time": T + 40}, *rows(range(1, 11), T + 50)],
        "metrics/0002-0000-0000-000001.jsonl": rows(range(11, 21), T + 60),
        **{f"metrics/0002-0000-0000-00000{n}.jsonl": rows([19 + n], T + 63 + n) for n in range(2, 7)},
        "metrics/0002-0000-0000-000007.jsonl": rows(range(26, 31), T + 75),
        "metrics/0002-0001-0000-000000.jsonl": [{"event": "resumed", "step": 25, "time": T + 90}],
    }
    run = read(write(tmp_path, parts))
    assert [*run.starts[0].rows.steps] == [*range(1, 11), *range(22, 31)]  # the part between is not read
    first, second = summarize_attempts(run, T + 100)
    assert (first.ran, first.waited, attempt_text(first)[-20:]) == (0, 20, "refused: no capacity")
    assert (second.restarts, second.resumed) == ((Resumed(stopped_at=30, resumed_from=25),), None)
    assert "2 × g2-standard-24" in attempt_text(second)
    assert "restarted at step 30, resumed from step 25 (5 steps lost)" in attempt_text(second)
    assert total_usd((first, second)) is None  # no price is known
    assert cost_text((first, second), cap_usd(run.plan)) == "price unknown of at most $12.50"


def test_odd_folders(tmp_path: Path) -> None:
    folders: tuple[dict[str, Any], ...] = (
        {},
        {"plan.json": {"limits": [], "machine": None}},
        {"attempts/0001.json": {"time": "x"}},
    )
    for parts in folders:
        found = summarize_attempts(read(write(tmp_path / str(len(parts)), parts)), T)
        assert (len(found), cap_usd({"limits": None})) == (len(parts) if "attempts/0001.json" in parts else 0, None)
        assert all(map(attempt_text, found))


@pytest.mark.parametrize(
    ("state", "text", "advice"),
    [
        ("PENDING", "Waiting for ", "launch cancel job"),
        ("RUNNING", "running for", ""),
        ("SUCCEEDED", "succeeded", "launch report job"),
        ("FAILED", "it failed", "if it has one: launch vertex SPEC --resume job"),
        ("EXPIRED", "time limit", "if it has one: launch vertex SPEC --resume job --hours HOURS"),
        ("CANCELLED", "(standard in us-central1), cancelled", "--resume"),
        ("DELETED", "was deleted", "--resume"),
    ],
)
def test_a_job_without_a_folder(state: str, text: str, advice: str) -> None:
    """A run without `output` has its job alone."""
    name = "projects/my-project/locations/us-central1/customJobs/7"
    started = None if state == "PENDING" else T + 100.0
    ended = None if state in ("PENDING", "RUNNING") else T + 900.0
    labels = {"launch-run": "job"}
    job = Job(
        name=name, region="us-central1", state=state, created=T - 500, started=started, ended=ended, labels=labels
    )
    story = story_of_job(open_cloud("my-project"), None, "job", job, (), None, T + 1000)
    (one,) = story.chapters
    assert text in attempt_text(one)
    assert advice in story.advice if advice else not story.advice
