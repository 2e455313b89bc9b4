"""`--preempt-after`: what is said, and that the job is started again as it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launch_train.runfolder.starts import Resumption
from launcher.cli.ui.streams import say
from launcher.services.local.preemption import Preempted, ReplicaExits, run
from launcher.services.local.supervisor import Ended, Preemption
from tests.command import launch

UNKNOWN = Resumption(stopped_at=None, resumed_from=None)


class Platform:
    """Starts a job, which ends each time as told; a start with a preemption is preempted if it says how long."""

    def __init__(self, *endings: Ended) -> None:
        self.endings = list(endings)
        self.preemptions: list[float | None] = []

    def start(self, preemption: Preemption | None) -> Ended:
        self.preemptions.append(preemption.after if preemption else None)
        ended = self.endings.pop(0)
        if preemption and ended.preempted is not None:
            preemption.begins()
        return ended


def test_a_preempted_job_is_restarted(capsys: pytest.CaptureFixture[str]) -> None:
    platform = Platform(Ended({"a": 75, "b": 75}, 2.34), Ended({"a": 0, "b": 0}))
    assert run(platform.start, 15, say) == ReplicaExits(exit_codes={"a": 0, "b": 0}, preempted={"a": 75, "b": 75})
    assert platform.preemptions == [15, None]
    assert capsys.readouterr().err.splitlines() == [
        "launch: preempting the job (SIGTERM, then SIGKILL after 30 s)",
        "launch: all processes exited after 2.3 s: a, b exited with 75 (checkpoint saved)",
        "launch: restarting",
    ]


def test_a_job_preempted_before_a_checkpoint_is_restarted(capsys: pytest.CaptureFixture[str]) -> None:
    codes = {"a": -9, "b": 143, "c": 0, "d": -9, "e": -9, "f": -9}
    platform = Platform(Ended(codes, 30.0), Ended({"a": 3}))
    assert run(platform.start, 60, say) == ReplicaExits(exit_codes={"a": 3}, preempted=codes)
    assert (
        "launch: all processes exited after 30.0 s: a, d, e and 1 more killed by signal 9 (no checkpoint saved); "
        "b exited with 143 (no checkpoint saved); c exited with 0 (done)\n"
    ) in capsys.readouterr().err


def test_a_job_that_succeeds_despite_preemption_is_done(capsys: pytest.CaptureFixture[str]) -> None:
    platform = Platform(Ended({"a": 0}, 0.1))
    assert run(platform.start, 15, say) == ReplicaExits(exit_codes={"a": 0}, preempted={"a": 0})
    assert "not restarting" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("codes", "what"),
    [
        ({"a": 0, "b": 0}, "the job ended within 2 h"),
        # the others may have needed longer than that to end
        ({"a": 1, "b": 0}, "a replica failed within 2 h"),
        ({"a": 0, "b": -9}, "a replica failed within 2 h"),
    ],
)
def test_a_job_that_ends_before_the_preemption(
    codes: dict[str, int], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(Platform(Ended(codes)).start, 7200, say) == ReplicaExits(exit_codes=codes)
    assert capsys.readouterr().err == f"launch: {what}; the job was not preempted\n"


@pytest.mark.parametrize("number", [1, 2])
def test_a_job_that_is_stopped_is_not_restarted(number: int) -> None:
    first = Ended({"a": 75}, 2.0, stopped=number == 1)
    platform = Platform(first, Ended({"a": 75}, stopped=True))
    ended = run(platform.start, 15, lambda _: None)
    assert (ended.stopped, ended.exit_codes, len(platform.preemptions)) == (True, {"a": 75}, number)


def test_without_preemption_nothing_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    platform = Platform(Ended({"a": 75}))
    assert run(platform.start, None, say) == ReplicaExits(exit_codes={"a": 75})
    assert (platform.preemptions, capsys.readouterr().err) == ([None], "")


@pytest.mark.parametrize(
    ("resumption", "text"),
    [
        (
            Resumption(stopped_at=152, resumed_from=152),
            "after 15 s at step 152; resumed from step 152; 0 steps lost",
        ),
        (Resumption(stopped_at=152, resumed_from=151), "after 15 s at step 152; resumed from step 151; 1 step lost"),
        (
            Resumption(stopped_at=152, resumed_from=0),
            "after 15 s at step 152; restarted from scratch; 152 steps lost",
        ),
        (Resumption(stopped_at=152, resumed_from=None), "after 15 s at step 152; restarted"),
        (Resumption(stopped_at=None, resumed_from=0), "after 15 s; restarted from scratch"),
        (UNKNOWN, "after 15 s; restarted"),
    ],
)
def test_the_line_of_the_summary(resumption: Resumption, text: str) -> None:
    assert Preempted(after=15, exit_codes={"a": 75}, resumption=resumption).text() == text


def test_the_summary_of_a_job_that_was_already_done() -> None:
    text = Preempted(after=120, exit_codes={"a": 0}, resumption=UNKNOWN).text()
    assert text == "after 2 min; all processes still exited with 0, so the job was not restarted"


SCRIPT = """
import json, os, signal, sys, time
from pathlib import Path
run = Path(os.environ["LAUNCH_RUN_FOLDER"])
spec = json.loads(os.environ["CLUSTER_SPEC"])
with open(run / "starts", "a") as file:
    file.write(json.dumps([os.environ["CLOUD_ML_JOB_ID"], spec["cluster"], sys.argv]) + "\\n")
