"""A GPT in nanoGPT's shape (github.com/karpathy/nanoGPT, model.py): learned positions, LayerNorm before each part,
weight tying, GELU, attention by torch's scaled_dot_product_attention."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from launch_train.common.config import Gpt
from launch_train.models.losses import CrossEntropy


class GPT(nn.Module):
    """Tokens [batch, time] in; the mean cross-entropy in nats out, or logits [batch, time, vocab] without targets."""

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
        self.apply(_initialise)
        _scale_residuals(self, shape.n_layer)

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
        self.attention = Attention(shape)
        self.norm_2 = nn.LayerNorm(shape.n_embd, bias=shape.bias)
        self.mlp = Mlp(shape)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        out: Tensor = x + self.mlp(self.norm_2(x))
        return out


class Attention(nn.Module):
    """Causal self-attention over several heads."""

    def __init__(self, shape: Gpt) -> None:
        super().__init__()
        self.heads = shape.n_head
        self.p = shape.dropout
        self.qkv = nn.Linear(shape.n_embd, 3 * shape.n_embd, bias=shape.bias)
        self.out = nn.Linear(shape.n_embd, shape.n_embd, bias=shape.bias)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        parts = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)  # each [batch, heads, time, width / heads]
        p = self.p if self.training else 0.0
        y = functional.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        out: Tensor = self.dropout(self.out(y.transpose(1, 2).reshape(batch, time, width)))
        return out


class Mlp(nn.Module):
    """Four times as wide in the middle."""

    def __init__(self, shape: Gpt) -> None:
        super().__init__()
        self.up = nn.Linear(shape.n_embd, 4 * shape.n_embd, bias=shape.bias)
        self.out = nn.Linear(4 * shape.n_embd, shape.n_embd, bias=shape.bias)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.dropout(self.out(functional.gelu(self.up(x))))
        return out


def _initialise(module: nn.Module) -> None:
    """Normal with 0.02, biases 0 (GPT-2)."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def _scale_residuals(model: nn.Module, layers: int) -> None:
    """Each block adds twice to the residual stream: what it adds starts smaller, by 1 / sqrt(2 layers) (GPT-2)."""
    for name, parameter in model.named_parameters():
        if name.endswith("out.weight"):
            nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers))


def flops_per_token(shape: Gpt, model: nn.Module) -> float:
    """Forward and backward of one token: 6 for each parameter but the positions', and 12 layers x width x time for
    attention (nanoGPT's estimate_mfu, after appendix B of the PaLM paper)."""
    parameters = sum(p.numel() for p in model.parameters()) - shape.block_size * shape.n_embd
    return 6 * parameters + 12 * shape.n_layer * shape.n_embd * shape.block_size
