"""How far a run is, read from the parts of its metrics."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from launch_train import runfolder
from launch_train.common import contract
from launch_train.common.config import as_data, parse
from launch_train.common.storage import GcsFolder, LocalFolder, Storage
from launcher.clock import Clock
from launcher.errors import LaunchError, UnreachableError
from launcher.jobs.job import Job
from launcher.plan.container import escaped
from launcher.runs.metrics.progress import MAX_PARTS, Progress, ProgressReader, requested_steps, summarize_rows
from launcher.testing.googlecloud import FakeClock, Fault, GoogleCloud, Status

BEGAN = 1_700_000_000.0


def start(steps: int = 300) -> dict[str, Any]:
    return {"event": "start", "time": BEGAN, "config": as_data(parse({"steps": steps}))}


def row(step: int, seconds: float = 0.5, **more: Any) -> dict[str, Any]:
    speed = {"loss": 5 - step / 100, "tokens_per_s": 2000.0, "step_s": seconds}
    return {"step": step, "time": BEGAN + seconds * step, **speed, **more}


def write(
    folder: Storage, part: int, *rows: dict[str, Any], attempt: int = 1, generation: int = 0, tail: bytes = b""
) -> None:
    text = "".join(json.dumps(each) + "\n" for each in rows).encode() + tail
    folder.write(runfolder.metrics_part(attempt, generation, 0, part), text, create=True)


class Counting(LocalFolder):
    """Counts what it is asked."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.lists = self.reads = 0

    def within(self, seconds: float) -> Counting:
        return self

    def list(self, prefix: str = "") -> list[str]:
        self.lists += 1
        return super().list(prefix)

    def read(self, name: str) -> bytes:
        self.reads += 1
        return super().read(name)


@pytest.fixture
def folder(tmp_path: Path) -> Counting:
    return Counting(tmp_path)


@pytest.fixture
def meter(folder: Counting, clock: FakeClock) -> ProgressReader:
    return ProgressReader(folder, clock=Clock(clock, clock.advance))


def test_a_run_goes_on(folder: Counting, meter: ProgressReader, clock: FakeClock) -> None:
    assert meter.read_new() is None
    write(folder, 0, start())
    assert meter.read_new() == Progress(step=0, steps=300)
    assert meter.read_new() is None, "nothing new"
    write(folder, 1, *map(row, range(1, 101)))
    found = meter.read_new()
    assert found == Progress(
        step=100, steps=300, loss=4.0, rate=2000.0, unit="tokens", eta_seconds=100.0, time=BEGAN + 50
    )
    write(folder, 2, row(101))
    write(folder, 3, row(102), {"event": "checkpoint", "step": 102})
    assert (found := meter.read_new())
    assert (found.step, found.eta_seconds) == (102, 99.0)
    assert meter.read_new() is None


def test_few_requests(folder: Counting, meter: ProgressReader, clock: FakeClock) -> None:
    for part in range(200):
        write(folder, part, start() if part == 0 else row(part))
    assert (found := meter.read_new())
    assert (found.step, found.steps) == (199, 300)
    assert folder.lists == 1
    assert folder.reads <= MAX_PARTS + 2
    folder.lists = folder.reads = 0
    for _ in range(12):
        clock.advance(10)
        assert meter.read_new() is None
    assert folder.lists == 2
    assert folder.reads == 12


def test_a_large_backlog_is_read_over_several_polls(folder: Counting, meter: ProgressReader) -> None:
    write(folder, 0, start())
    meter.read_new()
    for part in range(1, 50):
        write(folder, part, row(part))
    steps = [found.step for _ in range(4) if (found := meter.read_new())]
    assert steps == [20, 40, 49]


def test_a_new_start_makes_the_old_one_history(folder: Counting, meter: ProgressReader, clock: FakeClock) -> None:
    write(folder, 0, start(), *map(row, range(1, 101)))
    assert (found := meter.read_new())
    assert found.step == 100
    write(folder, 0, start(), {"event": "resumed", "step": 80}, generation=1)
    clock.advance(61)
    assert meter.read_new() == Progress(step=80, steps=300)
    write(folder, 1, row(81, loss=None), generation=1)
    assert (found := meter.read_new())
    assert (found.step, found.loss, found.eta_seconds) == (81, None, 219 * 0.5)


def test_a_late_row_of_an_earlier_step_takes_its_place_in_the_curve(folder: Counting, meter: ProgressReader) -> None:
    write(folder, 0, row(1), row(2), row(3), row(2, accuracy=0.5), row(3))
    progress = meter.read_new()
    assert progress
    assert progress.step == 3
    assert [(each["step"], each.get("accuracy")) for each in meter.newest_rows] == [(1, None), (2, 0.5), (3, None)]


def test_other_attempts(folder: Counting, clock: FakeClock) -> None:
    write(folder, 0, start(), row(50))
    second = ProgressReader(folder, attempt=2, clock=Clock(clock, clock.advance))
    assert second.read_new() is None, "what the attempt before did isn't this one's progress"
    write(folder, 0, start(), row(51), attempt=2)
    assert (found := second.read_new())
    assert found.step == 51


