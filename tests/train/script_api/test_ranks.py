"""The ranks of a custom script must have one state: what differs is refused, or rank 0's is taken and said so."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
import torch

from launch_train import checkpoint
from launch_train.common.storage import LocalFolder
from tests.train.script_api.user_script import run, run_ranks

NANOGPT = """
from launch_train import checkpoint
torch.manual_seed(0)
model = torch.nn.Linear(64, 64)
best_val_loss = 1e9
state = {"model": model, "best": best_val_loss}
start = checkpoint.restore(state)
print("best", type(state["best"]).__name__, float(state["best"]))
for step in range(start + 1, start + 4):
    if rank == 0:
        losses = torch.full((3,), 2.0 / step).mean()
        state["best"] = losses if losses < state["best"] else state["best"]
    checkpoint.save(step, state, wait=True)
checkpoint.preempted()
"""
"""nanoGPT's train.py evaluates on rank 0 alone: its best loss is a tensor there, and the 1e9 of the start elsewhere."""


@pytest.mark.slow
def test_only_rank_0_evaluates(tmp_path: Path) -> None:
    """Its value is saved, the weights are there, and one line says so, once."""
    first = run_ranks(NANOGPT, tmp_path / "run")
    assert [said.code for said in first] == [0, 0], first
    warnings = [line for said in first for line in said.err.splitlines() if "best" in line]
    assert len(warnings) == 1
    assert "rank 0" in warnings[0]
    saved = checkpoint.load(str(tmp_path / "run"))
    assert saved["model"].keys() == {"weight", "bias"}
    assert float(saved["best"]) == pytest.approx(2 / 3)
    again = run_ranks(NANOGPT, tmp_path / "run", 1)
    assert [said.code for said in again] == [0, 0]
    assert [said.out.splitlines()[-1].split()[2][:5] for said in again] == ["0.666", "0.666"]


def one_save(difference: str) -> str:
    """A script that saves once; `difference` is what its ranks don't have in common."""
    return f"""
from launch_train import checkpoint
state = {{"model": torch.nn.Linear(8, 8), "best": 9.0}}
checkpoint.restore(state)
{difference}
checkpoint.save(1, state, wait=True)
"""


PLAIN_VALUES: dict[str, str] = {
    "history": "['x'] * (2 - rank)",
    "no_value": "None if rank else 0.5",
    "number": "0.25 + rank",
    "tensor_or_text": "'text' if rank else torch.tensor(1.5)",
    "bool_or_tensor": "torch.tensor(2.0) if rank else True",
    "numpy_number": "9.0 if rank else numpy.float32(1.5)",
    "raw": "b'ab' * (rank + 1)",
    "draws": "torch.Generator().manual_seed(rank)",
}
"""Values of a state, which differ by rank."""


def test_of_plain_values_rank_0s_is_saved(tmp_path: Path) -> None:
    saves = "".join(
        f"state[{name!r}] = {value}\ncheckpoint.save({step}, state, wait=True)\n"
        for step, (name, value) in enumerate(PLAIN_VALUES.items(), start=2)
    )
    saves = f"import numpy\n{saves}state.update({{'note': 'from rank 1'}} if rank else {{}})\n"
    said = run_ranks(f"{one_save('')}{saves}checkpoint.save(20, state, wait=True)", tmp_path / "run")
    assert [one.code for one in said] == [0, 0], said
    warnings = [[line for line in one.err.splitlines() if "warning" in line] for one in said]
    assert [len(lines) for lines in warnings] == [len(PLAIN_VALUES) + 1, 0]
    for line, name in zip(warnings[0], ["history/1", *[*PLAIN_VALUES][1:], "note"], strict=True):
        assert name in line
    saved = checkpoint.load(str(tmp_path / "run"))
    assert saved["model"].keys() == {"weight", "bias"}
    for name, text in PLAIN_VALUES.items():
        value = eval(text, {"rank": 0, "torch": torch, "numpy": numpy})
        if name != "draws":
            assert saved[name] == value
            assert type(saved[name]) is type(value)


REFUSED = [
    ("state['model'] = torch.nn.Linear(8, 8 + rank)", "model/weight"),
    ("state['model'].to(torch.float64 if rank else torch.float32)", "model/weight"),
    ("state['ema'] = torch.zeros(3) if rank else None", "ema"),
    ("state.update({'ema': torch.zeros(3)} if rank else {})", "ema"),
    ("import numpy as np; state['table'] = np.zeros(3 + rank)", "table"),
]


@pytest.mark.parametrize(("difference", "key"), REFUSED)
def test_other_differences_are_refused_before_anything_is_written(tmp_path: Path, difference: str, key: str) -> None:
    said = run_ranks(one_save(difference), tmp_path / "run")
    assert [one.code for one in said] == [2, 2], said
    (line,) = [line for one in said for line in one.err.splitlines() if line.startswith("train: ")]
    assert key in line
    assert "rank 1" in line
    assert not LocalFolder(tmp_path / "run").list("checkpoints/step-")


@pytest.mark.parametrize(
    ("difference", "key"), [REFUSED[0], ("state['draws'] = torch.Generator().manual_seed(rank)", "draws")]
)
def test_they_are_refused_at_restore(tmp_path: Path, difference: str, key: str) -> None:
    text = one_save("").replace("checkpoint.restore", f"{difference}\ncheckpoint.restore")
    said = run_ranks(text.replace("checkpoint.save", "print('trained'); checkpoint.save"), tmp_path / "run")
    assert [one.code for one in said] == [2, 2], said
    assert key in "".join(one.err for one in said)
    assert "trained" not in "".join(one.out for one in said)


