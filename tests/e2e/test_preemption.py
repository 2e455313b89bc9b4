"""`launch local --preempt-after`: a run that is preempted comes to the same weights as one that isn't, bit for bit."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from launch_train.common.storage import open_storage
from launch_train.runfolder.starts import RunMetrics, parse_metrics
from launcher.testing.googlecloud import GoogleCloud
from tests.command import SPECS
from tests.e2e.running import TINY, only_run, run, succeeded

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

STEPS = 1000
LONG = TINY.replace("gpus: 2", "gpus: 1").replace("steps: 12", f"steps: {STEPS}").replace("every: 6", "every: 250")
"""Some 10 seconds with two processes on two CPUs."""
QUICK = 150
"""Steps of the quickstart here; it has 300."""


def parts_of(folder: Path) -> dict[str, bytes]:
    """The metrics of a local run, by name."""
    return {f"metrics/{path.name}": path.read_bytes() for path in (folder / "metrics").iterdir()}


def check_whole(parts: dict[str, bytes], steps: int) -> RunMetrics:
    """The results, which have each step once: no row is missing, none was made twice."""
    lines = [json.loads(line) for part in parts.values() for line in part.splitlines()]
    assert sorted(line["step"] for line in lines if "event" not in line) == list(range(1, steps + 1))
    found = parse_metrics(parts)
    assert [row["step"] for row in found.rows] == list(range(1, steps + 1))
    return found


def check_same(preempted: RunMetrics, plain: RunMetrics) -> None:
    """Each step's loss and the weights at the end are equal, to the last bit."""
    assert [row["loss"] for row in preempted.rows] == [row["loss"] for row in plain.rows]
    ends = [found.event("end") for found in (preempted, plain)]
    assert ends[0]
    assert ends[1]
    assert ends[0]["parameters_sha256"] == ends[1]["parameters_sha256"]
    assert ends[0]["train_loss_last"] == ends[1]["train_loss_last"]


def check_told(ran: CompletedProcess[str], found: RunMetrics) -> int:
    """What the commands prints about its preemption is what the run says of it. The step is returned."""
    stopped = next(event["step"] for event in found.events if event["event"] == "preempted")
    resumed = found.event("resumed")
    assert resumed
    assert resumed["step"] == stopped
    assert f"at step {stopped}; resumed from step {stopped}; 0 steps lost\n" in ran.stdout
    assert "launch: preempting the job (SIGTERM, then SIGKILL after 30 s)\n" in ran.stderr
    assert "exited with 75 (checkpoint saved)\n" in ran.stderr
    assert "launch: restarting\n" in ran.stderr
    return int(stopped)


def timed(*argv: str | Path, cwd: Path) -> tuple[str, str]:
    """What a run that nobody preempts prints, and when it was in the first half of its training: `15s`.

    How long a start takes is the machine's, and depends on what else it does.
    """
    began = time.monotonic()
    ran = succeeded(*argv, cwd=cwd)
    whole = time.monotonic() - began
    end = parse_metrics(parts_of(only_run(cwd / argv[-1]))).event("end")
    assert end
    return ran.stdout, f"{whole - end['seconds'] * 2 / 3:.0f}s"


def preempted(start: Callable[[str, str], CompletedProcess[str]], middle: str) -> tuple[CompletedProcess[str], str]:
    """A run that is preempted after `middle`, and the name of its output. One that ended before that, or was preempted
    before its second step, as the machine has less or more to do than when the time was taken, gives a better time."""
    for name in ("one", "two", "three"):
        began = time.monotonic()
        ran = start(name, middle)
        stopped = re.search(r"at step (\d+); resumed", ran.stdout)
        if stopped and int(stopped[1]) > 1:
            break
        took = (time.monotonic() - began) * 0.7
        middle = f"{took if 'the job was not preempted' in ran.stderr else float(middle[:-1]) * 1.5:.0f}s"
    return ran, name


def test_the_quickstart_preempted(tmp_path: Path) -> None:
    command = ("local", SPECS / "quickstart.yaml", "--gpus", "2", "--set", f"run.config.steps={QUICK}")
    plain, middle = timed(*command, "--output", "out", cwd=tmp_path)
    folder = only_run(tmp_path / "out")
    ran, output = preempted(
        lambda name, after: succeeded(*command, "--output", name, "--preempt-after", after, cwd=tmp_path), middle
    )
    again = only_run(tmp_path / output)
    found = check_whole(parts_of(again), QUICK)
    assert 1 < check_told(ran, found) < QUICK, f"{middle} must be in the middle of the training on this machine"
    check_same(found, check_whole(parts_of(folder), QUICK))
    assert "preempted" not in plain
    assert [path.name for path in sorted((again / "attempts").glob("*.json"))] == ["0001.end.json", "0001.json"]
    ended = succeeded(*command, "--output", "out", cwd=tmp_path)
    assert "this run finished on" in ended.stderr
    assert "step " not in ended.stderr


def test_two_nodes_preempted_with_their_run_in_a_bucket(
    tmp_path: Path, cloud: GoogleCloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "job.yaml").write_text(LONG)
    env = {name: value for name, value in cloud.environ().items() if name.endswith("_OVERRIDES_STORAGE")}
    command = ("local", "job.yaml", "--nodes", "2")
    _, middle = timed(*command, "--output", "plain", cwd=tmp_path)

    def start(name: str, after: str) -> CompletedProcess[str]:
        output = f"gs://my-bucket/{name}"
        return run(*command, "--output", output, "--preempt-after", after, cwd=tmp_path, env=env)

    ran, output = preempted(start, middle)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    content = objects(f"gs://my-bucket/{output}", env, monkeypatch)
    assert {name.split("/")[0] for name in content} >= {"text", "logs", "metrics", "checkpoints", "nodes", "attempts"}
    found = check_whole({name: data for name, data in content.items() if name.startswith("metrics/")}, STEPS)
    assert 1 < check_told(ran, found) < STEPS, f"{middle} must be in the middle of the training on this machine"
    for node in (0, 1):
        said = b"".join(data for name, data in sorted(content.items()) if name.startswith(f"text/0001-000{node}-"))
        assert b"interrupted; checkpoint saved" in said
        assert said.rstrip().endswith(b"launch: done")
    assert any(name.startswith("logs/events.out.tfevents") for name in content)
    assert "this run finished on" in start(output, "99s").stderr
    check_same(found, check_whole(parts_of(only_run(tmp_path / "plain")), STEPS))


def objects(output: str, env: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """What lies in the one run's folder in the bucket, by name."""
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    storage = open_storage(output)
    return {name.partition("/")[2]: storage.read(name) for name in storage.list()}