def test_a_script_of_its_own(folder: Counting, meter: ProgressReader) -> None:
    write(folder, 0, *({"step": step, "accuracy": 0.5, "time": BEGAN + 2 * step} for step in range(10, 20)))
    assert meter.read_new() == Progress(step=19, rate=0.5, unit="steps", time=BEGAN + 38)
    write(folder, 1, {"event": "start", "steps": 100}, {"step": 20, "images_per_s": 64, "time": BEGAN + 40})
    assert meter.read_new() == Progress(
        step=20, steps=100, rate=64.0, unit="images", eta_seconds=160.0, time=BEGAN + 40
    )


def test_pauses_between_steps_count(folder: Counting, meter: ProgressReader) -> None:
    rows = [row(step) for step in range(1, 11)]
    rows[5:] = [each | {"time": each["time"] + 45} for each in rows[5:]]  # a checkpoint took 45 s
    write(folder, 0, start(110), *rows)
    assert (found := meter.read_new())
    assert found.eta_seconds == pytest.approx(100 * (4.5 + 45) / 9)


def test_torn_lines_and_strange_names(folder: Counting, meter: ProgressReader, clock: FakeClock) -> None:
    write(folder, 0, start(), row(1), tail=b'{"step": 2, "lo')
    folder.write("metrics/notes.txt", b"?")
    folder.write("metrics/0001-0000-0000-000000-1.jsonl", b'{"step": 99}\n')
    assert (found := meter.read_new())
    assert found.step == 1
    write(folder, 1, tail=b'\xff\xfe{"step": 3}\n[1]\nnull\n{"step": true}\n{"step": "4"}\n{"step": 5, "loss": NaN}\n')
    assert (found := meter.read_new())
    assert found.step == 5
    assert found.loss is not None
    assert math.isnan(found.loss)


@given(
    st.lists(
        st.fixed_dictionaries(
            {"step": st.integers()},
            optional={
                name: st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.lists(st.none()))
                for name in ("time", "loss", "step_s", "tokens_per_s", "images_per_s")
            },
        ),
        max_size=5,
    ),
    st.one_of(st.none(), st.integers(1, 10**9)),
)
@example([{"step": 0, "step_s": 2e-311}], None)
@example([{"step": 0, "step_s": 1e308}], 10**9)
def test_no_rows_are_too_strange(rows: list[dict[str, Any]], steps: int | None) -> None:
    found = summarize_rows(tuple(rows), steps, None)
    assert found.step == (rows[-1]["step"] if rows else 0)
    json.dumps([found.loss, found.rate, found.eta_seconds, found.time], allow_nan=False)


@pytest.mark.parametrize(
    ("config", "steps"),
    [
        ('{"steps": 40}', 40),
        ('{"note": "$(HOME) $$", "steps": 40}', 40),
        *((config, None) for config in ("{}", "no JSON", "[1]", '{"steps": true}', '{"steps": -1}', '{"steps": "40"}')),
    ],
)
def test_steps_from_the_request(config: str, steps: int | None, folder: Counting, clock: FakeClock) -> None:
    env = [{"name": "A", "value": "b"}, {"name": contract.CONFIG, "value": escaped(config)}]
    request = {"jobSpec": {"workerPoolSpecs": [{"containerSpec": {"env": env}}]}}
    assert requested_steps(request) == steps
    job = Job(name="projects/1/locations/r/customJobs/7", region="r", state="RUNNING", created=0, request=request)
    write(folder, 0, row(1))
    found = ProgressReader(folder, job, clock=Clock(clock, clock.advance)).read_new()
    assert found
    assert found.steps == steps


@pytest.mark.parametrize("request_", [{}, {"jobSpec": None}, {"jobSpec": {"workerPoolSpecs": [{}]}}])
def test_requests_without_a_config(request_: dict[str, Any]) -> None:
    assert requested_steps(request_) is None


def test_a_bucket(cloud: GoogleCloud, monkeypatch: pytest.MonkeyPatch, clock: FakeClock) -> None:
    for name, value in cloud.environ().items():
        monkeypatch.setenv(name, value)
    folder = GcsFolder("gs://my-bucket/runs/a")
    meter = ProgressReader(folder, clock=Clock(clock, clock.advance))
    write(folder, 0, start(), row(1))
    assert (found := meter.read_new())
    assert found.step == 1
    write(folder, 1, row(2))
    cloud.faults.add(Fault("storage.objects.get", Status(403), times=None))
    with pytest.raises(LaunchError, match="the run folder can't be read") as raised:
        meter.read_new()
    assert not isinstance(raised.value, UnreachableError)
    cloud.faults.clear()
    assert (found := meter.read_new())
    assert found.step == 2, "a look that failed has lost nothing"


def test_an_unreachable_bucket(cloud: GoogleCloud, monkeypatch: pytest.MonkeyPatch, clock: FakeClock) -> None:
    for name, value in cloud.environ().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("launcher.runs.metrics.progress.ANSWER_SECONDS", 0.2)
    cloud.faults.down(until=clock() + 1)
    with pytest.raises(UnreachableError, match="the run folder is unreachable"):
        ProgressReader(GcsFolder("gs://my-bucket/runs/a"), clock=Clock(clock, clock.advance)).read_new()
