"""BERT (Devlin et al. 2018) with a masked-language-modelling head, as in google-research/bert and transformers'
BertForMaskedLM: post-LayerNorm, learned positions, exact GELU, decoder weights tied to the token embedding.

All tokens have the first of the published model's two token types, and there is no padding.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from launch_train.common.config import Bert
from launch_train.models.layers import Attention, MaskedCrossEntropy, initialise

NORM = 1e-12


class BertForMasked(nn.Module):
    """Maps tokens [batch, time] to logits [batch, time, vocab]; with targets, to the mean cross-entropy in nats of the
    hidden tokens."""

    def __init__(self, shape: Bert) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocab_size, shape.n_embd)
        self.positions = nn.Embedding(shape.block_size, shape.n_embd)
        self.types = nn.Embedding(2, shape.n_embd)
        self.norm = nn.LayerNorm(shape.n_embd, eps=NORM)
        self.dropout = nn.Dropout(shape.dropout)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.n_layer))
        self.transform = nn.Linear(shape.n_embd, shape.n_embd)
        self.head_norm = nn.LayerNorm(shape.n_embd, eps=NORM)
        self.head = nn.Linear(shape.n_embd, shape.vocab_size)
        self.head.weight = self.tokens.weight
        self.loss = MaskedCrossEntropy()
        self.apply(initialise)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.types(torch.zeros_like(positions)) + self.positions(positions)
        x = self.dropout(self.norm(x))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.head_norm(functional.gelu(self.transform(x))))
        if targets is None:
            return logits
        loss: Tensor = self.loss(logits, targets)
        return loss


class Block(nn.Module):
    """norm(x + attention(x)), then norm(x + mlp(x))."""

    def __init__(self, shape: Bert) -> None:
        super().__init__()
        self.attention = Attention(shape.n_embd, shape.n_head, shape.dropout, bias=True, causal=False)
        self.norm_1 = nn.LayerNorm(shape.n_embd, eps=NORM)
        self.up = nn.Linear(shape.n_embd, 4 * shape.n_embd)
        self.out = nn.Linear(4 * shape.n_embd, shape.n_embd)
        self.dropout = nn.Dropout(shape.dropout)
        self.norm_2 = nn.LayerNorm(shape.n_embd, eps=NORM)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm_1(x + self.attention(x))
        out: Tensor = self.norm_2(x + self.dropout(self.out(functional.gelu(self.up(x)))))
        return out
