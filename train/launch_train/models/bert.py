"""BERT (Devlin et al. 2018) with a masked-language-modelling head, as in google-research/bert and transformers'
BertForMaskedLM: post-LayerNorm, learned positions, exact GELU, decoder weights tied to the token embedding.

All tokens have the first of the published model's two token types, and there is no padding.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from launch_train.common.config import Bert
from launch_train.models.losses import MaskedCrossEntropy

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
        self.apply(_initialise)

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
        self.attention = Attention(shape)
        self.norm_1 = nn.LayerNorm(shape.n_embd, eps=NORM)
        self.up = nn.Linear(shape.n_embd, 4 * shape.n_embd)
        self.out = nn.Linear(4 * shape.n_embd, shape.n_embd)
        self.dropout = nn.Dropout(shape.dropout)
        self.norm_2 = nn.LayerNorm(shape.n_embd, eps=NORM)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm_1(x + self.attention(x))
        out: Tensor = self.norm_2(x + self.dropout(self.out(functional.gelu(self.up(x)))))
        return out


class Attention(nn.Module):
    """Bidirectional multi-head self-attention."""

    def __init__(self, shape: Bert) -> None:
        super().__init__()
        self.heads, self.p = shape.n_head, shape.dropout
        self.qkv = nn.Linear(shape.n_embd, 3 * shape.n_embd)
        self.out = nn.Linear(shape.n_embd, shape.n_embd)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        parts = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)  # each [batch, heads, time, width / heads]
        y = functional.scaled_dot_product_attention(q, k, v, dropout_p=self.p if self.training else 0.0)
        out: Tensor = self.dropout(self.out(y.transpose(1, 2).reshape(batch, time, width)))
        return out


def _initialise(module: nn.Module) -> None:
    """Initialise weights from a normal distribution with standard deviation 0.02, biases with 0."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)


def flops_per_token(shape: Bert, model: nn.Module) -> float:
    """Return the FLOPs of forward and backward per token: 6 per parameter, and 12 x layers x width x time for attention
    (appendix B of the PaLM paper).

    Position and type embeddings don't count, as they are only looked up; the token embedding is also the decoder.
    """
    looked_up = (shape.block_size + 2) * shape.n_embd
    parameters = sum(p.numel() for p in model.parameters()) - looked_up
    return 6 * parameters + 12 * shape.n_layer * shape.n_embd * shape.block_size