def test_a_rank_that_alone_has_what_cannot_be_saved_ends_all(tmp_path: Path) -> None:
    said = run_ranks(one_save("state['best'] = (lambda: 0) if rank else 0.5"), tmp_path / "run")
    assert [one.code for one in said] == [2, 2], said
    assert "rank 1" in "".join(one.err for one in said)


def test_a_rank_that_fails_while_its_state_is_read_ends_all(tmp_path: Path) -> None:
    bad = "def bad(): raise RuntimeError('out of order')\nif rank: state['model'].state_dict = bad"
    said = run_ranks(one_save(bad), tmp_path / "run")
    assert [one.code for one in said] == [1, 1], said
    assert "out of order" in said[1].err


def test_ranks_at_different_steps_are_refused(tmp_path: Path) -> None:
    said = run_ranks(one_save("").replace("save(1,", "save(1 + rank,"), tmp_path / "run")
    assert [one.code for one in said] == [2, 2], said


def test_a_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    text = "import time\nfrom launch_train.distributed import process_group\n"
    text += "process_group.LATE_SECONDS = 0.1\nif rank: time.sleep(1)"
    said = run_ranks(one_save(text), tmp_path / "run")
    assert [one.code for one in said] == [0, 0], said
    assert "still waiting for rank 1" in said[0].err


def test_what_is_a_ranks_own_is_copied_when_it_is_saved(tmp_path: Path) -> None:
    text = """
from launch_train import checkpoint
from launch_train.checkpointing import async_saver as saver
import time
real = saver.write_shard
saver.write_shard = lambda *a, **o: (time.sleep(0.3), real(*a, **o))[1]
own = {"seen": torch.zeros(3) + rank}
checkpoint.restore({}, own=own)
checkpoint.save(1, {}, own=own)
own["seen"] += 10
"""
    said = run_ranks(text, tmp_path / "run")
    assert [one.code for one in said] == [0, 0], said
    ranks = checkpoint.load(str(tmp_path / "run"))["ranks"]
    assert [rank["own"]["seen"].tolist() for rank in ranks] == [[0, 0, 0], [1, 1, 1]]


# --- At restore, on one rank ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("where", "value"), [("state", "lambda: 0"), ("own", "[open]")])
def test_what_cannot_be_saved_is_refused_at_restore(tmp_path: Path, where: str, value: str) -> None:
    """And not at the first save, after which the node would start the whole training again."""
    state = f"{{'it': {value}}}" if where == "state" else f"{{}}, own={{'it': {value}}}"
    done = run(f"from launch_train import checkpoint as c\nc.restore({state})\nprint('trained')", tmp_path / "run")
    assert (done.code, done.out) == (2, "")
    (line,) = done.err.splitlines()
    assert f"{where}['it']" in line
    assert Path(f"{tmp_path / 'run'}.exit").read_text() == "2\n"


def test_a_refused_state_takes_no_run_over(tmp_path: Path) -> None:
    assert run("from launch_train import checkpoint as c\nc.restore({'it': print})", tmp_path / "run").code == 2
    assert not LocalFolder(tmp_path / "run").list("checkpoints/")


# --- A checkpoint that misses a part ----------------------------------------------------------------------------------

PARTIAL = """
from launch_train import checkpoint
from launch_train.checkpointing import async_saver as saver
real = saver.rank_share
def partial(tensors, rank, *rest):
    mine = real(tensors, rank, *rest)
    return mine._replace(tensors={p: t for p, t in mine.tensors.items() if p != "model/weight"})
state = {"model": torch.nn.Linear(8, 8)}
print("step", checkpoint.restore(state))
def save(step, broken):
    saver.rank_share = partial if broken else real
    checkpoint.save(step, state, wait=True)
"""


def test_it_is_not_written(tmp_path: Path) -> None:
    said = run_ranks(f"{PARTIAL}\nsave(1, False)\nsave(2, True)", tmp_path / "run")
    assert [one.code for one in said] == [1, 1], said
    assert [line for one in said for line in one.err.splitlines() if "step 2" in line]
    assert not LocalFolder(tmp_path / "run").list("checkpoints/step-00000002/0001-0000/manifest")
    assert run_ranks(PARTIAL, tmp_path / "run", 1)[0].out.splitlines()[-1] == "step 1"


def test_the_next_start_takes_an_older_one(tmp_path: Path) -> None:
    """Such checkpoints exist: earlier versions wrote them."""
    text = f"{PARTIAL}\nsaver.coverage_checksum = lambda tensors: 0\nsave(1, False)\nsave(2, True)"
    assert [one.code for one in run_ranks(text, tmp_path / "run")] == [0, 0]
    for ranks, generation in ((2, 1), (1, 2)):
        said = run_ranks(PARTIAL, tmp_path / "run", generation, ranks)
        assert [one.code for one in said] == [0] * ranks, said
        assert {one.out.splitlines()[-1] for one in said} == {"step 1"}
        assert "step-00000002" in said[0].out
    with pytest.raises(checkpoint.CheckpointError, match="model/weight"):
        checkpoint.load(str(tmp_path / "run"), 2)
    assert checkpoint.load(str(tmp_path / "run"))["model"].keys() == {"weight", "bias"}


def test_all_ranks_end_when_the_state_of_one_does_not_fit(tmp_path: Path) -> None:
    assert [one.code for one in run_ranks(f"{PARTIAL}\nsave(1, False)", tmp_path / "run")] == [0, 0]
    unfit = "def unfit(_): raise RuntimeError('Error(s) in loading state_dict')\n"
    unfit += "if rank: state['model'].load_state_dict = unfit\nprint('step'"
    said = run_ranks(PARTIAL.replace("print('step'", unfit).replace('print("step"', unfit), tmp_path / "run", 1)
    assert [one.code for one in said] == [2, 2], said
    assert "step 1" not in said[0].out.splitlines()
