"""Ranks that are forked from a torchrun that has imported PyTorch, and the torchrun that waits for a failure."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from launch_train import runfolder
from launch_train.common import contract
from launch_train.common.contract import Exit
from launch_train.node import torchrun_preloaded
from tests.train.nodes import REPOSITORY, Machines, Node, machines, until
from tests.train.trials import CONFIG, losses

LASTING = {**CONFIG, "steps": 10**6, "eval": {"every": 0}, "monitor": 0, "checkpoint": {"minutes": 0.01}}
PRELOADED = "torchrun_preloaded.py"


@pytest.fixture
def one(tmp_path: Path) -> Iterator[Machines]:
    with machines(tmp_path) as found:
        yield found


def start(crew: Machines, config: dict[str, Any], **env: str) -> Node:
    return crew.start(env={contract.CONFIG: json.dumps(config), contract.PROCESSES: "2", **env})


def processes(crew: Machines) -> dict[int, tuple[str, list[str]]]:
    """Name and command line of each process in the folder."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (entry / "cwd").readlink() == crew.folder:
                line = (entry / "cmdline").read_bytes().decode().split("\0")[:-1]
                found[int(entry.name)] = ((entry / "comm").read_text().strip(), line)
        except OSError:
            continue
    return found


def rank(crew: Machines, number: int) -> int:
    """Process id of a rank, 0 if it does not run. A DataLoader worker is a fork of its rank, with its name."""
    named = {pid for pid, (name, _) in processes(crew).items() if name == f"rank {number}"}
    return next((pid for pid in named if parent(pid) not in named), 0)


def standby(crew: Machines, node: Node) -> int:
    """Process id of the torchrun that waits for its arguments, 0 if there is none."""
    running = {pid: line for pid, (_, line) in processes(crew).items() if PRELOADED in " ".join(line)}
    children = [pid for pid, line in running.items() if line[-1] == "launch_train" and parent(pid) == node.process.pid]
    busy = {parent(rank(crew, 0)), parent(rank(crew, 1))}
    return next((pid for pid in children if pid not in busy), 0)


def parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:  # it has exited
        return 0


def has_imported(pid: int) -> bool:
    """Whether the standby has imported PyTorch and waits: one thread, which reads a pipe."""
    return "pipe_read" in Path(f"/proc/{pid}/wchan").read_text() and len([*Path(f"/proc/{pid}/task").iterdir()]) == 1


def rows(crew: Machines) -> list[dict[int, float]]:
    """Losses by step of each generation, without those of one rank, which the survivor of a killed one writes."""
    generations: dict[str, dict[int, float]] = {}
    for part in sorted((crew.run_folder / runfolder.METRICS).glob("0*.jsonl")):
        for line in part.read_text().splitlines():
            row = json.loads(line)
            if "event" not in row and "ranks" not in row:
                generations.setdefault(part.name.split("-")[1], {})[row["step"]] = row["loss"]
    return list(generations.values())


def await_row(crew: Machines, generations: int) -> None:
    until(lambda: len(rows(crew)) >= generations, f"a row of generation {generations - 1}")


def kill_rank(crew: Machines, number: int) -> None:
    """Kill a rank once a step is durable: else the failures would add up."""
    latest = crew.run_folder / runfolder.LATEST
    before = latest.stat().st_mtime if latest.exists() else 0.0
    until(lambda: latest.exists() and latest.stat().st_mtime > before, "another checkpoint")
    until(lambda: rank(crew, number) > 0, f"rank {number}")
    os.kill(rank(crew, number), signal.SIGKILL)


@pytest.mark.slow
def test_each_restart_takes_the_process_that_waits(one: Machines) -> None:
    """With the next one ready, while it still imports, and after it was killed: each time no step is lost or computed
    in another way, and at the end no process is left."""
    node = start(one, LASTING)
    await_row(one, 1)
    until(lambda: standby(one, node) > 0, "a process that waits")
    ready = standby(one, node)
    until(lambda: has_imported(ready), "its imports")
    assert os.getpgid(rank(one, 0)) == rank(one, 0)
    kill_rank(one, 0)
    await_row(one, 2)
    assert parent(rank(one, 0)) == parent(rank(one, 1)) == ready
    until(lambda: standby(one, node) > 0, "the next process that waits")
    importing = standby(one, node)
    os.kill(importing, signal.SIGSTOP)
    kill_rank(one, 1)
    os.kill(importing, signal.SIGCONT)
    await_row(one, 3)
    assert parent(rank(one, 1)) == importing
    until(lambda: standby(one, node) > 0, "a third process that waits")
    killed = standby(one, node)
    os.kill(killed, signal.SIGKILL)
    kill_rank(one, 0)
    await_row(one, 4)
    assert parent(rank(one, 0)) != killed
    until(lambda: standby(one, node) > 0, "a fourth process that waits")
    node.send(signal.SIGTERM)
    assert node.wait() == Exit.PREEMPTED, node.text
    assert one.left_over() == []
    generations = rows(one)
    assert len(generations) == 4
    assert node.text.count("; restarting (1 of ") == 3
    for earlier, later in pairwise(generations):
        assert min(later) <= max(earlier) + 1
        different = {
            step: (loss, later[step]) for step, loss in earlier.items() if step in later and later[step] != loss
        }
        assert different == {}, (min(later), max(earlier))


@pytest.mark.slow
def test_a_killed_node_leaves_no_process_that_waits(one: Machines) -> None:
    node = start(one, LASTING)
    until(lambda: standby(one, node) > 0, "a process that waits")
    node.send(signal.SIGKILL)
    node.wait()
    until(lambda: one.left_over() == [], "the end of all processes", 60)


@pytest.mark.slow
def test_a_forked_rank_computes_the_bits_of_a_process(tmp_path: Path) -> None:
    """A user's sitecustomize.py, which must run in each rank, makes them processes of their own."""
    ended = []
    for name in ("forked", "processes"):
        (tmp_path / name).mkdir()
        with machines(tmp_path / name) as one:
            if name == "processes":
                one.script("import os; print('sees rank', os.environ.get('RANK'))", "sitecustomize.py")
            config = {**CONFIG, "steps": 12, "loader": {"workers": 1}, "monitor": 0}
            node = start(one, config, PYTHONPATH=f"{one.folder}:{REPOSITORY}")
            assert node.wait() == Exit.OK, node.text
            assert ("sees rank 1" in node.text) == (name == "processes")
            assert one.left_over() == []
            ended.append(losses(one.run_folder))
    assert list(ended[0]) == list(range(1, 13))
    assert ended[0] == ended[1]


def test_variables_that_are_none_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", os.environ.copy())
    torchrun_preloaded.set_environ({"A": "1", "B": None})
    assert dict(os.environ) == {"A": "1"}


def test_a_fork_waits_for_the_thread_that_imported_to_end() -> None:
    """A native thread outlives `join` by some milliseconds, in which MKL's lock may be held: a rank would hang."""
    program = """
import threading, time
from launch_train.node import torchrun_preloaded
torchrun_preloaded.ENDING_SECONDS = 0.5
for seconds in (0.1, 60):
    threading.Thread(target=time.sleep, args=(seconds,), daemon=True).start()
    print(torchrun_preloaded.is_alone())
"""
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY / "train")}
    ran = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["True", "False"]
