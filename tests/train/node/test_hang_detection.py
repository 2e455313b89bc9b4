"""Processes that hang, whatever in: their stacks are in the run folder, and they are started again."""

from __future__ import annotations

import json
import math
import os
import pickle
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch_train import runfolder
from launch_train.common import contract, heartbeat
from launch_train.common.contract import Exit
from launch_train.common.heartbeat import Beat, Heartbeat
from launch_train.node import hang_detection
from launch_train.node.hang_detection import HangDetector
from tests.train.node.test_notify import Hook
from tests.train.nodes import REPOSITORY, Machines, machines
from tests.train.trials import CONFIG, losses

QUICK = {"lost": 3.0, "beat": 0.3, "line": 0.5}

SCRIPT = """
import ctypes, os, sys, time
sys.path.append(os.environ["REPOSITORY"])
from launch_train.common.heartbeat import Heartbeat
print("started", flush=True)
def stuck():
    HOW
if os.environ["LAUNCH_GENERATION"] == "0":
    Heartbeat(os.environ).expect(float(os.environ["EXPECTED"]))
    stuck()
"""
WAYS = {
    "sleeps": "time.sleep(60)",
    "holds the interpreter": "ctypes.PyDLL(None).sleep(60)",
    "ignores SIGTERM": "import signal; signal.signal(15, signal.SIG_IGN); time.sleep(60)",
}


@pytest.fixture
def one(tmp_path: Path) -> Iterator[Machines]:
    with machines(tmp_path) as found:
        yield found


def environ(**more: str) -> dict[str, str]:
    return {"REPOSITORY": str(REPOSITORY), "EXPECTED": "0.5", **more}


def stacks(crew: Machines, node: int = 0) -> str:
    return (crew.run_folder / runfolder.stacks(1, 0, node)).read_text()


@pytest.mark.slow
@pytest.mark.parametrize("how", WAYS)
def test_a_process_that_hangs_is_started_again(one: Machines, how: str) -> None:
    script = one.script(SCRIPT.replace("HOW", WAYS[how]))
    node = one.start("--launcher", "python", "--script", script, env=environ(), timing=QUICK)
    assert node.wait() == Exit.OK, node.text
    assert "in stuck" in stacks(one)
    assert node.text.count("hung: no progress for") == 1
    assert "restarting (1 of 3" in node.text
    assert not (one.run_folder / runfolder.TERMINAL).exists()


@pytest.mark.slow
def test_ranks_that_hang_all_write_their_stacks(tmp_path: Path) -> None:
    """On every node, though the first that notices ends the others."""
    with machines(tmp_path, 2) as two:
        script = two.script(SCRIPT.replace("HOW", "time.sleep(60)"))
        env = environ(LAUNCH_PROCESSES="2", LAUNCH_RESTARTS="0", EXPECTED="2")
        nodes = [two.start("--script", script, node=node, env=env, timing=QUICK) for node in (0, 1)]
        assert [node.wait() for node in nodes] == [Exit.FAILED, Exit.FAILED], nodes[0].text + nodes[1].text
        assert [stacks(two, node).count("in stuck") for node in (0, 1)] == [2, 2]
        ranks = [re.findall(r"^rank (\d)", stacks(two, node), re.MULTILINE) for node in (0, 1)]
        assert [sorted(found) for found in ranks] == [["0", "1"], ["2", "3"]]


@pytest.mark.slow
@pytest.mark.parametrize(("after", "restarts"), [("", 0), ("4", 1)])
def test_a_script_hangs_only_by_its_own_setting(one: Machines, after: str, restarts: int) -> None:
    """After its last line, or its last row."""
    text = (
        "import os, time\nprint('started')\n"
        "for _ in range(4): time.sleep(0.6); print('works')\n"
        f"time.sleep(0 if os.environ['LAUNCH_GENERATION'] != '0' else {20 if after else 4})"
    )
    env = environ() | ({contract.HANG_AFTER: after} if after else {})
    node = one.start("--launcher", "python", "--script", one.script(text), env=env, timing=QUICK)
    assert node.wait() == Exit.OK, node.text
    assert node.text.count("hung: no progress for") == restarts
    assert node.text.count("works") == 4 * (1 + restarts)


@pytest.mark.slow
def test_a_command_that_is_no_python_is_started_again_too(one: Machines) -> None:
    command = ("sh", "-c", "echo started; [ $LAUNCH_GENERATION != 0 ] || sleep 60")
    with Hook() as hook:
        told = json.dumps({"webhook": hook.url, "on": ["stalled", "finished"]})
        env = {contract.HANG_AFTER: "1", contract.NOTIFY: told}
        node = one.start("--command", "--", *command, env=env, timing=QUICK)
        assert node.wait() == Exit.OK, node.text
    assert node.text.count("hung: no progress for") == 1
    assert [body["event"] for body in hook.bodies] == ["stalled", "finished"]
    assert not (one.run_folder / "stacks").exists()


