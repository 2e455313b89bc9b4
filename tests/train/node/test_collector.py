"""A script's metrics without a line of ours: read from its output, and from its event files."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from launch_train.common import contract
from launch_train.common.contract import Exit
from launch_train.common.storage import LocalFolder
from launch_train.node import collector
from launch_train.node.collector import LINE, RowReader, StepRows, is_read_from
from launch_train.telemetry.event_files import EventFiles
from launch_train.telemetry.metric_sink import Sink
from launch_train.telemetry.rows import Row
from launch_train.telemetry.upload_queue import Outbox
from launcher.testing.googlecloud import GoogleCloud
from tests.train import trials
from tests.train.nodes import REPOSITORY, Machines, machines, until

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


@pytest.mark.parametrize(("code", "warned"), [(0, True), (1, False)])
def test_a_successful_script_whose_output_never_matches_is_reported(one: Machines, code: int, warned: bool) -> None:
    script = one.script(f"print('Step 1 loss 2', flush=True)\nraise SystemExit({code})\n")
    env = wanted(regex=REGEX, tensorboard="tb") | {contract.RESTARTS: "0"}
    node = one.start("--launcher", "python", "--script", script, env=env)
    assert (node.wait() == Exit.OK) == warned, node.text
    assert ("run.metrics.regex found no step" in node.text) == warned
    assert ("run.metrics.tensorboard: tb has no event files" in node.text) == warned


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
    files = EventFiles(logs, Outbox(LocalFolder(tmp_path / "run")))
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


def collect(folder: Path, run: Path, url: str, env: Mapping[str, str]) -> None:
    """Run a collector for an output that has ended, with event files below a folder."""
    ours = {
        contract.RUN_FOLDER: url,
        contract.RUN_PATH: str(run),
        contract.NODE: "0",
        "PYTHONPATH": str(REPOSITORY / "train"),
    }
    ours |= {contract.FAULTS: str(run.parent), contract.SPOOL: str(run.parent)}
    command = [sys.executable, "-m", "launch_train.node.collector", "0"]
    environ = {**os.environ, **env, **ours, **wanted(tensorboard=str(folder))}
    subprocess.run(command, input=b"", env=environ, check=True, timeout=60)


def test_a_folder_that_contains_the_run_folder_is_not_copied_again_and_again(tmp_path: Path) -> None:
    run, name = tmp_path / "runs" / "demo-1", "events.out.tfevents.1.host.1.0"
    for folder in (run / "logs", tmp_path / "tb"):
        folder.mkdir(parents=True)
        (folder / name).write_bytes(b"")
    for _ in range(3):
        collect(tmp_path, run, str(run), {})
    assert {path.relative_to(run).as_posix() for path in run.rglob(name)} == {f"logs/{name}", f"logs/script/tb/{name}"}


@pytest.mark.parametrize(("folder", "copy"), [("tb", "logs/script/"), ("logs/a", "")])
def test_event_files_in_a_bucket_are_copied_to_where_tensorboard_looks(tmp_path: Path, folder: str, copy: str) -> None:
    run, name = tmp_path / "gcs" / "my-bucket" / "runs" / "demo-1", "events.out.tfevents.1.host.1.0"
    (run / folder).mkdir(parents=True)
    (run / folder / name).write_bytes(b"")
    with GoogleCloud() as cloud:
        collect(run / folder, run, "gs://my-bucket/runs/demo-1", cloud.environ())
        stored = [blob.name for blob in cloud.objects.listed("my-bucket")]
    assert stored == ([f"runs/demo-1/{copy}{name}"] if copy else [])


WRITES = """
import os, sys, time
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter  # torch's SummaryWriter uses it
from launch_train import metrics

folder, steps = sys.argv[1].replace("AIP", os.environ["LAUNCH_RUN_PATH"] + "/logs"), sys.argv[2:]
metrics.event("begun")
writer, others = EventFileWriter(folder), EventFileWriter(folder + "/validation")
for step in map(int, steps[int(os.environ["LAUNCH_GENERATION"])].split(",")):
    print(f"step {step}: x {step}", flush=True)
    for place, values in {writer: {"train/loss": 1 / step, "reward": step}, others: {"train/loss": 2.0}}.items():
        for tag, value in values.items():
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
            place.add_event(Event(wall_time=time.time(), step=step, summary=summary))
            place.flush()
    if "LOG" in os.environ:
        time.sleep(2.5)
        metrics.log(step, own=1.0)
