"""What a node told to stop remembers, and how much time it has left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from math import inf
from pathlib import Path
from types import SimpleNamespace

import pytest

from launch_train.common import contract
from launch_train.node import generation
from launch_train.node.cluster import Cluster
from launch_train.node.command import Task
from launch_train.node.control_store import GenerationSpec, Member, Store, Timing
from launch_train.node.generation import LaunchPlan, StopRequest, give_notice, run_generation
from tests.train.alone import alone

TIMING = Timing(grace=22, last=3)


def test_the_first_signal_counts_and_only_a_second_ctrl_c_hurries() -> None:
    stop, before = StopRequest(), time.time()
    stop.note(signal.SIGTERM, ctrl_c=False)
    first = replace(stop)
    stop.note(signal.SIGTERM, ctrl_c=False, seconds=600)
    assert stop == first
    assert before <= stop.when <= time.time()
    stop.note(signal.SIGINT, ctrl_c=True)
    stop.note(signal.SIGTERM, ctrl_c=False)
    assert stop == replace(first, hurry=True)
    assert not _told(signal.SIGINT).hurry


@pytest.mark.parametrize(
    ("since", "gone", "left"),
    [
        (0, inf, 3),  # told between two generations, just now
        (10, 0, 3),  # the processes took 10 s
        (10, 2, 1),
        (10, 4, 0),
        (24, 2, 1),  # never more than grace + last after the signal
        (30, 0, 0),
        (1, 100, 2),  # they had gone long before
    ],
)
def test_what_is_left_after_a_signal_fits_into_the_graces(since: float, gone: float, left: float) -> None:
    now = time.monotonic()
    stop = StopRequest(signal.SIGTERM, since=now - since, until=now - since + 30, exited=now - gone)
    assert stop.left(now + 100, TIMING) == pytest.approx(left, abs=0.2)
    assert stop.left(now + 0.5, TIMING) <= 0.5
    assert replace(stop, hurry=True).left(now + 100, TIMING) == 0


def test_a_longer_notice_moves_the_graces_until_the_machine_ends_earlier() -> None:
    stop = StopRequest()
    stop.note(signal.SIGTERM, ctrl_c=False, seconds=600)
    assert stop.kill_at(TIMING) - stop.since == pytest.approx(592, abs=0.1)
    assert replace(stop, exited=stop.since + 590).left(inf, TIMING) == pytest.approx(593, abs=0.2)
    since = stop.since
    stop.note(signal.SIGTERM, ctrl_c=False)
    assert stop.since == since
    assert stop.kill_at(TIMING) - since == pytest.approx(22, abs=0.1)


def test_without_a_signal_there_is_the_time_that_was_asked_for() -> None:
    assert StopRequest().left(time.monotonic() + 100, TIMING) == pytest.approx(100, abs=0.2)


def test_the_notice_is_whole_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "notice"
    path.with_suffix(".new").touch()
    assert not path.exists()
    give_notice(path, StopRequest(signal.SIGTERM, when=1234.5, since=10, until=40))
    assert path.read_text() == "1234.5 1264.5\n"


def test_a_notice_that_can_not_be_written_is_given_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "notice"
    path.with_suffix(".new").touch()
    path.with_suffix(".new").unlink()
    path.with_suffix(".new").symlink_to("/dev/full")  # no space left on device
    give_notice(path, _told(signal.SIGTERM))
    assert path.is_symlink()


def _told(signum: int) -> StopRequest:
    stop = StopRequest()
    stop.note(signum, ctrl_c=signum == signal.SIGINT)
    return stop


@pytest.mark.parametrize(
    ("node", "task", "looks"),
    [
        (0, Task("python", "command", "", ("sleep", "2")), True),
        (1, Task("python", "command", "", ("sleep", "2")), True),
        (0, Task("python", "module", "launch_train.profiling.__main__", ("--help",)), False),
    ],
)
@alone
def test_the_node_looks_at_the_machine_where_the_trainer_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node: int, task: Task, looks: bool
) -> None:
    monkeypatch.setattr(generation, "MONITOR_SECONDS", 0.01)
    monkeypatch.setattr(generation, "CLOSE_SECONDS", 20)
    folder, secret = tmp_path / "run", {"TOKEN": "never told"}
    env = {**os.environ, contract.RUN_FOLDER: str(folder)}
    cluster = Cluster(("localhost:1", "localhost:2"), node)
    plan = LaunchPlan(task, cluster, env, 1, 0, tmp_path, "demo-1", secrets=secret)
    member = Member(Store(), node, TIMING)
    order = GenerationSpec(2, 1, 0, (member.incarnation,) * 2)
    member.state = lambda: SimpleNamespace(phase="run", generation=2)  # type: ignore[method-assign,assignment,return-value]
    assert run_generation(plan, order, member, TIMING, StopRequest()).code == 0
    member.close()
    parts = [path.name for path in folder.glob("monitor/*")]
    assert parts == ([f"0001-0002-000{node}-000000.jsonl"] if looks else [])
    if looks:
        rows = [json.loads(line) for line in (folder / "monitor" / parts[0]).read_text().splitlines()]
        assert rows[-1]["host"]["ram_gb"] > 0


def test_nothing_of_the_monitor_loads_torch() -> None:
    """It looks beside a script that may have no torch at all."""
    code = "import sys; from launch_train.monitoring import monitor, host, nvml; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize("fault", [OSError(28, "No space left on device"), BlockingIOError(11, "Try again")])
@pytest.mark.parametrize("what", ["tempfile.mkdtemp", "os.posix_spawn"])
@alone
def test_a_machine_that_starts_nothing_for_now_is_an_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, fault: OSError
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise fault

    monkeypatch.setattr(what, fails)
    plan = LaunchPlan(
        Task("python", "command", "", ("true",)), Cluster(("localhost:1",), 0), {}, 1, 0, tmp_path, "demo-1"
    )
    member = Member(Store(), 0, TIMING)
    outcome = run_generation(
        plan, GenerationSpec(0, 1, 0, (member.incarnation,)), member, TIMING, _told(signal.SIGTERM)
    )
    member.close()
    assert (outcome.code, outcome.signum, outcome.ok) == (1, signal.SIGTERM, False)
    assert str(outcome) == f"node 0: the command could not be started: {fault.strerror}"
