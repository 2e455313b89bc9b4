"""Runs whose targets do not all count, with several micro-batches, for test_loss_normalization: one after the
other, in folders under the one that is named; the rest of a folder's name says how many ranks it had.

torchrun --standalone --nproc-per-node 2 -m tests.train.weighing FOLDER (on_two_ranks does it without torchrun)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.train.sharing import Session, run_session
from tests.train.switches import compiler

TOKENS, WIDTH, SAMPLES, LENGTH = 20, 12, 40, 5

SHORT: dict[str, Any] = {
    "steps": 3,
    "batch_size": 12,
    "optimizer": {"name": "sgd", "lr": 0.1, "warmup_steps": 0},
    "eval": {"every": 3, "batches": 2},
    "loader": {"workers": 0},
    "monitor": 0,
}
GPT: dict[str, Any] = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 24, "vocab_size": 300}
BERT: dict[str, Any] = {"name": "bert", **GPT, "dropout": 0.0}
HF: dict[str, Any] = {
    "name": "hf:bert",
    "vocab_size": 300,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
SYNTHETIC: dict[str, Any] = {"path": "synthetic", "block_size": 24}
OWN: dict[str, Any] = {"model": f"{__name__}:Tagger", "data": f"{__name__}:data"}

CASES: dict[str, dict[str, Any]] = {
    "gpt": {"model": GPT, "data": "synthetic"},
    "bert": {"model": BERT, "data": "synthetic"},
    "hf": {"model": HF, "data": SYNTHETIC},
    "mean": {**OWN, "loss": f"{__name__}:mean"},
    "by-hand": {**OWN, "loss": f"{__name__}:by_hand"},
    "pair": {**OWN, "loss": f"{__name__}:pair"},
    "inside": {**OWN, "model": f"{__name__}:Judge"},
    "weighted": {**OWN, "loss": f"{__name__}:weighted"},
    "two": {**OWN, "loss": f"{__name__}:mean", "batch_size": 2, "steps": 12, "eval": {"every": 0}},
    "bert-pair": {"model": BERT, "data": "synthetic", "loss": f"{__name__}:pair"},
}
"""`two`: two samples a step, one a rank; in some steps one of them has no target that counts, in others neither."""

FSDP = ("bert", "mean", "pair")
COMPILED = ("bert", "pair")
SIZES = {1: (1, 12), 2: (3,)}


class Layer(nn.Module):
    """A block: it repeats, and can be compiled alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return functional.gelu(self.linear(x))


class Tagger(nn.Module):
    """Logits [batch, LENGTH, TOKENS] for tokens [batch, LENGTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.Sequential(Layer(), Layer())
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layers(self.tokens(tokens)))
        return logits


class Judge(Tagger):
    """The same with its loss, a mean over the targets that count."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]  # a model with a loss takes targets too
        return mean(super().forward(tokens), targets)


class Data:
    """Samples of which every other has no target that counts, and the others one to five."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        tokens = torch.arange(index, index + LENGTH) % TOKENS
        counted = 0 if index % 2 else index % LENGTH + 1
        return tokens, torch.where(torch.arange(LENGTH) < counted, (tokens * 7) % TOKENS, -100)


def data(split: str) -> Data:
    return Data()


def mean(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def by_hand(logits: Tensor, targets: Tensor) -> Tensor:
    """0 / 0 where none counts."""
    each = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return each.sum() / (targets != -100).sum()


def pair(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    total = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return total, (targets != -100).sum()


def weighted(logits: Tensor, targets: Tensor) -> tuple[Tensor, float]:
    """A count that isn't the number of targets, and not a tensor."""
    total, _ = pair(logits, targets)
    return total, 0.5 * len(targets)


def runs(session: Session) -> None:
    """Each case with each micro-batch."""
    world = session.ranks.world
    for name, case in CASES.items():
        for size in SIZES[world] if name != "two" else (2 // world,):
            session.train(f"{name}-{size}x{world}", **case, micro_batch_size=size)
    for name in FSDP if world > 1 else ():
        session.train(f"{name}-fsdp-3x2", **CASES[name], parallel="fsdp", micro_batch_size=3)
    for name in COMPILED:
        for mode, asked in (("regional", True), ("whole", "whole")):
            with compiler("aot_eager", most=0.0 if mode == "regional" else 2.0):
                session.train(f"{name}-{mode}-3x{world}", **CASES[name], compile=asked, micro_batch_size=3)


if __name__ == "__main__":
    run_session(SHORT, runs)