@pytest.mark.slow
def test_a_silent_script_that_logs_metrics_does_not_hang(one: Machines) -> None:
    text = (
        "import os, sys, time\nsys.path.append(os.environ['REPOSITORY'])\nfrom launch_train import metrics\n"
        "for step in range(1, 11): metrics.log(step, loss=1.0); time.sleep(0.5)\n"
    )
    env = environ() | {contract.HANG_AFTER: "4"}
    node = one.start("--launcher", "python", "--script", one.script(text), env=env, timing=QUICK)
    assert node.wait() == Exit.OK, node.text
    assert "hung" not in node.text


@pytest.mark.slow
def test_the_trainer_hangs_in_a_step_and_goes_on_from_its_checkpoint(one: Machines) -> None:
    hook = (
        "import os, sys, time\n"
        "class Late:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'launch_train.trainer.train':\n"
        "            import launch_train.performance.optimizer as optim\n"
        "            real = optim.learning_rate\n"
        "            def learning_rate(step, *rest):\n"
        "                if step == 9 and os.environ['LAUNCH_GENERATION'] == '0':\n"
        "                    time.sleep(60)\n"
        "                return real(step, *rest)\n"
        "            optim.learning_rate = learning_rate\n"
        "sys.meta_path.insert(0, Late())\n"
    )
    one.script(hook, "sitecustomize.py")
    short = {"steps": 10, "optimizer": {"warmup_steps": 2}, "eval": {"every": 0}}
    config = {**CONFIG, **short, "monitor": 0, "hang_after": 10, "checkpoint": {"minutes": 1e-6}}
    env = environ(OMP_NUM_THREADS="1", PYTHONPATH=f"{one.folder}:{REPOSITORY}")
    env |= {contract.CONFIG: json.dumps(config)}
    node = one.start(env=env, timing=QUICK)
    assert node.wait() == Exit.OK, node.text
    assert node.text.count("hung: no progress for") == 1
    assert "in train_step" in stacks(one)
    assert list(losses(one.run_folder)) == list(range(1, 11))


# --- Without processes -----------------------------------------------------------------------------------------------


def test_the_heartbeat_is_read_from_another_process(tmp_path: Path) -> None:
    heartbeat.create_heartbeat(tmp_path)
    assert heartbeat.newest_beat(tmp_path).deadline == math.inf
    line, before = Heartbeat({contract.WATCH: str(tmp_path)}), time.monotonic()
    line.expect(5)
    assert before <= heartbeat.newest_beat(tmp_path).last <= time.monotonic()
    assert heartbeat.newest_beat(tmp_path).deadline == heartbeat.newest_beat(tmp_path).last + 5
    line.expect(math.inf)
    assert heartbeat.newest_beat(tmp_path).deadline == math.inf


def test_without_a_node_there_is_no_heartbeat(tmp_path: Path) -> None:
    Heartbeat({}).expect(1)
    Heartbeat({contract.WATCH: str(tmp_path / "gone")}).expect(1)
    assert heartbeat.newest_beat(tmp_path).deadline == math.inf


@pytest.mark.parametrize(
    ("text", "late", "hung"),
    [
        (b'File "/x/train/launch_train/trainer/train.py", line 1 in gradients', 1, True),
        (b'File "/x/torch/_dynamo/convert_frame.py", line 1 in __call__', 1, False),
        (b'File "/x/torch/_dynamo/eval_frame.py", line 1 in _fn', 1, True),
        (b'File "/x/torch/_inductor/graph.py", line 1 in run', 1, False),
        (b'File "/x/torch/_inductor/graph.py", line 1 in run', hang_detection.COMPILE_S + 1, True),
    ],
)
def test_compiling_again_is_no_hang_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: bytes, late: float, hung: bool
) -> None:
    found, now = HangDetector(tmp_path, None, lambda: -math.inf), time.monotonic()
    monkeypatch.setattr(heartbeat, "newest_beat", lambda folder: Beat(now - late - 60, now - late))
    monkeypatch.setattr(found, "stacks", lambda: text)
    assert found.found() == (text if hung else None)


def test_progress_while_the_stacks_are_written_is_no_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, line = HangDetector(tmp_path, None, lambda: -math.inf), Heartbeat({contract.WATCH: str(tmp_path)})
    line.expect(-1)

    def stacks() -> bytes:
        line.expect(60)
        return b"stacks"

    monkeypatch.setattr(found, "stacks", stacks)
    assert found.found() is None


