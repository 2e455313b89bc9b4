"""Small pictures of images as PNG, encoded with the standard library: Pillow is needed only by data in image files."""

from __future__ import annotations

import struct
import zlib
from base64 import b64encode

import torch
from torch import Tensor
from torch.nn import functional

SIDE = 64
"""Largest width and height, in pixels: a picture then has at most 12 KB."""


def thumbnails(images: Tensor) -> list[str]:
    """Return each image as a PNG in base64.

    `images`: uint8 [count, height, width, 3], or [count, channels, height, width]. Floats may be normalised in any way,
    so each image is stretched to its own range. The first three channels are shown, or only the first.
    """
    images = images.cpu()
    if images.dtype == torch.uint8:
        images = images.permute(0, 3, 1, 2) if images.shape[-1] == 3 else images
        levels = images.float()
    else:
        levels = images.float().nan_to_num(0.0, 0.0, 0.0)
        low, high = levels.amin((1, 2, 3), keepdim=True), levels.amax((1, 2, 3), keepdim=True)
        levels = (levels - low) * (255 / (high - low).clamp(min=1e-6))
    colours = levels[:, :3] if levels.shape[1] >= 3 else levels[:, :1].expand(-1, 3, -1, -1)
    height, width = colours.shape[2:]
    scale = min(1.0, SIDE / max(height, width))
    size = max(1, round(height * scale)), max(1, round(width * scale))
    pixels = functional.interpolate(colours, size, mode="area").round().clamp(0, 255).to(torch.uint8)
    return [b64encode(png(image)).decode() for image in pixels.permute(0, 2, 3, 1)]


def png(pixels: Tensor) -> bytes:
    """Return uint8 [height, width, 3] as a PNG of 8 bits per channel (W3C PNG, sections 5 and 11)."""
    height, width, _ = pixels.shape
    rows = b"".join(b"\0" + bytes(row.flatten().tolist()) for row in pixels)  # each with filter type 0: none
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(rows, 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in parts)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