writer.close(), others.close()
sys.exit(0 if len(steps) == 1 + int(os.environ["LAUNCH_GENERATION"]) else 9)
"""


def rows_of(one: Machines) -> list[Row]:
    parts = "".join(path.read_text() for path in sorted((one.run_folder / "metrics").glob("*.jsonl")))
    return [row for line in parts.splitlines() if "event" not in (row := json.loads(line))]


def values_of(row: Row) -> Row:
    return {name: value for name, value in row.items() if name not in ("step", "time")}


def written(step: int) -> Row:
    return {"loss": pytest.approx(1 / step), "reward": step, "validation/loss": 2.0}


@pytest.mark.parametrize("folder", ["tb", pytest.param("AIP", marks=pytest.mark.slow)])
def test_scalars_of_event_files_are_rows_of_the_start_that_wrote_them(one: Machines, folder: str) -> None:
    argv = ("--launcher", "python", "--script", one.script(WRITES), "--", folder, "1,2,3", "3,4")
    node = one.start(*argv, env=wanted(tensorboard="tb") if folder == "tb" else {})
    assert node.wait() == Exit.OK, node.text
    assert [(row["step"], values_of(row)) for row in rows_of(one)] == [
        *((step, written(step)) for step in (1, 2, 3)),
        *((step, written(step)) for step in (3, 4)),
    ]
    assert trials.losses(one.run_folder) == {step: pytest.approx(1 / step) for step in (1, 2, 3, 4)}
    files = [path for path in (one.run_folder / "logs").rglob("*.tfevents.*") if path.parent.name != "validation"]
    assert len(files) == 2, "one of each start, and none of launch's own with the same curves"


@pytest.mark.slow
def test_a_script_that_logs_its_rows_gets_none_of_its_event_files(one: Machines) -> None:
    argv = ("--launcher", "python", "--script", one.script(WRITES), "--", "AIP", "1,2")
    node = one.start(*argv, env={"LOG": "1"})
    assert node.wait() == Exit.OK, node.text
    assert [(row["step"], values_of(row)) for row in rows_of(one)] == [(1, {"own": 1.0}), (2, {"own": 1.0})]


@pytest.mark.slow
def test_values_of_lines_and_event_files_share_a_row_and_launchs_own_event_files_are_not_read(one: Machines) -> None:
    argv = ("--launcher", "python", "--script", one.script(WRITES), "--", "AIP", "1,2")
    node = one.start(*argv, env=wanted(regex=r"step (?P<step>\d+): x (?P<x>\d+)"))
    assert node.wait() == Exit.OK, node.text
    rows = rows_of(one)
    assert {row["step"]: values_of(row) for row in rows} == {step: {"x": step, **written(step)} for step in (1, 2)}
    assert len(rows) <= 4


def test_event_files_of_other_ranks_and_of_launch_are_not_read(tmp_path: Path) -> None:
    name, logs = f"events.out.tfevents.1700000000.{socket.gethostname()}", tmp_path / "logs"
    sleep = [sys.executable, "-c", "print(flush=True); input()"]
    for rank in ("", "0", "1"):
        env = {name: value for name, value in os.environ.items() if name != "RANK"} | ({"RANK": rank} if rank else {})
        with subprocess.Popen(sleep, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout
            process.stdout.readline()
            assert is_read_from(tmp_path / f"{name}.{process.pid}.0", None) == (rank != "1")
            assert is_read_from(tmp_path / f"events.out.tfevents.1700000000.elsewhere.{process.pid}.0", None)
    assert is_read_from(logs / "run" / f"{name}.1.0", logs)
    assert not is_read_from(logs / "script" / f"{name}.1.0", logs)
    assert not is_read_from(logs / "events.out.tfevents.0001-0000-1700000000.123456-0a1b2c3d-000000", logs)


class Written(Sink):
    """A sink that keeps what it gets."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def put(self, rows: Sequence[Row]) -> None:
        self.rows += rows


