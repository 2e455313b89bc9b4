"""What a profile does to a run, and its own trouble; test_advice.py has what it finds."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from launch_train.common import contract
from launch_train.common.config import Profile, parse
from launch_train.common.errors import PreemptedError
from launch_train.common.storage import LocalFolder
from launch_train.distributed.process_group import Ranks
from launch_train.monitoring import alerts
from launch_train.profiling import __main__, profiler
from launch_train.profiling.advice import Setup
from launch_train.profiling.profiler import ProfileReport, Recording
from launch_train.runfolder.starts import parse_metrics
from launch_train.telemetry.metric_sink import Sink
from launch_train.telemetry.rows import Row
from launch_train.trainer import train as loop
from launch_train.trainer.metrics_buffer import Recorder, StepRecord

SHORT = Profile(1, 1, 2)

pytestmark = pytest.mark.usefixtures("one_thread")


class Rows(Sink):
    """A sink that keeps its rows."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def put(self, rows: Sequence[Row]) -> None:
        self.rows += rows


# --- In a run ---------------------------------------------------------------------------------------------------------

TINY: dict[str, Any] = {
    "model": {"n_layer": 1, "n_head": 2, "n_embd": 16, "block_size": 16},
    "data": "synthetic",
    "steps": 12,
    "batch_size": 8,
    "eval": {"every": 5, "batches": 2},
    "log_every": 3,
    "profile": {"wait": 2, "warmup": 1, "active": 3},
}


def run(folder: Path, generation: int = 1, **config: Any) -> dict[str, list[dict[str, Any]]]:
    """Train in this process; returns the run folder's events by name, and its steps."""
    env = {contract.RUN_FOLDER: str(folder), contract.ATTEMPT: "2", contract.GENERATION: str(generation)}
    loop.train(parse({**TINY, **config}), Ranks(), env)
    return read(folder)


def read(folder: Path) -> dict[str, list[dict[str, Any]]]:
    storage = LocalFolder(folder)
    found = parse_metrics({name: storage.read(name) for name in storage.list("metrics/")})
    events: dict[str, list[dict[str, Any]]] = {"steps": list(map(dict, found.rows))}
    for name in storage.list("metrics/"):
        for line in storage.read(name).splitlines():
            row = json.loads(line)
            events.setdefault(row.get("event", ""), []).append(row)
    return events


def test_a_run_with_a_profile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alerts, "DISK_GB", 0.0)  # how full this machine's disk is must not matter
    (said,) = run(tmp_path / "run")["profile"]
    assert (said["step"], said["steps"], len(said["sentences"])) == (6, 3, len(said["sentences"]))
    assert sum(said["shares"].values()) == pytest.approx(1, abs=0.001)

    profile = tmp_path / "run" / "profile"
    (trace,) = (profile / "0002-0001").iterdir()
    assert said["trace"] == f"profile/0002-0001/{trace.name}"
    assert trace.name.startswith("rank0.")
    assert trace.name.endswith(".pt.trace.json.gz")
    names = [event["name"] for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]]
    assert sum(name.startswith("ProfilerStep#") for name in names) == 3
    assert {"data", "forward", "backward", "optimizer", "evaluation"} <= set(names)

    out, err = capsys.readouterr()
    text = (profile / "verdict.txt").read_text()
    assert text in out
    assert text.startswith("profile of steps 4-6: bound by ")
    assert "  The trace is in profile/0002-0001/\n" in out
    assert max(map(len, text.splitlines())) <= 60
    assert json.loads((profile / "verdict.json").read_text())["bound"] == said["bound"]
    assert err == ""
    assert not torch.autograd.profiler._is_profiler_enabled


def test_the_numbers_do_not_change(tmp_path: Path) -> None:
    with_it, without = (run(tmp_path / name, profile=given) for name, given in (("a", TINY["profile"]), ("b", "off")))
    assert [row["loss"] for row in with_it["steps"]] == [row["loss"] for row in without["steps"]]
    assert with_it["end"][0]["parameters_sha256"] == without["end"][0]["parameters_sha256"]
    assert "profile" not in without


def test_recorded_steps_do_not_count_as_the_runs_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    added: list[StepRecord] = []
    add = Recorder.add

    def adds(recorder: Recorder, step: StepRecord) -> None:
        added.append(step)
        add(recorder, step)

    monkeypatch.setattr(Recorder, "add", adds)
    monkeypatch.setattr(ProfileReport, "send", lambda report, export, *_: export(str(tmp_path / "trace.json")))
    run(tmp_path / "run", steps=40)
    counts = [step.timed for step in added]
    assert counts[:6] == [True, True, False, False, False, False]
    assert counts[-20:] == [True] * 20


