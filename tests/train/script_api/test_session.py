"""A script of the user's own that saves and goes on: stopped at any step it comes to the same."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from launch_train import checkpoint
from launch_train.checkpointing.partition import join, split
from launch_train.common import contract, heartbeat
from launch_train.common.errors import UsageError
from launch_train.common.storage import LocalFolder
from launch_train.script_api import encoding, state_dict
from tests.train import trials
from tests.train.script_api.user_script import STEPS, Blow, environment, run, start

ROOT = Path(contract.__file__).parents[3]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Run folders of a script that nobody disturbed, on one rank and on two."""
    base = tmp_path_factory.mktemp("whole")
    for ranks in (1, 2):
        assert start(environment(base / str(ranks)), ranks=ranks) == [0] * ranks
    return {ranks: base / str(ranks) for ranks in (1, 2)}


def same(one: Path, other: Path) -> None:
    """The losses, the last checkpoints and (one rank) what the script came to."""
    assert trials.losses(one) == trials.losses(other)
    assert len(trials.losses(one)) == STEPS
    a, b = (checkpoint.load(str(folder)) for folder in (one, other))
    assert trials.flat(listed(a)) == trials.flat(listed(b))
    ends = [Path(f"{folder}.end") for folder in (one, other)]
    assert len({end.read_text() for end in ends if end.exists()}) <= 1


def listed(value: Any) -> Any:
    """With lists in the place of arrays, which have no == of their own."""
    if isinstance(value, dict):
        return {key: listed(item) for key, item in value.items()}
    return value.tolist() if isinstance(value, np.ndarray) else value


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 2, 7, STEPS])
def test_a_preempted_script_comes_to_the_same(whole: dict[int, Path], tmp_path: Path, step: int) -> None:
    folder = tmp_path / "run"
    assert start(environment(folder), Blow(step)) == [75]
    assert Path(f"{folder}.exit").read_text() == "75\n"
    assert trials.read(folder).event("preempted") is not None
    assert start(environment(folder, 1)) == [0]
    same(whole[1], folder)


@pytest.mark.parametrize("step", [1, 2, 9])
def test_a_killed_script_comes_to_the_same(whole: dict[int, Path], tmp_path: Path, step: int) -> None:
    folder = tmp_path / "run"
    assert start(environment(folder), Blow(step, signal.SIGKILL)) == [-9]
    assert start(environment(folder, 1)) == [0]
    assert (trials.read(folder).event("resumed") is None) == (step == 1)
    same(whole[1], folder)


@pytest.mark.parametrize(("step", "rank"), [(1, 0), (5, 1)])
def test_two_ranks_leave_together_when_one_is_told(
    whole: dict[int, Path], tmp_path: Path, step: int, rank: int
) -> None:
    folder = tmp_path / "run"
    assert start(environment(folder), Blow(step, rank=rank), ranks=2) == [75, 75]
    assert start(environment(folder, 1), ranks=2) == [0, 0]
    same(whole[2], folder)