def test_a_late_value_joins_its_row_and_the_newest_step_stays_last(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(collector, "KEPT_STEPS", 2)
    sink = Written()
    rows = StepRows(lambda: sink)
    for step in (1, 2, 3):
        rows.add(step, float(step), {"loss": 1.0})
    rows.write()
    rows.add(2, 9.0, {"accuracy": 0.5})
    rows.write()
    assert sink.rows[3:] == [
        {"step": 2, "time": 2.0, "loss": 1.0, "accuracy": 0.5},
        {"step": 3, "time": 3.0, "loss": 1.0},
    ]
    rows.add(1, 9.0, {"accuracy": 0.5})
    rows.add(1, 9.0, {"f1": 0.5})
    rows.write()
    assert len(sink.rows) == 5
    assert capfd.readouterr().err.count("accuracy of step 1 came too late") == 1


@pytest.mark.parametrize(
    ("work", "warned"),
    [
        ("print('unable to locate 2 gpus')", True),
        ("metrics.event('begun')", False),
        ("open(os.environ['LAUNCH_RUN_PATH'] + '/scores.txt', 'w').close()", False),
        ("open('model-7.bin', 'wb').write(b'1')", False),  # of run.resume_glob
        ("sys.exit(1)", False),
    ],
)
def test_a_script_that_exits_with_0_and_has_done_nothing_is_reported(one: Machines, work: str, warned: bool) -> None:
    script = one.script(f"import os, sys\nfrom launch_train import metrics\n{work}\n")
    glob = json.dumps({"glob": "model-*.bin", "args": ["{path}"]})
    env = {contract.RESTARTS: "0", contract.RESUME: glob}
    for _ in range(1 + warned):  # the first one's record is not a result
        node = one.start("--launcher", "python", "--script", script, env=env)
        node.wait()
        assert ("the script exited with 0 after" in node.text) == warned, node.text


# --- Lines of output --------------------------------------------------------------------------------------------------

PLAIN = r"step (?P<step>\d+).*loss (?P<loss>[\d.]+|nan)"
NANO = r"(?:step|iter) (?P<step>\d+): (?:train loss (?P<train>[\d.]+), val loss (?P<val>[\d.]+)|loss (?P<loss>[\d.]+))"


def rows_of_lines(regex: str, *chunks: str) -> list[Row]:
    """The rows of output that comes in chunks, without their times."""
    sink = Written()
    reader = RowReader(regex, StepRows(lambda: sink))
    for chunk in chunks:
        reader.read(chunk.encode())
    assert all(row.pop("time") > 0 for row in sink.rows)
    return sink.rows


@pytest.mark.parametrize(
    ("regex", "text", "expected"),
    [
        (PLAIN, "step 1: loss 2.5\nstep 2: loss 2\n", [{"step": 1, "loss": 2.5}, {"step": 2, "loss": 2.0}]),
        (PLAIN, "0%|  | step 1 loss 2.5\rstep 2 loss 2\r", [{"step": 1, "loss": 2.5}, {"step": 2, "loss": 2.0}]),
        (PLAIN, "step 1: loss 2.5\nstep 1: loss 9\n", [{"step": 1, "loss": 2.5}]),  # the other rank
        (PLAIN, "step 2: loss 2.5\nstep 1: loss 9\n", [{"step": 2, "loss": 2.5}]),  # a slower rank
        (PLAIN, "step 1: loss ...\nstep: loss 2\nnothing\n", []),
        (PLAIN, f"step 1: {'x' * LINE} loss 2\nstep 2: loss 2\n", [{"step": 2, "loss": 2.0}]),
        (r"(?P<step>\S+) (?P<loss>\S+)", "1e3 5\nnan 5\ninf 5\nx 5\n", [{"step": 1000, "loss": 5.0}]),
        (
            NANO,
            "step 5: train loss 4.0, val loss 4.5\niter 5: loss 3.9, time 10ms\niter 6: loss 3.8, time 10ms\n",
            [
                {"step": 5, "train": 4.0, "val": 4.5},
                {"step": 5, "train": 4.0, "val": 4.5, "loss": 3.9},
                {"step": 6, "loss": 3.8},
            ],
        ),
    ],
)
def test_lines_become_rows_once_per_step(regex: str, text: str, expected: list[Row]) -> None:
    assert rows_of_lines(regex, text) == expected
    assert rows_of_lines(regex, *text) == expected, "byte by byte"


def test_a_value_that_is_not_finite_is_kept() -> None:
    (row,) = rows_of_lines(PLAIN, "step 1: loss nan\n")
    assert row["loss"] != row["loss"]


def test_a_line_without_an_end_takes_no_memory() -> None:
    sink = Written()
    reader = RowReader(PLAIN, StepRows(lambda: sink))
    for _ in range(1000):
        reader.read(b"x" * 1000)
    assert len(reader._incomplete) <= LINE + 1
    reader.read(b"\nstep 1: loss 2\n")
    assert [row["loss"] for row in sink.rows] == [2.0]
