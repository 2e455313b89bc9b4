"""The notice of a preemption and the ends that follow from it, as real processes."""

from __future__ import annotations

import signal
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch_train.common.contract import Exit
from tests.train.nodes import Machines, Node, machines, until

QUICK = {"lost": 3.0, "beat": 0.3, "line": 0.5}

# As a trainer does: with the notice, SIGTERM means save and leave; without it, leave at once. The nodes agree through
# files. Whether there was a notice, and what it held, is kept.
TRAINER = """
import os, pathlib, signal, sys, time
node, generation = os.environ["LAUNCH_NODE"], os.environ["LAUNCH_GENERATION"]
notice = pathlib.Path(os.environ["LAUNCH_NOTICE"])
def leave(code):
    with open(os.environ["LAUNCH_EXIT_FILE"], "a") as file:
        file.write(f"{code}\\n")
    os._exit(code)
def told(signum, frame):
    with open(f"told-{node}-{generation}", "a") as file:
        file.write(f"{signum} {notice.read_text() if notice.exists() else 'no notice'}\\n")
    if not notice.exists():
        os._exit(143)
    pathlib.Path("save").touch()
for signum in (2, 15):
    signal.signal(signum, told)
assert not notice.exists()
print("notice at", notice, flush=True)
pathlib.Path(f"ready-{node}-{generation}").touch()
while not os.path.exists("save"):
    time.sleep(0.01)
time.sleep(float(os.environ.get("SAVING", "0")))
leave(int(os.environ.get("CODE", "75")))
"""


@pytest.fixture
def one(tmp_path: Path) -> Iterator[Machines]:
    with machines(tmp_path) as found:
        yield found


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Machines]:
    with machines(tmp_path, 2) as found:
        yield found


def start(crew: Machines, node: int = 0, *, launcher: str = "python", script: str = TRAINER, **env: str) -> Node:
    argv = ("--launcher", launcher, "--script", crew.script(script))
    return crew.start(*argv, node=node, env=env, timing=QUICK | {"leave": 1.0})


def ready(crew: Machines, *names: str) -> None:
    until(lambda: all((crew.folder / f"ready-{name}").exists() for name in names), "the processes")


def told(crew: Machines, name: str) -> list[str]:
    path = crew.folder / f"told-{name}"
    return path.read_text().split("\n")[:-1] if path.exists() else []


def heard(line: str) -> float:
    """The Unix time in the notice."""
    return float(line.split()[1])


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_the_notice_is_there_before_the_signal_and_says_when(one: Machines, signum: int) -> None:
    node = start(one)
    ready(one, "0-0")
    before = time.time()
    node.send(signum)
    assert node.wait() == Exit.PREEMPTED, node.text
    line = told(one, "0-0")[0]
    assert before <= heard(line) < before + 2
    assert line.startswith(f"{int(signum)} ")


def test_more_signals_change_nothing(one: Machines) -> None:
    node = start(one, SAVING="0.6")
    ready(one, "0-0")
    node.send(signal.SIGTERM)
    until(lambda: told(one, "0-0") != [], "the first signal")
    for _ in range(3):
        node.send(signal.SIGTERM)
        time.sleep(0.1)
    assert node.wait() == Exit.PREEMPTED
    assert len([line for line in told(one, "0-0") if line]) == 1


def test_every_rank_of_torchrun_has_the_notice(one: Machines) -> None:
    script = TRAINER.replace('node, generation = os.environ["LAUNCH_NODE"]', 'node, generation = os.environ["RANK"]')
    node = start(one, launcher="torchrun", script=script, LAUNCH_PROCESSES="2")
    ready(one, "0-0", "1-0")
    node.send(signal.SIGTERM)
    assert node.wait() == Exit.PREEMPTED, node.text
    assert len({heard(told(one, f"{rank}-0")[0]) for rank in (0, 1)}) == 1


