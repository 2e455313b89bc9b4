"""ResNet-50 v1.5 as in torchvision: the stride of a bottleneck is in its 3 x 3 convolution (He et al. 2015; v1.5 as in
NVIDIA's and torchvision's models). 25 557 032 parameters at 1000 classes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from launch_train.common.config import ResNet as Shape

STAGES = (3, 4, 6, 3)
EXPANSION = 4


class ResNetModel(nn.Module):
    """Maps images [batch, 3, height, width] to logits [batch, classes]; with labels, to the mean loss in nats.

    In eval mode with labels, `correct` [3] afterwards has the images of the batch whose label is the first guess, those
    whose label is among the first five, and all.
    """

    correct: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.stem = nn.Sequential(_conv(3, width, 7, stride=2), nn.BatchNorm2d(width), nn.ReLU(inplace=True))
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        self.stages = nn.Sequential(*_stages(width))
        self.head = nn.Linear(8 * width * EXPANSION, shape.num_classes)
        self.apply(_initialise)

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        features = self.stages(self.pool(self.stem(images))).mean((2, 3))
        logits: Tensor = self.head(features)
        if labels is None:
            return logits
        if not self.training:
            guesses = logits.topk(min(5, logits.shape[1])).indices == labels[:, None]
            self.correct = torch.stack([guesses[:, 0].sum(), guesses.sum(), torch.ones_like(labels).sum()])
        return functional.cross_entropy(logits, labels)


def _stages(width: int) -> list[nn.Module]:
    widths = [width * 2**stage for stage in range(len(STAGES))]
    inputs = [width, *(EXPANSION * w for w in widths[:-1])]
    return [
        nn.Sequential(
            Bottleneck(before, inner, stride=1 if stage == 0 else 2),
            *(Bottleneck(EXPANSION * inner, inner, stride=1) for _ in range(blocks - 1)),
        )
        for stage, (before, inner, blocks) in enumerate(zip(inputs, widths, STAGES, strict=True))
    ]


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolutions with a shortcut, which is a 1 x 1 convolution if the shape changes."""

    def __init__(self, before: int, inner: int, *, stride: int) -> None:
        super().__init__()
        after = EXPANSION * inner
        self.path = nn.Sequential(
            *(_conv(before, inner, 1), nn.BatchNorm2d(inner), nn.ReLU(inplace=True)),
            *(_conv(inner, inner, 3, stride=stride), nn.BatchNorm2d(inner), nn.ReLU(inplace=True)),
            *(_conv(inner, after, 1), nn.BatchNorm2d(after)),
        )
        same = stride == 1 and before == after
        shortcut = (_conv(before, after, 1, stride=stride), nn.BatchNorm2d(after))
        self.shortcut = nn.Identity() if same else nn.Sequential(*shortcut)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.path(x) + self.shortcut(x))


def _conv(before: int, after: int, size: int, *, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(before, after, size, stride=stride, padding=size // 2, bias=False)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
