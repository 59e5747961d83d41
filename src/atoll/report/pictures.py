"""Images as a page shows them: small, and within the page's text."""

from __future__ import annotations

import base64
import io

import torch
from PIL import Image
from torch import Tensor


def thumbnails(pixels: Tensor, side: int) -> Tensor:
    """Reduce images to a largest side.

    Shape:
        pixels: uint8 (n, C, h, w); output: the same with sides of at most ``side``.
    """
    if pixels.shape[-1] <= side:
        return pixels
    small = torch.nn.functional.interpolate(pixels.float(), size=side, mode="area")
    return small.round().to(torch.uint8)


def data_uri(pixels: Tensor) -> str:
    """Make the data URI of a PNG, in colour if there are three channels or more.

    Shape:
        pixels: uint8 (h, w, C).
    """
    shown = pixels[..., :3] if pixels.shape[2] >= 3 else pixels[..., 0]
    file = io.BytesIO()
    Image.fromarray(shown.numpy()).save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
