"""launch_train.node on several machines: real processes on loopback, gloo where ranks must meet."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch_train.common.contract import Exit
from tests.train.nodes import Machines, Node, machines, until

QUICK = {"lost": 3.0, "beat": 0.3, "line": 0.5, "settle": 0.3}

# All ranks meet, twice; between the two, rank 3 of generation 0 may be told to die.
MEET = """
import os, signal, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, total = dist.get_rank(), torch.ones(1)
dist.all_reduce(total)
generation = os.environ["LAUNCH_GENERATION"]
print(f"met {int(total)} rank {rank} node {os.environ['LAUNCH_NODE']} generation {generation}", flush=True)
if generation == "0" and rank == int(os.environ.get("DIES", -1)):
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(total)
dist.barrier()
os._exit(0)
"""

PLAIN = """
import os, sys, time
print("node", os.environ["LAUNCH_NODE"], "generation", os.environ["LAUNCH_GENERATION"], flush=True)
"""


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Machines]:
    with machines(tmp_path, 2) as found:
        yield found


def python(script: str) -> tuple[str, ...]:
    return ("--launcher", "python", "--script", script)


def generations(node: Node) -> list[str]:
    return re.findall(r"^node \d generation (\d+)$", node.text, re.M)


@pytest.mark.slow
def test_two_nodes_of_two_ranks_survive_a_killed_worker(two: Machines) -> None:
    script = two.script(MEET)
    nodes = [two.start("--script", script, node=n, env={"LAUNCH_PROCESSES": "2", "DIES": "3"}) for n in (1, 0)]
    assert [node.wait() for node in nodes] == [0, 0], nodes[0].text + nodes[1].text
    for number, node in zip((1, 0), nodes, strict=True):
        met = sorted(re.findall(r"met 4 rank (\d) node (\d) generation 1", node.text))
        assert met == [(str(2 * number + local), str(number)) for local in (0, 1)]
    assert "restarting (1 of 3" in nodes[1].text
    assert two.left_over() == []


def test_a_late_node_is_waited_for(two: Machines) -> None:
    first = two.start(*python(two.script(PLAIN)), node=0, timing=QUICK)
    first.await_text("waiting for node 1")
    assert generations(first) == []
    late = two.start(*python("work.py"), node=1)
    assert (first.wait(), late.wait()) == (0, 0)
    assert generations(first) == generations(late) == ["0"]


@pytest.mark.slow
def test_node_0_may_be_the_late_one(two: Machines) -> None:
    worker = two.start(*python(two.script(PLAIN)), node=1, timing=QUICK)
    worker.await_text("waiting for node 0 (127.0.0.1:")
    primary = two.start(*python("work.py"), node=0)
    assert (primary.wait(), worker.wait()) == (0, 0)


def test_node_0_leaves_last(two: Machines) -> None:
    primary = two.start(*python(two.script(PLAIN)), node=0)
    slow = two.start(*python("work.py"), node=1, timing={"tick": 0.5, "gather": 20.0})
    assert (slow.wait(), primary.wait()) == (0, 0), slow.text


def test_a_users_error_on_one_node_ends_both(two: Machines) -> None:
    script = two.script(
        PLAIN
        + "if os.environ['LAUNCH_NODE'] == '1':\n"
        + "    open(os.environ['LAUNCH_EXIT_FILE'], 'a').write('2\\n')\n"
        + "    os._exit(2)\n"
        + "time.sleep(100)\n"
    )
    nodes = [two.start(*python(script), node=n) for n in (0, 1)]
    assert [node.wait() for node in nodes] == [2, 2], nodes[0].text + nodes[1].text
    assert generations(nodes[0]) == generations(nodes[1]) == ["0"]
    assert "node 1" in (two.run_folder / "terminal").read_text()
    assert two.left_over() == []


@pytest.mark.slow
def test_a_machine_that_is_not_fit_ends_both(two: Machines) -> None:
    primary = two.start(*python(two.script(PLAIN)), node=0)
    (two.folder / "file").write_text("")
    worker = two.start(*python("work.py"), node=1, env={"LAUNCH_RUN_FOLDER": str(two.folder / "file" / "run")})
    assert (primary.wait(), worker.wait()) == (Exit.UNFIT, Exit.UNFIT), primary.text + worker.text
    assert "can't be" in primary.text
    assert generations(primary) == []


@pytest.mark.slow
def test_a_replaced_node_joins_the_next_generation(two: Machines) -> None:
    script = two.script(PLAIN + "while not os.path.exists('go'): time.sleep(0.05)\n")
    primary = two.start(*python(script), node=0, timing=QUICK)
    worker = two.start(*python(script), node=1, timing=QUICK)
    until(lambda: generations(primary) == generations(worker) == ["0"], "generation 0")
    worker.send(signal.SIGKILL)
    worker.wait()
    again = two.start(*python(script), node=1, timing=QUICK)
    until(lambda: generations(primary) == ["0", "1"] and generations(again) == ["1"], "generation 1")
    (two.folder / "go").touch()
    assert (primary.wait(), again.wait()) == (0, 0)
    assert two.left_over() == []


@pytest.mark.slow
def test_a_vanished_node_does_not_hang_the_others(two: Machines) -> None:
    script = two.script(PLAIN + "time.sleep(100)\n")
    primary = two.start(*python(script), node=0, timing=QUICK | {"gather": 10.0})
    worker = two.start(*python(script), node=1)
    until(lambda: generations(primary) == generations(worker) == ["0"], "generation 0")
    worker.send(signal.SIGKILL)
    assert primary.wait() == Exit.FAILED
    assert "node 1: no heartbeat for 3 s; restarting" in primary.text
    assert "node 1 did not join within 10 s" in primary.text
    assert not (two.run_folder / "terminal").exists()  # with a machine in its place it can go on
    assert two.left_over() == []


@pytest.mark.slow
def test_a_replaced_node_0_is_found_again(two: Machines) -> None:
    script = two.script(PLAIN + "while not os.path.exists('go'): time.sleep(0.05)\n")
    primary, worker = (two.start(*python(script), node=n, timing=QUICK) for n in (0, 1))
    until(lambda: generations(primary) == generations(worker) == ["0"], "generation 0")
    primary.send(signal.SIGKILL)
    primary.wait()
    worker.await_text("node 0 no longer responds")
    again = two.start(*python(script), node=0, timing=QUICK)
    until(lambda: generations(again) == ["1"] and generations(worker) == ["0", "1"], "generation 1")
    (two.folder / "go").touch()
    assert (again.wait(), worker.wait()) == (0, 0)


@pytest.mark.slow
def test_a_frozen_node_0_is_given_up_and_joined_again_when_it_wakes(two: Machines) -> None:
    script = two.script(PLAIN + "while not os.path.exists('go'): time.sleep(0.05)\n")
    primary, worker = (two.start(*python(script), node=n, timing=QUICK | {"lost": 1.5}) for n in (0, 1))
    until(lambda: generations(primary) == generations(worker) == ["0"], "generation 0")
    primary.send(signal.SIGSTOP)  # unlike a killed one, it closes no connection
    worker.await_text("node 0 no longer responds")
    primary.send(signal.SIGCONT)
    until(lambda: generations(primary) == generations(worker) == ["0", "1"], "generation 1")
    (two.folder / "go").touch()
    assert (primary.wait(), worker.wait()) == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("told", [0, 1])
def test_a_signal_to_one_node_ends_both_without_success(two: Machines, told: int) -> None:
    script = two.script(
        "import os, signal\n"
        + PLAIN
        + "def saved(*_):\n"
        + "    open(os.environ['LAUNCH_EXIT_FILE'], 'a').write('75\\n')\n"
        + "    os._exit(75)\n"
        + "signal.signal(15, saved)\n"
        + "open('ready' + os.environ['LAUNCH_NODE'], 'w').close()\n"
        + "time.sleep(100)\n"
    )
    nodes = [two.start(*python(script), node=n, timing=QUICK) for n in (0, 1)]
    until(lambda: all((two.folder / f"ready{n}").exists() for n in (0, 1)), "both scripts")
    start = time.monotonic()
    nodes[told].send(signal.SIGTERM)
    assert [node.wait() for node in nodes] == [Exit.PREEMPTED, Exit.PREEMPTED], nodes[0].text + nodes[1].text
    assert time.monotonic() - start < 20  # far below the 30 s after which it would be killed
    assert two.left_over() == []


def test_a_signal_while_waiting_is_obeyed_at_once(two: Machines) -> None:
    worker = two.start(*python(two.script(PLAIN)), node=1, timing=QUICK)
    worker.await_text("waiting for node 0")
    worker.send(signal.SIGTERM)
    assert worker.wait() == 143


@pytest.mark.slow
@pytest.mark.parametrize("began", [False, True])
def test_a_signal_to_a_node_that_waits_for_another_ends_all_soon(tmp_path: Path, began: bool) -> None:
    with machines(tmp_path, 3) as three:
        script = three.script(PLAIN + "time.sleep(100)\n")
        nodes = [three.start(*python(script), node=n, timing=QUICK) for n in range(3 if began else 2)]
        if began:
            until(lambda: [generations(node) for node in nodes] == [["0"]] * 3, "generation 0")
            nodes[2].send(signal.SIGKILL)
        until(lambda: "launch: waiting for node 2 (" in nodes[0].text, "node 0 to wait for node 2 alone")
        start = time.monotonic()
        nodes[1].send(signal.SIGTERM)
        assert [node.wait() for node in nodes[:2]] == [143, 143], nodes[0].text + nodes[1].text
        assert time.monotonic() - start < 10
