"""A user's repository whose modules have the names that launch uses, or used, for its own."""

from __future__ import annotations

from pathlib import Path

MODULES = (
    "train/__init__.py",
    "train/utils.py",
    "launcher.py",
    "tests/__init__.py",
    "tests/helper.py",
    "benchmarks/__init__.py",
    "containers.py",
    "data.py",
    "utils.py",
    "checkpoint.py",
    "metrics.py",
    "contract.py",
    "node.py",
)
DATA = """\
import torch
import utils

class Rows(torch.utils.data.Dataset):
    def __init__(self):
        self.item = Item(7)
    def __len__(self):
        return 4
    def __getitem__(self, index):
        import checkpoint, launcher, metrics, train.utils
        own = {module.OWN for module in (checkpoint, launcher, metrics, train.utils, utils)}
        assert own == {"the user's"}, own
        return self.item.value + index

class Item:
    def __init__(self, value):
        self.value = value
"""
MAIN = """\
import multiprocessing
import os
import pickle
import sys

import benchmarks, checkpoint, containers, contract, data, launcher, metrics
import node, tests.helper, train, train.utils, utils
from launch_train import checkpoint as launch_checkpoint
from launch_train import metrics as launch_metrics
from launch_train.common import contract as launch_contract

MODULES = (
    benchmarks, checkpoint, containers, contract, data, launcher, metrics,
    node, tests.helper, train, train.utils, utils,
)

def send(connection, item):
    connection.send(data.Item(item.value + 1))

def main():
    import torch
    others = [module.__file__ for module in MODULES if module.OWN != "the user's"]
    assert not others, others
    if "RANK" in os.environ:
        torch.distributed.init_process_group("gloo")
    assert launch_checkpoint.restore({}) == 0
    assert launch_contract.CONFIG == "LAUNCH_CONFIG"
    for method in ("spawn", "forkserver"):
        loader = torch.utils.data.DataLoader(data.Rows(), num_workers=1, multiprocessing_context=method)
        assert torch.cat(list(loader)).tolist() == [7, 8, 9, 10]
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=send, args=(theirs, data.Item(1)))
    process.start()
    received = ours.recv()
    process.join()
    assert (type(received), received.value) == (data.Item, 2)
    assert pickle.loads(pickle.dumps(received)).value == 2
    launch_metrics.log(1, loss=0.5)
    print("every module is the user's")

if __name__ == "__main__":
    main()
"""
SAYS = "every module is the user's"


def write(folder: Path, *, is_package: bool = True) -> Path:
    """Write the repository, whose script is main.py, and return its folder; `train` is a package or a module."""
    names = MODULES if is_package else ("train.py", *(name for name in MODULES if not name.startswith("train/")))
    files = dict.fromkeys(names, "") | {"data.py": DATA, "main.py": MAIN}
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'OWN = "the user\'s"\n{text if is_package else text.replace("train.utils", "train")}')
    return folder
