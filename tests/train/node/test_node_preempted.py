"""The notice of a preemption and the ends that follow from it, as real processes."""

from __future__ import annotations

import os
import signal
import sys
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


# A rank and a worker of its loader, which any SIGTERM ends; the rank needs it until it has saved.
LOADING = """
import os, signal, subprocess, sys, time
from contextlib import ExitStack
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
def save(signum, frame):
    time.sleep(0.5)
    print("saved; worker's exit code:", worker.poll(), flush=True)
    with open(os.environ["LAUNCH_EXIT_FILE"], "a") as file:
        file.write("75\\n")
    os._exit(75)
signal.signal(15, save)
if "REGISTERS" in os.environ:
    from launch_train.script_api.session import listen_for_shutdown
    listen_for_shutdown(os.environ, ExitStack())
print("ready", flush=True)
time.sleep(100)
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


RANKS_OF_A_COMMAND = """
import multiprocessing, runpy
context = multiprocessing.get_context("spawn")
if __name__ == "__main__":
    ranks = [context.Process(target=runpy.run_path, args=("work.py",)) for _ in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    print("the ranks ended before their parent", flush=True)
    raise SystemExit(75)
"""


@pytest.mark.parametrize(
    ("how", "ranks"),
    [
        (("--script", "work.py"), 2),
        (("--launcher", "python", "--script", "work.py"), 1),
        (("--launcher", "python", "--script", "spawn.py"), 2),
        (("--command", "--", "sh", "-c", f"{sys.executable} work.py; sleep 100"), 1),
        (("--command", "--", "sh", "-c", f"{sys.executable} spawn.py; sleep 100"), 2),
    ],
)
def test_a_preempted_rank_has_its_loader_workers_until_it_has_saved(
    one: Machines, how: tuple[str, ...], ranks: int
) -> None:
    one.script(LOADING)
    one.script(RANKS_OF_A_COMMAND, "spawn.py")
    env = {"LAUNCH_PROCESSES": "2"} | ({} if how == ("--script", "work.py") else {"REGISTERS": "yes"})
    node = one.start(*how, env=env)
    until(lambda: node.text.count("ready") == ranks or node.process.poll() is not None, "the ranks")
    os.killpg(node.process.pid, signal.SIGTERM)  # as a terminal or a batch system does
    assert node.wait() == Exit.PREEMPTED, node.text
    assert node.text.count("saved; worker's exit code: None") == ranks, node.text
    assert one.left_over() == []


def test_a_command_without_registered_processes_gets_the_signal_as_a_group(one: Machines) -> None:
    one.script(LOADING)
    node = one.start("--command", "--", "sh", "-c", f"{sys.executable} work.py & {sys.executable} work.py & wait")
    until(lambda: node.text.count("ready") == 2, "both processes")
    node.send(signal.SIGTERM)
    assert node.wait() == 143  # the shell dies of it, and nobody waits for what it has started
    assert one.left_over() == []


def test_a_process_that_has_exited_is_no_longer_registered(one: Machines) -> None:
    """The command's second program gets the signal like its shell."""
    first = LOADING.replace("time.sleep(100)\n", "worker.kill(); os._exit(0)\n")
    one.script(LOADING)
    one.script(first, "first.py")
    assert first != LOADING
    command = f"REGISTERS=yes {sys.executable} first.py; exec {sys.executable} work.py"
    node = one.start("--command", "--", "sh", "-c", command)
    until(lambda: node.text.count("ready") == 2, "the second program")
    node.send(signal.SIGTERM)
    assert node.wait() == Exit.PREEMPTED, node.text
    assert node.text.count("saved;") == 1


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