(run / "metrics").mkdir(exist_ok=True)
first = not (run / "saved").exists()
def log(name, *records):
    (run / "metrics" / f"0001-{name}-0000-000001.jsonl").write_text("".join(json.dumps(one) + "\\n" for one in records))
def save(*_):
    (run / "saved").touch()
    rows = [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 0.5}]
    log("0000", {"event": "start"}, *rows, {"event": "preempted", "step": 2})
    sys.exit(75)
if first:
    signal.signal(signal.SIGTERM, save)
    print("OldError: of the first start", flush=True)
    time.sleep(60)
log("0001", {"event": "start"}, {"event": "resumed", "step": 2}, {"step": 3, "loss": 0.25})
sys.exit(0 if (run / "good").exists() else 7)
"""


def by_hand(folder: Path, output: Path) -> Path:
    env = [{"name": "LAUNCH_RUN_FOLDER", "value": str(output)}]
    container = {"command": ["python", "-c", SCRIPT], "args": ["x"], "env": env}
    body = {"displayName": "by-hand", "jobSpec": {"workerPoolSpecs": [{"containerSpec": container}]}}
    (folder / "request.json").write_text(json.dumps(body))
    return folder / "request.json"


def test_the_same_request_as_the_same_attempt_on_other_ports(tmp_path: Path) -> None:
    output = tmp_path / "out" / "run"
    output.mkdir(parents=True)
    (output / "good").touch()
    ran = launch("local", "--request", by_hand(tmp_path, output), "--preempt-after", "2s")
    assert ran.code == 0, ran.err
    first, second = (json.loads(line) for line in (output / "starts").read_text().splitlines())
    assert (first[0], first[2]) == (second[0], second[2])
    assert first[1] != second[1]
    assert (output / "attempts" / "0001.json").exists()
    assert not (output / "attempts" / "0002.json").exists()
    told = [line for line in ran.err.splitlines() if line.startswith("launch: ") and "image" not in line]
    assert told[0] == "launch: preempting the job (SIGTERM, then SIGKILL after 30 s)"
    assert told[1].endswith("workerpool0-0 exited with 75 (checkpoint saved)")
    assert told[2:] == ["launch: restarting"]
    assert "preempted after 2 s at step 2; resumed from step 2; 0 steps lost\n" in ran.out
    assert "3 steps; last (step 3): loss 0.25" in ran.out


def test_json_has_the_preemption_and_the_end_of_the_second_start(tmp_path: Path) -> None:
    output = tmp_path / "run"
    output.mkdir()
    ran = launch("local", "--request", by_hand(tmp_path, output), "--preempt-after", "2s", "-o", "json")
    assert ran.code == 3
    assert "error: the job failed: workerpool0-0 exited with 7\n" in ran.err
    assert "OldError" in ran.err
    assert "OldError" not in ran.err.rpartition("error: ")[2]  # that was of the start before
    assert json.loads(ran.out)["preemption"] == {
        "after_seconds": 2,
        "exit_codes": {"workerpool0-0": 75},
        "stopped_at_step": 2,
        "resumed_from_step": 2,
        "steps_lost": 0,
    }


def test_a_request_without_a_run_folder(tmp_path: Path) -> None:
    """Nothing to read the steps from: it says less."""
    marker = tmp_path / "marker"
    code = f"import os, time; os.path.exists({str(marker)!r}) or (open({str(marker)!r}, 'w'), time.sleep(60))"
    body: dict[str, Any] = {"jobSpec": {"workerPoolSpecs": [{"containerSpec": {"command": ["python", "-c", code]}}]}}
    (tmp_path / "request.json").write_text(json.dumps(body))
    ran = launch("local", "--request", tmp_path / "request.json", "--preempt-after", "1s")
    assert ran.code == 0, ran.err
    assert "workerpool0-0 killed by signal 15\n" in ran.err
    assert "nothing was saved" not in ran.err, "a script may have saved by itself"
    assert "preempted after 1 s; restarted\n" in ran.out
