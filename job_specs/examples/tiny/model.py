"""A model of one's own: `build` gets what the spec says beside its name."""

from __future__ import annotations

from torch import Tensor, nn


class Block(nn.Module):
    """x + mlp(norm(x))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Classifier(nn.Module):
    """Points [batch, 2] in, logits [batch, classes] out."""

    def __init__(self, width: int, depth: int, classes: int) -> None:
        super().__init__()
        self.enter = nn.Linear(2, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.leave = nn.Linear(width, classes)

    def forward(self, points: Tensor) -> Tensor:
        x = self.enter(points)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


def build(width: int = 64, depth: int = 3, classes: int = 3) -> nn.Module:
    """On the CPU, with fresh parameters: the trainer sets the seed, and moves it to the GPU."""
    return Classifier(width, depth, classes)
