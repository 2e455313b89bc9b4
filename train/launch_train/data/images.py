"""Images from class folders or tar shards: decoded, cropped and flipped on the CPU, normalised on the device."""

from __future__ import annotations

import math
import re
from functools import lru_cache
from io import BytesIO
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from launch_train.common.errors import UsageError
from launch_train.common.text import one_line
from launch_train.data.batch import Tree
from launch_train.data.image_index import Listing
from launch_train.data.map_dataset import Samples
from launch_train.data.sample_order import AUGMENT, HELD_OUT_PART, generator, order
from launch_train.data.source import HELD_OUT_SHARE, Batch

MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Mean and standard deviation of ImageNet's red, green and blue (range 0 to 1), as used by published models."""

AREA, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
"""Ranges of a random crop: share of the area, and aspect ratio (Szegedy et al. 2014; torchvision's defaults)."""

CENTRE = 224 / 256
"""Side of the centre crop for evaluation, relative to the image's shorter side."""


class Images(Samples):
    """A source of images: uint8 [batch, size, size, 3] on the CPU, float32 [batch, 3, size, size] after `finish`."""

    unit = "images"

    def finish(self, batch: Batch) -> Batch:
        images, labels = batch
        mean, deviation = _scale(images.device)
        return ((images - mean) / deviation).permute(0, 3, 1, 2).contiguous(), labels


@lru_cache(maxsize=1)
def _scale(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and deviation on the device. Cached: copying them for each batch would synchronise with the GPU."""
    mean, deviation = ((torch.tensor(values) * 255).to(device) for values in (MEAN, DEVIATION))
    return mean, deviation


class Box(NamedTuple):
    """A crop of an image, in pixels. `flip`: mirrored left to right."""

    left: float
    top: float
    width: float
    height: float
    flip: bool = False


class Pictures:
    """The images of a listing, or those at the indices `places`. `changes`: random crop and flip, else centre crop."""

    def __init__(
        self, listing: Listing, size: int, seed: int, *, changes: bool, places: NDArray[np.int64] | None = None
    ) -> None:
        self.name = listing.name
        self._listing, self._size, self._seed, self._changes, self._places = listing, size, seed, changes, places

    def __len__(self) -> int:
        return len(self._listing) if self._places is None else len(self._places)

    def where(self, index: int) -> str:
        return self._listing.where(self._at(index))

    def item(self, index: int, epoch: int) -> Tree:
        numbers = generator(self._seed, AUGMENT, index, epoch) if self._changes else None
        try:
            content, label = self._listing.read(self._at(index))
            return decoded(content, self._size, numbers), label
        except Exception as error:  # Pillow's decoders may raise anything
            text = re.sub(r"<[^>]* object at 0x\w+>", "it", one_line(error))
            raise UsageError(f"data: {self.where(index)} is not a readable image: {text}") from error

    def _at(self, index: int) -> int:
        return index if self._places is None else int(self._places[index])


def decoded(content: bytes, size: int, numbers: np.random.Generator | None) -> NDArray[np.uint8]:
    """Decode an image, crop it (at random if `numbers` is given), and resize it to [size, size, 3].

    A JPEG is decoded at reduced resolution if that is enough; the format allows 1/8, 1/4, 1/2 and 1.

    Raises OSError, SyntaxError or ValueError if Pillow can't read it.
    """
    with Image.open(BytesIO(content)) as image:
        width, height = image.size
        side = CENTRE * min(width, height)
        box = Box((width - side) / 2, (height - side) / 2, side, side)
        if numbers is not None:
            box = random_crop(width, height, numbers)
        image.draft("RGB", (math.ceil(width * size / box.width), math.ceil(height * size / box.height)))
        x, y = image.size[0] / width, image.size[1] / height
        right, bottom = min((box.left + box.width) * x, image.size[0]), min((box.top + box.height) * y, image.size[1])
        colours = image.convert("RGB")
        small = colours.resize((size, size), Image.Resampling.BILINEAR, (box.left * x, box.top * y, right, bottom))
    pixels = np.asarray(small)
    return (pixels[:, ::-1] if box.flip else pixels).copy()


def random_crop(width: int, height: int, numbers: np.random.Generator) -> Box:
    """Return a random crop in whole pixels, flipped with probability 1/2.

    If ten candidates don't fit into the image, return the largest centre crop that RATIO allows.
    """
    flip = bool(numbers.integers(2))
    for _ in range(10):
        area = width * height * numbers.uniform(*AREA)
        ratio = math.exp(numbers.uniform(math.log(RATIO[0]), math.log(RATIO[1])))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return Box(int(numbers.integers(width - w + 1)), int(numbers.integers(height - h + 1)), w, h, flip)
    w, h = min(width, round(height * RATIO[1])), min(height, round(width / RATIO[0]))
    return Box((width - w) / 2, (height - h) / 2, w, h, flip)


def open_images(
    train: Listing,
    held_out: Listing | None,
    *,
    size: int,
    seed: int,
    batch_size: int,
    steps: int,
    facts: dict[str, Any],
) -> Images:
    """Return the source for listed images. Without `held_out`, 10 % of `train`, chosen by the seed, are held out."""
    kept: NDArray[np.int64] | None = None
    if held_out is not None:
        evaluated = Pictures(held_out, size, seed, changes=False)
    elif len(train) < 2:
        raise UsageError(f"data: {train.name} has one image; at least two are needed, because a part is held out")
    else:
        places = order(seed, HELD_OUT_PART, 0, len(train))
        count = len(train) - max(1, len(train) // HELD_OUT_SHARE)
        kept = np.sort(places[:count])
        evaluated = Pictures(train, size, seed, changes=False, places=np.sort(places[count:]))
    trained = Pictures(train, size, seed, changes=True, places=kept)
    about = {**facts, "data_classes": train.classes, "data_sha256": train.sha256}
    source = Images(trained, evaluated, seed=seed, batch_size=batch_size, facts=about, steps=steps)
    source.class_names = train.labels
    source.num_classes, source.image_size = max(train.classes, held_out.classes if held_out else 0), size
    return source
