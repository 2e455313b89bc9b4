"""GPT as in nanoGPT (github.com/karpathy/nanoGPT, model.py): learned positions, pre-LayerNorm, tied weights, GELU,
torch's scaled_dot_product_attention."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from launch_train.common.config import Gpt
from launch_train.models.layers import Attention, CrossEntropy, initialise


class GPT(nn.Module):
    """Maps tokens [batch, time] to logits [batch, time, vocab]; with targets, to the mean cross-entropy in nats."""

    def __init__(self, shape: Gpt) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocab_size, shape.n_embd)
        self.positions = nn.Embedding(shape.block_size, shape.n_embd)
        self.dropout = nn.Dropout(shape.dropout)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.n_layer))
        self.norm = nn.LayerNorm(shape.n_embd, bias=shape.bias)
        self.head = nn.Linear(shape.n_embd, shape.vocab_size, bias=False)
        self.head.weight = self.tokens.weight
        self.loss = CrossEntropy()
        self.apply(initialise)
        for name, parameter in self.named_parameters():
            if name.endswith("out.weight"):  # as GPT-2: each block adds to the residual twice
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * shape.n_layer))

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.positions(positions))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        if targets is None:
            return logits
        loss: Tensor = self.loss(logits, targets)
        return loss


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, shape: Gpt) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(shape.n_embd, bias=shape.bias)
        self.attention = Attention(shape.n_embd, shape.n_head, shape.dropout, bias=shape.bias, causal=True)
        self.norm_2 = nn.LayerNorm(shape.n_embd, bias=shape.bias)
        self.mlp = Mlp(shape)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        out: Tensor = x + self.mlp(self.norm_2(x))
        return out


class Mlp(nn.Module):
    """Two linear layers with GELU; the hidden layer is four times as wide."""

    def __init__(self, shape: Gpt) -> None:
        super().__init__()
        self.up = nn.Linear(shape.n_embd, 4 * shape.n_embd, bias=shape.bias)
        self.out = nn.Linear(4 * shape.n_embd, shape.n_embd, bias=shape.bias)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.dropout(self.out(functional.gelu(self.up(x))))
        return out
