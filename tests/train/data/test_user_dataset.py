"""The user's own dataset."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from launch_train.common import contract
from launch_train.common.config import Loader, parse
from launch_train.common.errors import UsageError
from launch_train.data import open_data, user_dataset
from launch_train.data.batch import tensors_of
from launch_train.data.loader import BatchLoader
from launch_train.data.map_dataset import batch, tensor
from launch_train.distributed import process_group
from launch_train.distributed.process_group import Ranks

CPU = torch.device("cpu")
Pair = collections.namedtuple("Pair", "a b")

CODE = """
import random
import numpy as np
import torch

class Points:
    def __init__(self, count, scale=1.0):
        self.count, self.scale = count, scale
    def __len__(self):
        return self.count
    def __getitem__(self, index):
        return {"x": torch.randn(3) * self.scale, "n": np.float32(random.random())}, index % 2

def build(split, count=10, scale=1.0, rest=4):
    if split == "held_out":
        return Points(rest, scale) if rest else None
    return Points(count, scale)

def only_train(split):
    if split == "held_out":
        raise NotImplementedError("no such split")
    return Points(5)

class NoLength:
    def __getitem__(self, index):
        return 0, 0

def no_length(split): return NoLength()
def nothing(split): return None
def fails(split): raise RuntimeError("the disk has gone")
"""


@pytest.fixture(autouse=True)
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of the user's, of a name of its own for each test."""
    name = f"points_{abs(hash(str(tmp_path))):x}"
    (tmp_path / f"{name}.py").write_text(CODE)
    monkeypatch.setenv(contract.CODE, str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def config(name: str, **settings: Any) -> Any:
    return parse({"model": "my.model:build", "data": {"path": name, "settings": settings}, "batch_size": 4})


def test_a_dataset_of_ones_own(code: str) -> None:
    source = open_data(config(f"{code}:build", count=9), Ranks())
    inputs, targets = source.train(1, slice(0, 4))
    assert {name: (one.shape, one.dtype) for name, one in inputs.items()} == {  # type: ignore[attr-defined]  # inputs are a mapping here
        "x": ((4, 3), torch.float32),
        "n": ((4,), torch.float32),
    }
    assert targets.tolist() == [index % 2 for index in source.drawn(1)]
    assert source.facts["data"] == f"{code}:build"
    assert (source.facts["data_samples"], source.facts["data_held_out_samples"]) == (9, 4)
    assert (source.unit, source.slow, source.holds_out) == ("samples", True, True)


def test_processes_find_the_users_code_and_draw_the_same(code: str) -> None:
    def run(workers: int) -> list[Any]:
        batch_loader = BatchLoader(
            open_data(config(f"{code}:build"), Ranks()), slice(0, 4), CPU, Loader(workers=workers)
        )
        try:
            made = [batch_loader.train(step) for step in (1, 2, 3, 4)] + [batch_loader.held_out(0, 2)]
        finally:
            batch_loader.close()
        return [({name: one.tolist() for name, one in x.items()}, y.tolist()) for x, y in made]  # type: ignore[attr-defined]  # inputs are a mapping here

    assert run(0) == run(1)


def test_settings_reach_the_function(code: str) -> None:
    source = open_data(config(f"{code}:build", scale=0.0), Ranks())
    inputs: Any = source.train(1, slice(0, 4))[0]
    assert not inputs["x"].any()


@pytest.mark.parametrize(
    ("function", "settings", "why"),
    [("build", {"rest": 0}, "it returns None"), ("only_train", {}, "NotImplementedError: no such split")],
)
def test_without_a_held_out_part_nothing_is_evaluated(
    code: str, function: str, settings: Any, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = open_data(config(f"{code}:{function}", **settings), Ranks())
    assert not source.holds_out
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"data: {code}:{function} provides no held_out data (")
    assert why in line
    with pytest.raises(UsageError, match="nothing is held out"):
        source.held_out(0, 1, slice(0, 4))


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("no_length", r"must return a map-style dataset \(with len and \[index\]\), not NoLength"),
        ("nothing", "not NoneType"),
        ("fails", r"fails failed at points_\w+.py:\d+: RuntimeError: the disk has gone"),
    ],
)
def test_what_is_no_dataset_is_refused(code: str, function: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        open_data(config(f"{code}:{function}"), Ranks())
    assert "\n" not in str(caught.value)


def test_a_batch_keeps_the_shape_of_its_samples() -> None:
    made = batch([Pair([1, True], {"a": 2.5}), Pair([2, False], {"a": 1.5})], str)
    assert isinstance(made, Pair)
    assert isinstance(made.a, list)
    assert (made.a[0].tolist(), made.a[1].tolist(), made.b["a"].tolist()) == ([1, 2], [True, False], [2.5, 1.5])
    assert (made.a[0].dtype, made.a[1].dtype, made.b["a"].dtype) == (torch.int64, torch.bool, torch.float32)
    assert len(tensors_of(made)) == 3
    with pytest.raises(UsageError, match="1 is a tuple of 3, and 0 is a tuple of 2"):
        batch([(1, 2), (1, 2, 3)], str)
    with pytest.raises(UsageError, match="1 is a mapping of b, and 0 is a mapping of a"):
        batch([{"a": 1}, {"b": 1}], str)


def test_arrays_of_all_kinds_become_tensors() -> None:
    assert tensor(np.float64(2.5), "it").dtype == torch.float64
    assert tensor(np.arange(6).reshape(2, 3)[:, ::-1], "it").tolist() == [[2, 1, 0], [5, 4, 3]]
    assert tensor(np.array(3), "it").shape == ()
    with pytest.raises(UsageError, match="it holds an array of <U4"):
        tensor(np.array(["word"]), "it")


def test_fewer_held_out_samples_than_are_wanted_are_used_again(code: str) -> None:
    source = open_data(config(f"{code}:build", rest=3), Ranks())
    seen = [target for index in range(2) for target in source.held_out(index, 2, slice(0, 4))[1].tolist()]
    assert seen == [0, 1, 0, 0, 1, 0, 0, 1]
    many = open_data(config(f"{code}:build", rest=80), Ranks())
    assert many.held_out(0, 2, slice(0, 4))[1].tolist() == [0, 0, 0, 0]  # every tenth


def test_ranks_whose_datasets_differ_are_told_so(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that held nothing out would evaluate nothing, and the others would wait for it."""
    real = process_group.gather

    def gather(ranks: Ranks, value: Any) -> list[Any]:
        return [*real(ranks, value), (10, None)] if isinstance(value, tuple) else real(ranks, value)

    monkeypatch.setattr(user_dataset, "gather", gather)
    with pytest.raises(UsageError, match=r"of different lengths: 10 \(held out: 4\), 10 \(held out: none\)$"):
        open_data(config(f"{code}:build"), Ranks())


def test_numbers_and_tensors_that_make_no_batch(code: str) -> None:
    with pytest.raises(UsageError, match="it holds int; a batch is made of"):
        tensor(1 << 63, "it")
    with pytest.raises(UsageError, match=r"^data: 0 and others cannot be stacked into a batch: "):
        batch([torch.eye(2), torch.eye(2).to_sparse()], str)
