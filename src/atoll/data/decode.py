"""From an encoded image to a uint8 array of one size.

Follows torchvision's image folder and its ``Resize`` and ``CenterCrop``, so that numbers can be compared:
alpha is dropped, the shorter side is resized (bilinear, antialiased) and the centre is cut out; an image that
has the size already keeps every bit. Beyond that, EXIF orientation is applied, and images of more than 8 bits
go through a window.
"""

from __future__ import annotations

import io
import os
import struct
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

Encoded = bytes | Image.Image
WINDOWS = ("fixed", "per-image")

# What Pillow's plugins raise on damaged files; anything else is a fault of ours and should be seen.
_DAMAGED: tuple[type[Exception], ...] = (
    *(OSError, EOFError, SyntaxError, ValueError, IndexError, TypeError),
    *(struct.error, zlib.error),
)

_FULL_RANGE = (0.0, 65535.0)


@dataclass(frozen=True)
class Decoding:
    """What decides the pixels: the fields of the same names in `atoll.data.options.DataOptions`."""

    image_size: int = 32
    channels: int = 3
    window: str = "fixed"
    window_low: float = _FULL_RANGE[0]
    window_high: float = _FULL_RANGE[1]

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W) of a decoded image."""
        return self.channels, self.image_size, self.image_size


class CorruptImageError(Exception):
    """An image that cannot be decoded; the message is a clause that says why, and begins with "it"."""


def decode(encoded: Encoded, how: Decoding) -> NDArray[np.uint8]:
    """Decodes one image.

    Shape:
        - output: (C, H, W) uint8

    Raises:
        CorruptImageError: The bytes are not a whole image, or its values do not fit the window.
    """
    try:
        if isinstance(encoded, bytes):
            if not encoded:
                raise CorruptImageError("it is empty")
            encoded = Image.open(io.BytesIO(encoded))
        image = ImageOps.exif_transpose(encoded)
        image = _fit(_eight_bit(image, how), how.image_size)
    except UnidentifiedImageError as error:  # whose own words name an object in memory
        raise CorruptImageError("it is damaged, or in no image format that can be read") from error
    except Image.DecompressionBombError as error:
        raise CorruptImageError("it has more pixels than are safe to decode") from error
    except _DAMAGED as error:
        words = " ".join(str(error).split()) or type(error).__name__
        raise CorruptImageError(f"it is damaged ({words})") from error
    pixels = np.asarray(image)
    return np.ascontiguousarray(pixels.transpose(2, 0, 1)) if how.channels == 3 else pixels[None]


def decode_batch(encoded: Sequence[Encoded], how: Decoding) -> tuple[NDArray[np.uint8], dict[int, str]]:
    """Decodes images on all cores.

    Returns:
        The pixels, with zeros where an image is corrupt; and the reasons of the corrupt ones by position.

    Shape:
        - output: (n, C, H, W) uint8
    """
    pixels = np.zeros((len(encoded), *how.shape), dtype=np.uint8)
    reasons: dict[int, str] = {}

    def work(positions: range) -> None:
        for i in positions:
            try:
                pixels[i] = decode(encoded[i], how)
            except CorruptImageError as error:
                reasons[i] = str(error)

    workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    tasks = [range(start, min(start + 32, len(encoded))) for start in range(0, len(encoded), 32)]
    if workers == 1 or len(tasks) == 1:
        work(range(len(encoded)))
    else:  # Pillow releases the interpreter's lock while it decodes
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(work, tasks))
    return pixels, dict(sorted(reasons.items()))


def _eight_bit(image: Image.Image, how: Decoding) -> Image.Image:
    mode = "RGB" if how.channels == 3 else "L"
    if image.mode.startswith("I") or image.mode == "F":
        image = _windowed(image, how)
    if image.mode == "P" and "transparency" in image.info:  # Pillow asks for this detour
        image = image.convert("RGBA")
    return image if image.mode == mode else image.convert(mode)


def _windowed(image: Image.Image, how: Decoding) -> Image.Image:
    """A 16- or 32-bit grey image as 8 bits."""
    values = np.asarray(image).astype(np.float64)
    if not np.isfinite(values).all():
        raise CorruptImageError("it holds values that are not finite")
    low, high = how.window_low, how.window_high
    if how.window == "per-image":
        low, high = values.min(), values.max()
    elif image.mode == "F" and (low, high) == _FULL_RANGE:
        raise CorruptImageError(
            "it holds floating-point values, and the recipe does not say which are black and white "
            "(data.window_low and data.window_high, or data.window = 'per-image')"
        )
    scaled = (values - low) * (255.0 / (high - low if high > low else 1.0))
    return Image.fromarray(np.rint(scaled.clip(0, 255)).astype(np.uint8))


def _fit(image: Image.Image, size: int) -> Image.Image:
    """Shorter side to `size`, then the centre square."""
    width, height = image.size
    short = min(width, height)
    if short != size:
        width, height = int(size * width / short), int(size * height / short)
        image = image.resize((width, height), Image.Resampling.BILINEAR)
    if (width, height) != (size, size):
        left, top = round((width - size) / 2.0), round((height - size) / 2.0)
        image = image.crop((left, top, left + size, top + size))
    return image