@pytest.mark.parametrize("wait", [20, 11])
def test_a_run_too_short_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str], wait: int) -> None:
    (said,) = run(tmp_path / "run", profile={"wait": wait, "warmup": 1, "active": 3})["profile"]
    assert said["error"] == (f"no step was recorded: 12 steps remained, but wait + warmup + active are {wait + 4}")
    out = capsys.readouterr().out
    assert said["error"] in " ".join(out.split())
    assert max(map(len, out.splitlines())) <= 60 + len(str(tmp_path))
    assert not (tmp_path / "run" / "profile").exists()
    assert len(run(tmp_path / "run", generation=2)["profile"]) == 1, "there was nothing left to do"


@pytest.mark.parametrize("amid", [3, 5])
def test_a_preemption_amid_the_profile_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, amid: int
) -> None:
    """And the start after it records again."""
    from tests.train.trials import sigterm_after

    with sigterm_after(amid), pytest.raises(PreemptedError):
        run(tmp_path / "run")
    events = run(tmp_path / "run", generation=2)
    assert [row["step"] for row in events["steps"]] == list(range(1, 13))
    (said,) = events["profile"]
    assert said["steps"] == 3


def test_out_of_memory_amid_the_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gradients, failed = loop.forward_backward, list[int]()

    def once(run: Any, batch: Any) -> Tensor:
        if run.state["step"] == 4 and not failed:
            failed.append(run.state["step"])
            with run.profiler.range("forward"):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return gradients(run, batch)

    monkeypatch.setattr(loop, "forward_backward", once)
    events = run(tmp_path / "run")
    assert failed == [4]
    assert events["profile"][0]["steps"] == 3
    assert events["out_of_memory"][0]["step"] == 5


def test_an_error_amid_the_profile_is_the_runs_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    update = loop.optimizer_step

    def breaks(run: Any) -> Tensor:
        if run.state["step"] == 4:
            raise RuntimeError("the device has left")
        return update(run)

    monkeypatch.setattr(loop, "optimizer_step", breaks)
    with pytest.raises(RuntimeError, match="has left"):
        run(tmp_path / "run")
    monkeypatch.undo()
    assert "profile" not in capsys.readouterr().out
    assert run(tmp_path / "again")["profile"][0]["steps"] == 3


# --- Trouble of its own -----------------------------------------------------------------------------------------------


@pytest.fixture
def rows() -> Rows:
    return Rows()


def stepped(recording: Recording, number: int = sum(SHORT)) -> None:
    recording.start()
    for step in range(1, number + 1):
        with recording.range("forward"):
            torch.ones(3).sum()
        recording.stepped(step)


def test_a_profiler_that_can_not_start(
    rows: Rows, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("launch_train.profiling.profiler.profile", lambda **_: 1 / 0)
    recording = Recording(SHORT, torch.device("cpu"), ProfileReport({}, rows, Setup()))
    stepped(recording)
    recording.close()
    assert not recording.records
    assert [row["error"] for row in rows.rows] == ["no verdict: division by zero"]
    assert capsys.readouterr().out == "profile: no verdict: division by zero\n"


@pytest.mark.parametrize(
    ("setup", "most_bytes", "error"),
    [
        (Setup(gpu=True), profiler.MOST_BYTES, "NVreg_RestrictProfilingToAdminUsers"),  # only administrators profile
        (Setup(), 10, "record fewer steps"),
    ],
    ids=["no GPU activity", "too large"],
)
def test_a_trace_that_cannot_be_analysed_is_kept(
    rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setup: Setup, most_bytes: int, error: str
) -> None:
    monkeypatch.setattr(profiler, "MOST_BYTES", most_bytes)
    recording = Recording(SHORT, torch.device("cpu"), ProfileReport({contract.RUN_FOLDER: str(tmp_path)}, rows, setup))
    stepped(recording)
    recording.close()
    (said,) = rows.rows
    assert error in str(said["error"])
    assert (tmp_path / str(said["trace"])).exists()
    assert not (tmp_path / "profile" / "verdict.json").exists()


# --- By hand ----------------------------------------------------------------------------------------------------------


def test_any_trace_can_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.train.profiling.chrome import steps
    from tests.train.profiling.test_bottleneck import input_bound

    trace = tmp_path / "a.pt.trace.json"
    trace.write_text(json.dumps({"schemaVersion": 1, "traceEvents": steps(input_bound)}))
    assert __main__.main([str(trace), "--pack"]) == 0
    assert capsys.readouterr().out.startswith("profile of 4 steps: bound by input\n")
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt.trace.json.gz"]
    assert __main__.main([f"{trace}.gz", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bound"] == "input"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "a.json can't be used: "),
        (b"{}", "no traceEvents"),
        (b'{"traceEvents": []}', "no whole step is in the trace"),
        (b'{"traceEvents": [{"ph": "X", "cat": "cpu_op"}]}', "unexpected event"),
        (b'{"traceEvents": [1]}', "unexpected event"),
        (gzip.compress(b'{"traceEvents": []}', mtime=0)[:20], "it was cut off, or is damaged"),
        (None, "No such file"),
    ],
)
def test_what_is_no_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, words: str
) -> None:
    trace = tmp_path / "a.json"
    if content is not None:
        trace.write_bytes(content)
    assert __main__.main([str(trace)]) == 2
    assert words in capsys.readouterr().err
