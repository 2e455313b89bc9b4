"""The sizes of the trainer's ResNet-50: one walk over its convolutions."""

from __future__ import annotations

from typing import NamedTuple

from launcher.plan.memory.model_sizes import ModelSizes, Saved

STAGES = (3, 4, 6, 3)
EXPANSION = 4


class Convolution(NamedTuple):
    """A convolution without bias and the batch norm behind it. `size`: height and width of the output."""

    inputs: int
    outputs: int
    kernel: int
    size: int
    activated: bool
    """A ReLU follows in place: it keeps no array of its own."""

    @property
    def weights(self) -> int:
        """Return the parameters of the kernel."""
        return self.inputs * self.outputs * self.kernel**2

    @property
    def numbers(self) -> int:
        """Return the numbers of the output of one image."""
        return self.outputs * self.size**2


def resnet_sizes(name: str, width: int, classes: int, image_size: int) -> ModelSizes:
    """Return the sizes of ResNet-50 (v1.5)."""
    stem, blocks = layers(width, image_size)
    every = [stem, *(layer for block in blocks for layer in block)]
    last = EXPANSION * 8 * width
    kernels = sum(layer.weights for layer in every)
    norms = 2 * sum(layer.outputs for layer in every)
    head = last * classes
    largest = max(blocks, key=lambda block: sum(layer.weights for layer in block))
    block = sum(layer.weights + 2 * layer.outputs for layer in largest)
    products = sum(layer.weights * layer.size**2 for layer in every) + head
    return ModelSizes(
        name=name,
        parameters=kernels + norms + head + classes,
        matrices=kernels + head,
        block=block,
        block_matrices=sum(layer.weights for layer in largest),
        root=stem.weights + 2 * stem.outputs + head + classes,
        head=head,
        units=1,
        unit="images",
        logits=classes,
        flops=6.0 * products,
        full=saved(stem, blocks, image_size, 4),
        half=saved(stem, blocks, image_size, 2),
    )


def layers(width: int, image_size: int) -> tuple[Convolution, list[list[Convolution]]]:
    """Return the first convolution, and those of each bottleneck (the last one of four is the shortcut's)."""
    size = halved(image_size)
    stem = Convolution(3, width, 7, size, True)
    size, before, blocks = halved(size), width, []
    for stage, count in enumerate(STAGES):
        inner, after = width * 2**stage, EXPANSION * width * 2**stage
        for number in range(count):
            wide, size = size, halved(size) if stage and not number else size
            path = [
                Convolution(before, inner, 1, wide, True),
                Convolution(inner, inner, 3, size, True),
                Convolution(inner, after, 1, size, False),
            ]
            blocks.append(path if number else [*path, Convolution(before, after, 1, size, False)])
            before = after
    return stem, blocks


def halved(size: int) -> int:
    """Return the output size of a convolution or a pool with stride 2 and half its kernel as padding."""
    return (size + 1) // 2


def saved(stem: Convolution, blocks: list[list[Convolution]], image_size: int, item: int) -> Saved:
    """Return the activations of an image; `item`: bytes of a convolution's number.

    A convolution keeps its input and a batch norm its own, which is the convolution's output. What a ReLU keeps is the
    input of the next convolution.
    """
    each = [item * sum(layer.numbers * (2 if layer.activated else 1) for layer in block) for block in blocks]
    ends = [item * block[2].numbers for block in blocks]  # the ReLU behind the sum
    pooled = stem.outputs * halved(stem.size) ** 2
    image = 3 * image_size**2 * item
    kept = [inside + end for inside, end in zip(each, ends, strict=True)]
    return Saved(
        repeats=len(blocks),
        blocks=sum(kept),
        entries=item * pooled + sum(ends[:-1]),
        operators=item * pooled + sum(ends[:-1]) + item * sum(layer.numbers for block in blocks for layer in block),
        block=max(kept),
        outside=image + 2 * item * stem.numbers + (8 + item) * pooled + item * blocks[-1][2].outputs,
        work=2 * item * max(layer.numbers for block in blocks for layer in block),
    )
