"""Layers that several models share: attention, initial weights, and losses, which can be compiled like blocks."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from launch_train.common.config import Bert, Gpt
from launch_train.data.source import IGNORED


class Attention(nn.Module):
    """Multi-head self-attention, `causal` or bidirectional, with torch's scaled_dot_product_attention."""

    def __init__(self, width: int, heads: int, dropout: float, *, bias: bool, causal: bool) -> None:
        super().__init__()
        self.heads, self.p, self.causal = heads, dropout, causal
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        parts = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)  # each [batch, heads, time, width / heads]
        p = self.p if self.training else 0.0
        y = functional.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=self.causal)
        out: Tensor = self.dropout(self.out(y.transpose(1, 2).reshape(batch, time, width)))
        return out


def initialise(module: nn.Module) -> None:
    """Initialise as GPT-2 and BERT: weights normal with standard deviation 0.02, biases 0."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


class CrossEntropy(nn.Module):
    """Mean cross-entropy in nats of logits [..., classes] and targets [...].

    Has no parameters, so it isn't in checkpoints. Over a vocabulary of 50 000 it moves more memory than a block: eager
    code writes arrays of the logits' size four times in fp32, compiled code never.
    """

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


class MaskedCrossEntropy(CrossEntropy):
    """Mean cross-entropy over the targets that are not IGNORED; 0 (not NaN) if all are."""

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        flat = logits.flatten(0, -2), targets.flatten()
        total = functional.cross_entropy(*flat, ignore_index=IGNORED, reduction="sum")
        return total / (targets != IGNORED).sum().clamp(min=1)


def flops_per_token(shape: Gpt | Bert, model: nn.Module) -> float:
    """Return the FLOPs of forward and backward per token: 6 per parameter, and 12 x layers x width x time for attention
    (nanoGPT's estimate_mfu, after appendix B of the PaLM paper).

    Embeddings of positions, and of BERT's two types, don't count, as they are only looked up; that of tokens is also
    the decoder.
    """
    looked_up = (shape.block_size + (2 if isinstance(shape, Bert) else 0)) * shape.n_embd
    parameters = sum(p.numel() for p in model.parameters()) - looked_up
    return 6 * parameters + 12 * shape.n_layer * shape.n_embd * shape.block_size


def losses(model: nn.Module) -> list[nn.Module]:
    """Return the model's loss modules, which are worth compiling besides its blocks."""
    return [module for module in model.modules() if isinstance(module, CrossEntropy)]