@pytest.mark.parametrize("told_node", [0, 1])
def test_one_node_is_preempted_and_all_save_and_end_with_75(two: Machines, told_node: int) -> None:
    nodes = [start(two, node) for node in (0, 1)]
    ready(two, "0-0", "1-0")
    nodes[told_node].send(signal.SIGTERM)
    assert [node.wait() for node in nodes] == [Exit.PREEMPTED, Exit.PREEMPTED], nodes[0].text + nodes[1].text
    assert told(two, f"{1 - told_node}-0") == []  # it left by itself, undisturbed
    assert not (two.run_folder / "terminal").exists()
    assert two.left_over() == []


@pytest.mark.slow
def test_a_notice_is_taken_back_once_another_node_reports_a_failure(two: Machines) -> None:
    """The processes would wait for those that have failed, as long as a save fits into the grace."""
    waits = """
        if node == '1':
            while not os.path.exists('told-0-0'): time.sleep(0.01)
            os._exit(9)
        while not os.path.exists('told-0-0'): time.sleep(0.01)
        while notice.exists(): time.sleep(0.01)
        pathlib.Path('taken-back').touch()
        os._exit(143)
    """
    script = TRAINER.replace("while not", f"{textwrap.dedent(waits)}\nwhile not", 1)
    nodes = [start(two, node, script=script) for node in (0, 1)]
    ready(two, "0-0", "1-0")
    nodes[0].send(signal.SIGTERM)
    until((two.folder / "taken-back").exists, "the end of the notice", limit=10)
    assert [node.wait() for node in nodes] == [143, 143], nodes[0].text + nodes[1].text


@pytest.mark.slow
def test_a_node_whose_peer_has_failed_gets_no_notice_and_each_generation_has_a_path_of_its_own(two: Machines) -> None:
    fails = "if (node, generation) == ('1', '0'):\n    os._exit(9)\n"
    script = TRAINER.replace("while not", fails + "while not", 1)
    nodes = [start(two, node, script=script, CODE="0") for node in (0, 1)]
    ready(two, "0-1", "1-1")
    assert told(two, "0-0") == ["15 no notice"]
    nodes[0].send(signal.SIGTERM)
    assert [node.wait() for node in nodes] == [Exit.OK, Exit.OK]  # this time the work was done
    paths = [line for line in nodes[0].text.splitlines() if line.startswith("notice at ")]
    assert len(set(paths)) == 2


@pytest.mark.slow
def test_a_node_that_hears_nothing_of_the_others_ends_as_its_own_processes_did(two: Machines) -> None:
    primary, worker = (start(two, node) for node in (0, 1))
    ready(two, "0-0", "1-0")
    primary.send(signal.SIGSTOP)
    worker.send(signal.SIGTERM)
    began = time.monotonic()
    assert worker.wait() == Exit.PREEMPTED, worker.text
    assert time.monotonic() - began < 10
    primary.send(signal.SIGCONT)
    primary.send(signal.SIGKILL)


@pytest.mark.slow
def test_who_has_saved_does_not_wait_for_a_node_0_that_has_gone(two: Machines) -> None:
    primary, worker = start(two, 0, SAVING="100"), start(two, 1)
    ready(two, "0-0", "1-0")
    (two.folder / "save").touch()
    until(
        lambda: len(two.left_over()) == 3, "the end of one script", limit=10
    )  # two nodes and node 0's script are left
    primary.send(signal.SIGKILL)
    assert worker.wait() == Exit.PREEMPTED
    assert "waiting for it to return" not in worker.text


@pytest.mark.slow
def test_a_run_that_another_start_has_taken_over_ends_everywhere_and_writes_nothing(two: Machines) -> None:
    nodes = [start(two, 0), start(two, 1, CODE="77")]
    ready(two, "0-0", "1-0")
    (two.folder / "save").touch()
    assert [node.wait() for node in nodes] == [Exit.SUPERSEDED, Exit.SUPERSEDED], nodes[0].text + nodes[1].text
    assert "node 1: another start of this run has taken over (exit code 77)" in nodes[0].text
    assert not (two.run_folder / "terminal").exists()