def test_a_line_of_output_does_not_shorten_what_was_announced(tmp_path: Path) -> None:
    """A checkpoint that a script waits for; another of its processes prints meanwhile."""
    heard = time.monotonic() + 1
    found, line = HangDetector(tmp_path, 5.0, lambda: heard), Heartbeat({contract.WATCH: str(tmp_path)})
    assert found._beat() == Beat(heard, heard + 5.0)
    line.expect(1800)
    assert found._beat() == Beat(heard, heartbeat.newest_beat(tmp_path).deadline)
    line.expect(1)
    assert found._beat() == Beat(heard, heard + 5.0)


def test_stacks_have_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = HangDetector(tmp_path, None, lambda: -math.inf)
    monkeypatch.setattr(hang_detection, "WRITE_S", 0.0)
    monkeypatch.setattr(hang_detection, "descendants", lambda root: set(range(1, 100)))
    monkeypatch.setattr(hang_detection, "_handles_signal", lambda pid: True)
    monkeypatch.setattr(hang_detection, "rank_of", lambda pid: None)
    monkeypatch.setattr(os, "kill", lambda pid, signum: (tmp_path / str(pid)).write_bytes(b"x" * 100_000))
    for pid in range(1, 100):
        (tmp_path / str(pid)).touch()
    assert len(found.stacks()) == hang_detection.STACKS_BYTES


RECORDED = """
import os, threading, time
from contextlib import suppress
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace
from launch_train.common.heartbeat import Heartbeat

rank = os.environ["RANK"]

def monitor():
    '''As NCCL's monitor thread in torch: it polls a pipe, and writes the dump to a file of the rank.'''
    pipe = os.environ["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] + rank + ".pipe"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    requested = b""
    while not requested:
        time.sleep(0.2)
        with suppress(BlockingIOError):
            requested = os.read(reading, 128)
    with open(os.environ["TORCH_FR_DUMP_TEMP_FILE"] + rank, "wb") as file:
        file.write(_dump_fr_trace(includeStackTraces=False))

threading.Thread(target=monitor, daemon=True).start()
dist.init_process_group("gloo")
for _ in range(3):
    dist.all_reduce(torch.ones(2))
Heartbeat(os.environ).expect(1.0)
if rank == "1":
    time.sleep(60)
dist.all_reduce(torch.ones(2))
"""


@pytest.mark.slow
def test_the_flight_recorder_names_the_rank_that_a_collective_waits_for(one: Machines) -> None:
    env = environ(LAUNCH_PROCESSES="2", LAUNCH_RESTARTS="0", PYTHONPATH=str(REPOSITORY / "train"))
    node = one.start("--script", one.script(RECORDED), env=env, timing=QUICK)
    assert node.wait() == Exit.FAILED, node.text
    assert "; rank 1 has joined 3 collectives, others 4" in node.text
    dumps = [(one.run_folder / runfolder.collectives(1, 0, rank)).read_bytes() for rank in (0, 1)]
    assert [len(pickle.loads(dump)["entries"]) for dump in dumps] == [4, 3]
    assert "stuck" not in stacks(one)


@pytest.mark.slow
def test_every_node_dumps_the_flight_recorder_before_its_ranks_are_killed(tmp_path: Path) -> None:
    """Also the node that is stopped because another has noticed the hang first."""
    with machines(tmp_path, 2) as two:
        script = two.script(RECORDED.replace("expect(1.0)", "expect(1.0 if rank == '0' else 6.0)"))
        env = environ(LAUNCH_PROCESSES="1", LAUNCH_RESTARTS="0", PYTHONPATH=str(REPOSITORY / "train"))
        nodes = [two.start("--script", script, node=node, env=env, timing=QUICK) for node in (0, 1)]
        assert [node.wait() for node in nodes] == [Exit.FAILED, Exit.FAILED], nodes[0].text + nodes[1].text
        dumps = [(two.run_folder / runfolder.collectives(1, 0, rank)).read_bytes() for rank in (0, 1)]
        assert [len(pickle.loads(dump)["entries"]) for dump in dumps] == [4, 3]


def test_dumps_of_another_format_name_no_rank(tmp_path: Path) -> None:
    detector = HangDetector(tmp_path / "watch", None, lambda: 0.0)
    for name in ("nccl-0", "nccl-1.pipe", "nccl-x", "123"):
        (tmp_path / "watch" / name).write_bytes(b"not a pickle.")
    assert detector.collectives() == {0: b"not a pickle."}
    assert hang_detection.behind(detector.collectives()) == ""
    assert (
        hang_detection.behind(
            {rank: pickle.dumps({"pg_status": {"0": {"last_enqueued_collective": 7}}}) for rank in (0, 1)}
        )
        == ""
    )
