"""A script's metrics without a line of ours: read from its output, and from its event files."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch_train.common import contract
from launch_train.common.contract import Exit
from launch_train.common.storage import LocalFolder
from launch_train.telemetry.event_files import EventFiles
from launch_train.telemetry.upload_queue import Direct
from tests.train import trials
from tests.train.nodes import Machines, machines, until

REGEX = r"step (?P<step>\d+): loss (?P<loss>[\d.]+)"

PRINTS = """
import os, pathlib, sys, time
rank = os.environ.get("RANK", "0")
folder = pathlib.Path("tb/run") ; folder.mkdir(parents=True, exist_ok=True)
events = folder / f"events.out.tfevents.1.host.{os.environ['LAUNCH_ATTEMPT']}{os.environ['LAUNCH_GENERATION']}.{rank}"
saved = pathlib.Path(f"saved-{rank}")
first = int(saved.read_text()) if saved.exists() else 0
for step in range(first + 1, 7):
    print(f"step {step}: loss {1 / step:.3f}", flush=True)
    with events.open("a") as file:
        file.write(f"{step} ")
    saved.write_text(str(step))
    if step == 3 and first == 0 and "STOP" in os.environ:
        pathlib.Path("ready").touch()
        time.sleep(100)
"""


@pytest.fixture
def one(tmp_path: Path) -> Iterator[Machines]:
    with machines(tmp_path) as found:
        yield found


def wanted(**settings: str) -> dict[str, str]:
    return {contract.SCRIPT_METRICS: json.dumps(settings)}


@pytest.mark.slow
def test_two_ranks_that_print_give_one_row_per_step(one: Machines) -> None:
    env = wanted(regex=REGEX) | {contract.PROCESSES: "2"}
    node = one.start("--script", one.script(PRINTS), env=env)
    assert node.wait() == Exit.OK, node.text
    assert trials.losses(one.run_folder) == {step: round(1 / step, 3) for step in range(1, 7)}
    parts = "".join(path.read_text() for path in sorted((one.run_folder / "metrics").glob("*.jsonl")))
    assert [json.loads(line)["step"] for line in parts.splitlines()] == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_rows_and_event_files_of_a_preempted_script_are_kept(one: Machines) -> None:
    env = wanted(regex=REGEX, tensorboard="tb")
    argv = ("--launcher", "python", "--script", one.script(PRINTS))
    stopped = one.start(*argv, env=env | {"STOP": "1"})
    until(lambda: (one.folder / "ready").exists() or stopped.process.poll() is not None, "the third step")
    stopped.send(signal.SIGTERM)
    assert stopped.wait() == 128 + signal.SIGTERM, stopped.text
    assert sorted(trials.losses(one.run_folder)) == [1, 2, 3]
    assert [path.read_text() for path in events(one)] == ["1 2 3 "]
    (one.folder / "tb" / "run" / events(one)[0].name).unlink()  # another machine has another disk
    resumed = one.start(*argv, env=env)
    assert resumed.wait() == Exit.OK, resumed.text
    assert sorted(trials.losses(one.run_folder)) == [1, 2, 3, 4, 5, 6]


def events(one: Machines) -> list[Path]:
    return sorted((one.run_folder / "logs" / "script" / "run").iterdir())


@pytest.mark.slow
def test_a_regex_that_never_ends_only_stops_the_rows(one: Machines) -> None:
    script = one.script("print('step 1: loss 2', flush=True)\nprint('step ' + 'a' * 60 + '!', flush=True)\n")
    slow = r"step (?:(?P<step>\d+): loss (?P<loss>\d)|(a+)+$)"
    node = one.start("--launcher", "python", "--script", script, env=wanted(regex=slow))
    assert node.wait() == Exit.OK, node.text
    assert trials.losses(one.run_folder) == {1: 2.0}
    assert "run.metrics.regex took more than 1 s" in node.text


def test_without_a_run_folder_nothing_is_collected(one: Machines) -> None:
    env = wanted(regex=REGEX) | {contract.RUN_FOLDER: ""}
    node = one.start("--launcher", "python", "--script", one.script(PRINTS), env=env)
    assert node.wait() == Exit.OK, node.text
    assert not one.run_folder.exists()


def test_an_event_file_is_uploaded_again_when_it_has_grown_and_its_time_has_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1000.0]
    monkeypatch.setattr("launch_train.telemetry.event_files.time.monotonic", lambda: clock[0])
    logs, stored = tmp_path / "tb", tmp_path / "run" / "logs" / "script" / "a" / "x.tfevents.1"
    files = EventFiles(logs, Direct(LocalFolder(tmp_path / "run")))
    files.upload()  # there is no folder yet
    written = logs / "a" / stored.name
    written.parent.mkdir(parents=True)
    written.write_text("1")
    (logs / "other.txt").write_text("1")
    files.upload()
    assert stored.read_text() == "1"
    written.write_text("12")
    files.upload()
    assert stored.read_text() == "1"
    clock[0] += 11
    files.upload()
    assert stored.read_text() == "12"
    written.write_text("123")
    files.upload(last=True)
    assert stored.read_text() == "123"
    assert [path.name for path in stored.parents[1].iterdir()] == ["a"]