def test_two_ranks_of_which_one_is_killed(whole: dict[int, Path], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert -9 in start(environment(folder), Blow(6, signal.SIGKILL, rank=1), ranks=2)
    assert start(environment(folder, 1), ranks=2) == [0, 0]
    same(whole[2], folder)


def test_preempted_without_an_interval_saves_once(whole: dict[int, Path], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert start(environment(folder), Blow(4), every=60) == [75]
    assert checkpoint.load(str(folder))["seen"] == 4 * 6
    assert start(environment(folder, 1), every=60) == [0]
    same(whole[1], folder)


def test_the_notice_of_the_node_is_enough(tmp_path: Path) -> None:
    """A script that has a handler of its own, or that never gets the signal."""
    notice = tmp_path / "notice"
    notice.write_text("0")
    assert start(environment(tmp_path / "run", more={contract.NOTICE: str(notice)})) == [75]


def test_a_signal_because_a_peer_has_failed_ends_the_script(tmp_path: Path) -> None:
    notice = str(tmp_path / "never")
    assert start(environment(tmp_path / "run", more={contract.NOTICE: notice}), Blow(3)) == [143]


def test_a_later_start_ends_an_older_one(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert start(environment(folder, 5), Blow(3)) == [75]
    assert start(environment(folder, 4)) == [77]
    assert Path(f"{folder}.exit").read_text() == "75\n77\n"


# --- Scripts as text ------------------------------------------------------------------------------------------------

PLAIN = """
from launch_train import checkpoint, metrics
state = {"weights": [], "epoch": 0, "history": {"loss": []}}
for step in range(checkpoint.restore(state) + 1, 4):
    state["weights"] = [*state["weights"], step]
    metrics.log(step, loss=1 / step)
    if checkpoint.due(step):
        checkpoint.save(step, state)
    if checkpoint.preempted():
        checkpoint.leave()
checkpoint.save(3, state, wait=True)
print(state["weights"])
"""


def interpreted(text: str, **own: str) -> subprocess.CompletedProcess[str]:
    """By an interpreter of its own, from its start to its end."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("LAUNCH_")}
    env |= {"PYTHONPATH": str(ROOT / "train"), "OMP_NUM_THREADS": "1"} | own
    return subprocess.run(
        [sys.executable, "-c", text], env=env, capture_output=True, text=True, timeout=60, check=False
    )


HANG_WATCHED = """
import os
from pathlib import Path
from launch_train import checkpoint
from launch_train.common import heartbeat
from launch_train.checkpointing.async_saver import Saver
from launch_train.script_api import session as script

def expected():
    beat = heartbeat.newest_beat(Path(os.environ["LAUNCH_WATCH"]))
    return round(beat.deadline - beat.last)

def noting(owner, name):
    real = getattr(owner, name)
    def noted(*args, **options):
        print(name, expected())
        return real(*args, **options)
    setattr(owner, name, noted)

noting(script, "resume"), noting(Saver, "begin"), noting(Saver, "save"), noting(script.Script, "finish")
state = {"weights": [1]}
checkpoint.restore(state)
print("restored", expected())
checkpoint.save(1, state)
print("saved", expected())
checkpoint.save(2, state, wait=True)
print("saved", expected())
"""


@pytest.mark.slow
def test_a_checkpoint_is_no_silence_of_the_script(tmp_path: Path) -> None:
    """The node's hang detection counts what the script does; a save alone may take 30 minutes."""
    heartbeat.create_heartbeat(tmp_path)
    own = {contract.RUN_FOLDER: str(tmp_path / "run"), contract.WATCH: str(tmp_path), contract.HANG_AFTER: "5"}
    done = interpreted(HANG_WATCHED, **own)
    assert done.returncode == 0, done.stderr
    said = [line.split() for line in done.stdout.splitlines()]
    assert [(name, int(seconds)) for name, seconds in said] == [
        ("resume", 1805),
        ("restored", 5),
        *[("finish", 1805), ("begin", 1805), ("saved", 5)],
        *[("save", 1805), ("saved", 5)],
        ("finish", 1805),  # at exit
    ]


def test_without_a_run_folder_it_does_nothing_and_loads_no_torch() -> None:
    done = interpreted(PLAIN + "import sys; assert 'torch' not in sys.modules")
    assert (done.stdout, done.stderr, done.returncode) == ("[1, 2, 3]\n", "", 0)


@pytest.mark.slow
def test_a_save_that_is_under_way_at_the_end_is_finished(tmp_path: Path) -> None:
    text = PLAIN.replace("checkpoint.save(3, state, wait=True)", "checkpoint.save(3, state)")
    late = "import time; from launch_train.checkpointing import manifest as c; real = c.commit\n"
    late += "c.commit = lambda *a: (time.sleep(0.5), real(*a))\n"
    done = interpreted(late + text, **environment(tmp_path / "run"))
    assert (done.stdout, done.stderr, done.returncode) == ("[1, 2, 3]\n", "", 0)
    assert checkpoint.load(str(tmp_path / "run"))["weights"] == [1, 2, 3]


@pytest.mark.parametrize(
    ("text", "code", "line"),
    [
        ("c.due(1)", 2, "train: call checkpoint.restore first"),
        ("c.restore({}); c.restore({})", 2, "train: call checkpoint.restore once"),
        ("c.restore({'a/b': 1})", 2, "train: 'a/b' can't be a name in a checkpoint"),
        ("c.restore({}); c.save(1, {'a': [object()]})", 2, "train: state['a'][0] is a object, which a checkpoint"),
        ("c.restore([])", 2, "train: a checkpoint's state must be a dict by name"),
        ("c.restore({}); c.save(4, {}); c.save(3, {})", 2, "train: checkpoint.save: step 3 comes after step 4"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, text: str, code: int, line: str) -> None:
    done = run(f"from launch_train import checkpoint as c\n{text}", tmp_path / "run")
    assert done.code == code
    assert done.err.splitlines()[-1].startswith(line)
    assert len(done.err.splitlines()) == 1


def test_a_state_that_is_not_the_checkpoints(tmp_path: Path) -> None:
    assert run(PLAIN, tmp_path / "run").code == 0
    done = run("from launch_train import checkpoint as c\nc.restore({'model': 1})", tmp_path / "run", 1)
    assert done.code == 2
    assert done.err.startswith(
        "train: checkpoints/step-00000003/0001-0000 doesn't match this script: it has no 'model'"
    )


@pytest.mark.slow
def test_a_run_of_the_trainer_is_no_scripts(tmp_path: Path, one_thread: None) -> None:
    trials.preempted(tmp_path / "run", 2)
    done = run(PLAIN, tmp_path / "run", 1)
    assert done.code == 2
    assert "belongs to another spec" in done.err
    assert len(done.err.splitlines()) == 1


def test_ranks_without_a_process_group_are_told(tmp_path: Path) -> None:
    done = run(PLAIN, tmp_path / "run", more={"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"})
    assert done.code == 2
    assert done.err.startswith("train: call checkpoint.restore after torch.distributed.init_process_group")


def test_other_nodes_read_and_leave_saving_to_the_first(tmp_path: Path) -> None:
    assert run(PLAIN, tmp_path / "run").code == 0
    before = LocalFolder(tmp_path / "run").list("checkpoints/")
    done = run(PLAIN.replace("4)", "9)"), tmp_path / "run", 1, {contract.NODE: "1"})
    assert done.out.endswith("[1, 2, 3, 4, 5, 6, 7, 8]\n")
    assert LocalFolder(tmp_path / "run").list("checkpoints/") == before


def test_a_forked_child_keeps_nothing_of_it(tmp_path: Path) -> None:
    """A worker that is told to end does so, with a handler of its own or none; its parent doesn't take it to itself."""
    text = (
        "import os, signal, time, launch_train.script_api.session\nfrom launch_train import checkpoint as c\n"
        "c.restore({}); launch_train.script_api.session.PEER_SECONDS = 0\nreading, writing = os.pipe()\n"
        "for own in (True, False):\n"
        "    child = os.fork()\n"
        "    if not child:\n"
        "        own and signal.signal(15, lambda *_: os._exit(3)); os.write(writing, b'.'); time.sleep(30)\n"
        "    os.read(reading, 1); os.kill(child, 15); print(os.waitpid(child, 0)[1])\n"
        "time.sleep(0.3); print(c.due(1), c.preempted())"
    )
    done = run(text, tmp_path / "run")
    assert (done.out, done.code) == (f"{3 << 8}\n15\nFalse False\n", 0)


def test_a_preemption_in_the_middle_of_native_code_is_one(tmp_path: Path) -> None:
    """The thread that hears of it is before the handler."""
    text = (
        "import os, signal, threading, time, launch_train.script_api.session\n"
        "from launch_train import checkpoint as c\n"
        "c.restore({}); launch_train.script_api.session.PEER_SECONDS = 0\n"
        "threading.Timer(0.2, os.kill, (os.getpid(), 15)).start()\n"
        "import ctypes; ctypes.CDLL(None).usleep(600_000)\n"
        "time.sleep(0.3); print(c.due(1), c.preempted())"
    )
    done = run(text, tmp_path / "run")
    assert (done.out, done.code) == ("True True\n", 0)


def test_a_notice_that_the_node_takes_back_ends_a_script_that_waits(tmp_path: Path) -> None:
    """Another node's processes have failed, and this one waits for them."""
    text = (
        "import os, pathlib, signal, threading, time, launch_train.script_api.session\n"
        "from launch_train import checkpoint as c\n"
        "c.restore({}); launch_train.script_api.session.PEER_SECONDS = 0\n"
        "notice = pathlib.Path(os.environ['LAUNCH_NOTICE'])\n"
        "notice.touch(); threading.Timer(0.2, os.kill, (os.getpid(), 15)).start()\n"
        "threading.Timer(0.5, notice.unlink).start()\n"
        "time.sleep(20); print('waited')"
    )
    done = run(text, tmp_path / "run", 0, {contract.NOTICE: str(tmp_path / "notice")})
    assert (done.out, done.code) == ("", 143)


# --- Values ---------------------------------------------------------------------------------------------------------

arrays = st.builds(
    lambda kind, shape: np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape).astype(kind),
    st.sampled_from(["<f4", ">f8", "u2", "bool", "S3", "U2", "M8[s]", "complex64"]),
    st.lists(st.integers(0, 3), max_size=3),
)
leaves = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary(), arrays)
keys = st.one_of(st.text(), st.integers(), st.tuples(st.integers(), st.text()))
trees = st.recursive(leaves, lambda t: st.one_of(st.lists(t), st.dictionaries(keys, t), st.tuples(t, t)), max_leaves=12)


@settings(max_examples=150, deadline=None)
@given(trees)
def test_any_values_come_back(tree: Any) -> None:
    file = __import__("io").BytesIO()
    parts = split({"it": encoding.encode(tree)})
    torch.save(parts._asdict(), file)
    file.seek(0)
    read = torch.load(file, weights_only=True)
    assert_same(encoding.decode(join(read["tensors"], read["rest"]))["it"], tree)


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert list(one) == list(other)
        for key, value in one.items():
            assert_same(value, other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    elif isinstance(one, np.ndarray):
        assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    else:
        assert one == other


@pytest.mark.parametrize("value", [np.float32(0.1), np.int64(3), np.bool_(True), float("nan"), 2**127, 1j])
def test_single_numbers_keep_their_type(value: Any) -> None:
    back = encoding.decode(encoding.encode(value))
    assert type(back) is type(value)
    assert repr(back) == repr(value)


@pytest.mark.parametrize("value", [{1, 2}, object(), np.array([object()]), np.zeros(2, "f4,i4"), Path("x"), open])
def test_what_a_checkpoint_cannot_hold_is_refused_when_it_is_saved(value: Any) -> None:
    with pytest.raises(UsageError, match=r"state\['a'\]\[1\] is a .*, which a checkpoint can't store"):
        encoding.encode([0, value], "state['a']")


# --- The examples ---------------------------------------------------------------------------------------------------

EXAMPLES = ROOT / "job_specs" / "examples"


def test_the_example_with_torch(tmp_path: Path) -> None:
    """Stopped after a while and started again, it ends as it does when left alone."""
    example = (EXAMPLES / "script" / "train_own.py").read_text().replace("default=200", "default=40")
    due = "        if checkpoint.due"
    stopped = example.replace(due, f"        step == 23 and os.kill(os.getpid(), 15)\n{due}")
    alone, halves = tmp_path / "alone", tmp_path / "halves"
    assert run(example, alone).code == 0
    assert run(stopped, halves).code == 75
    assert run(example, halves, 1).out.startswith("resumed from step 23 (")
    assert trials.losses(alone) == trials.losses(halves)
    assert sorted(trials.losses(alone)) == [10, 20, 30, 40]
    ends = [checkpoint.load(str(folder)) for folder in (alone, halves)]
    assert len({str(trials.flat({**end, "ranks": []})) for end in ends}) == 1


def test_the_example_without_torch(tmp_path: Path) -> None:
    example = (EXAMPLES / "python" / "fit.py").read_text().replace("default=100", "default=30")
    done = interpreted(f"{example}\nimport sys; assert 'torch' not in sys.modules", **environment(tmp_path / "run"))
    assert (done.stderr, done.returncode) == ("", 0)
    losses = trials.losses(tmp_path / "run")
    assert len(losses) == 30
    assert losses[30] < losses[1] / 2


def test_tensors_in_lists_and_dicts_come_back_to_their_device() -> None:
    """meta stands for a GPU here: what a checkpoint holds is on the CPU."""
    before = torch.empty(2, device="meta")
    state = {"ema": {"a": [before, before], "b": (before,), "n": 1}}
    one = torch.ones(2)
    state_dict._put(state, "ema", state["ema"], {"a": [one, one, one], "b": (one,), "n": 2, "new": one})
    ema: Any = state["ema"]
    assert [tensor.device.type for tensor in (*ema["a"], *ema["b"], ema["new"])] == [
        "meta",
        "meta",
        "cpu",
        "meta",
        "cpu",
    ]
    assert ema["n"] == 2
