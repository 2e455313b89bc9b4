"""Models of parts 2 and 3: GPT-2 124M, ResNet-50 and BERT-large, and tiny ones for a CPU."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, Final


@dataclass(frozen=True)
class Sizes:
    """Models and data of the benchmarks.

    The GPT and its batches; ResNet-50's image size, first layer, batch and classes, with `each` JPEGs of size `pixels`
    per class; BERT and its batch. `steps` is the number of steps of a row.
    """

    name: str
    gpt: Mapping[str, int]
    gpt_batch: int
    global_batch: int
    image_size: int
    width: int
    image_batch: int
    classes: int
    each: int
    pixels: tuple[int, int]
    bert: Mapping[str, Any]
    bert_batch: int
    large: Mapping[str, int]
    large_batch: int
    steps: int
    compiles: bool = True


REAL: Final = Sizes(
    name="GPT-2 124M",
    gpt={"n_layer": 12, "n_head": 12, "n_embd": 768, "block_size": 1024, "vocab_size": 50304},
    gpt_batch=12,  # nanoGPT's
    global_batch=480,  # nanoGPT's half a million tokens
    image_size=224,
    width=64,
    image_batch=256,
    classes=1000,
    each=2,
    pixels=(500, 375),
    bert={"name": "bert-large"},
    bert_batch=32,
    large={"n_layer": 24, "n_head": 16, "n_embd": 2048, "block_size": 1024, "vocab_size": 50304},  # 1.3B, GPT-3 XL
    large_batch=8,
    steps=40,
)
"""GPT-2 124M, and ResNet-50 on images of ImageNet's typical size."""

SHRUNK: Final = Sizes(
    name="a tiny GPT",
    gpt={"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 32, "vocab_size": 320},
    gpt_batch=4,
    global_batch=16,
    image_size=32,
    width=4,
    image_batch=4,
    classes=10,
    each=2,
    pixels=(100, 75),
    bert={"name": "bert", "n_layer": 1, "n_head": 2, "n_embd": 16, "block_size": 16},
    bert_batch=4,
    large={"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 32, "vocab_size": 320},
    large_batch=4,
    steps=8,
    compiles=False,
)
"""Tiny models to test the benchmark itself, also without a GPU."""


def sizes(*, tiny: bool) -> Sizes:
    return SHRUNK if tiny else REAL


FORMULA: Final = (
    "MFU = tokens/s × (6 × parameters without positions + 12 × layers × width × block) / peak FLOP/s (dense, bf16)"
)
"""nanoGPT's estimate_mfu, after appendix B of the PaLM paper (launch_train.models.layers.flops_per_token)."""


def flops_per_token(shape: Mapping[str, Any]) -> float:
    """Return a GPT's FLOPs per token, forward and backward."""
    import torch

    from launch_train.common.config import Gpt
    from launch_train.models import gpt, layers

    with torch.device("meta"):
        return layers.flops_per_token(Gpt(**shape), gpt.GPT(Gpt(**shape)))


def peak(device: str) -> float | None:
    """Return the dense bf16 FLOP/s of the GPU that CUDA calls `device`; None if unknown."""
    from launch_train.bench import peaks

    teraflops = peaks.tflops(device).get("bf16")
    return teraflops * 1e12 if teraflops else None


@contextmanager
def pictures(wanted: Sizes, different: int = 100) -> Iterator[Path]:
    """Create a folder of JPEGs per class. Only `different` of them are distinct, which does not affect decoding."""
    import numpy as np

    made = [jpeg(np.random.default_rng(number), wanted.pixels) for number in range(different)]
    with tempfile.TemporaryDirectory() as folder:
        for number in range(wanted.classes * wanted.each):
            path = Path(folder) / f"{number // wanted.each:04d}" / f"{number % wanted.each}.jpg"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(made[number % different])
        yield Path(folder)


def jpeg(numbers: Any, pixels: tuple[int, int]) -> bytes:
    """Return a JPEG of coloured patches with grain, quality 90: at 500 × 375 pixels about 100 kB, as in ImageNet."""
    import numpy as np
    from PIL import Image

    patches = Image.fromarray(numbers.integers(0, 256, (12, 16, 3), dtype=np.uint8))
    smooth = np.asarray(patches.resize(pixels, Image.Resampling.BICUBIC), dtype=np.float32)
    grained = np.clip(smooth + numbers.normal(0, 12, smooth.shape), 0, 255).astype(np.uint8)
    file = BytesIO()
    Image.fromarray(grained).save(file, "JPEG", quality=90)
    return file.getvalue()
