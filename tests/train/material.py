"""What the trainer is given that is wrong: files, code, settings, and the shape of a case (tests.train.wrongs)."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from launch_train.common.contract import Exit

GPT: dict[str, Any] = {"n_layer": 1, "n_head": 1, "n_embd": 8, "block_size": 8}
USUAL: dict[str, Any] = {
    "model": GPT,
    "data": "synthetic",
    "steps": 4,
    "batch_size": 4,
    "eval": {"every": 0},
    "loader": {"workers": 0},
    "optimizer": {"warmup_steps": 0},
    "monitor": 0,
}
LLAMA: dict[str, Any] = {
    "name": "hf:llama",
    "vocab_size": 256,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
TEXT: dict[str, Any] = {"path": "{here}/text.txt", "block_size": 8}
RESNET = {"name": "resnet50", "width": 4, "image_size": 32, "num_classes": 2}
OWN: dict[str, Any] = {"model": "mine:model", "loss": "mine:loss", "data": "mine:data"}


class Wrong(NamedTuple):
    """What is wrong, in words; the settings beside USUAL; the line about it. In settings and line {here} is the folder
    of `material`, in the line … is anything."""

    what: str
    config: Mapping[str, Any]
    line: str
    exit: Exit = Exit.USAGE
    ranks: int = 2
    env: Mapping[str, str] = MappingProxyType({})
    before: Mapping[str, str] | None = None
    """Another run in the same folder comes first, with this environment."""


def material(here: Path) -> None:
    """The files that the cases are about."""
    (here / "mine.py").write_text(MINE)
    (here / "broken.py").write_text("def build(:\n")
    (here / "lacking.py").write_text("import no_such_package\n")
    (here / "text.txt").write_text("all work and no play\n" * 100)
    (here / "short.txt").write_text("short")
    (here / "empty").mkdir()
    (here / "tokenizer.json").write_text(tokenizer(300))
    (here / "no-tokenizer.json").write_text("{}")
    (here / "lines.jsonl").write_text('{"text": "good"}\n{"txt": "bad"}\n')
    for number in range(3):
        for name in ("cat", "dog"):
            (here / "cats" / name).mkdir(parents=True, exist_ok=True)
            (here / "cats" / name / f"{number}.jpg").write_bytes(b"no image")
    shard(here / "cut.tar", cut=6000)
    shard(here / "cut-between.tar", cut=2 * (512 + 2048 + 512 + 512))
    shard(here / "labelless.tar", labels=False)
    (here / "file").write_text("")


def tokenizer(size: int) -> str:
    vocabulary = {**{chr(33 + number): number for number in range(size - 1)}, "[UNK]": size - 1}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"}
    return json.dumps({"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "model": model})


def shard(path: Path, *, cut: int = 0, labels: bool = True) -> None:
    with tarfile.open(path, "w") as tar:
        for number in range(4):
            for suffix, content in (("jpg", b"x" * 2000), *([("cls", b"0")] if labels else [])):
                member = tarfile.TarInfo(f"{number}.{suffix}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    if cut:
        path.write_bytes(path.read_bytes()[:cut])


MINE = """
import os

import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, forward=None):
        super().__init__()
        self.linear, self.how = nn.Linear(4, int(os.environ.get("WIDTH", "3"))), forward
    def forward(self, x, y=None):
        if self.how == "raises":
            raise KeyError("colour")
        if self.how == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        out = self.linear(x)
        if y is None:
            return out
        if self.how == "vector":
            return out.mean(0)
        if self.how == "number":
            return 3.5
        if self.how == "detached":
            return out.mean().detach()
        if self.how == "late" and torch.is_grad_enabled():
            self.count = getattr(self, "count", 0) + 1
            if self.count > 4:
                raise ValueError("the fifth batch")
        if self.how == "leaves" and torch.is_grad_enabled():
            self.count = getattr(self, "count", 0) + 1
            if self.count > 4:
                raise SystemExit
        if self.how == "exits":
            raise SystemExit(3)
        return (out.mean(1) - y).square().mean()

def model(forward=None):
    return Model(forward)

def loss(out, y):
    return (out.mean(1) - y).square().mean()

def raises():
    raise ValueError("no such depth")

def text():
    return "a model"

def bare():
    return nn.ReLU()

constant = 3

class Data:
    def __init__(self, wrong):
        self.wrong = wrong
    def __len__(self):
        return 0 if self.wrong == "empty" else 32
    def __getitem__(self, index):
        x = torch.full((4,), float(index))
        if self.wrong == "nan":
            x[0] = float("nan")
        if self.wrong == "shapes" and index % 2:
            x = torch.zeros(5)
        if self.wrong == "wide":
            x = torch.zeros(7)
        if self.wrong == "raises" and index == 20:
            raise OSError("gone")
        if self.wrong == "single":
            return x
        return x, x.sum()

def data(split, wrong=""):
    return Data(wrong) if split == "train" else None

def stream(split):
    return iter([1])

class Tokens:
    def __init__(self, top):
        self.top = top
    def __len__(self):
        return 32
    def __getitem__(self, index):
        return torch.tensor([1, 2, 3, self.top]), torch.tensor([2, 3, 4, 5])

def tokens(split, top=256):
    return Tokens(top) if split == "train" else None

def words(split):
    class Words(Tokens):
        def __getitem__(self, index):
            return "a word", 1
    return Words(0) if split == "train" else None
"""


def own(forward: str) -> dict[str, Any]:
    """A model of one's own with a forward pass that does something wrong."""
    return {"model": {"name": "mine:model", "forward": forward}, "data": "mine:data"}


def data(wrong: str) -> dict[str, Any]:
    return {**OWN, "data": {"path": "mine:data", "settings": {"wrong": wrong}}}


def llama(**settings: Any) -> dict[str, Any]:
    return {"model": {**LLAMA, **settings}, "data": TEXT}


def tokens(top: int) -> dict[str, Any]:
    return {"path": "mine:tokens", "settings": {"top": top}}


NOWHERE = MappingProxyType({"STORAGE_EMULATOR_HOST": "http://127.0.0.1:9", "HF_ENDPOINT": "http://127.0.0.1:9"})
