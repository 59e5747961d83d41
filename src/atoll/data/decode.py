"""Decoding of images to uint8 arrays of one size.

Decoding follows torchvision's ``ImageFolder``, ``Resize`` and ``CenterCrop``, so that numbers are comparable:
alpha is dropped, the shorter side is resized (bilinear, antialiased), and the centre is cropped; an image that
already has the size is not changed. In addition, EXIF orientation is applied, and images of more than 8 bits are
windowed.
"""

from __future__ import annotations

import io
import os
import struct
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

Encoded = bytes | Image.Image
Window = Literal["fixed", "per-image"]

# Exceptions that Pillow's plugins raise on damaged files; any other exception is a defect here and propagates.
_DAMAGED: tuple[type[Exception], ...] = (
    *(OSError, EOFError, SyntaxError, ValueError, IndexError, TypeError),
    *(struct.error, zlib.error),
)

# The formats that are opened. Pillow knows more: EPS starts another program (Ghostscript), and each is more code
# that reads bytes from elsewhere.
FORMATS = ("PNG", "JPEG", "BMP", "TIFF", "WEBP", "GIF", "PPM", "JPEG2000")

_FULL_RANGE = (0.0, 65535.0)


@dataclass(frozen=True)
class Decoding:
    """Options of decoding: the fields of the same names in `atoll.data.options.DataOptions`.

    Attributes:
        image_size: Side of a decoded image.
        channels: 3 for colour, 1 for grey.
        window: How images of more than 8 bits become 8 bits: ``"fixed"`` or ``"per-image"``.
        window_low: The value that becomes 0, for a fixed window.
        window_high: The value that becomes 255, for a fixed window.
    """

    image_size: int = 32
    channels: int = 3
    window: str = "fixed"
    window_low: float = _FULL_RANGE[0]
    window_high: float = _FULL_RANGE[1]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape (C, H, W) of a decoded image."""
        return self.channels, self.image_size, self.image_size


class CorruptImageError(Exception):
    """Error for an image that cannot be decoded; the message is a clause with the reason and begins with "it"."""


def decode(encoded: Encoded, how: Decoding) -> NDArray[np.uint8]:
    """Decode one image.

    Args:
        encoded: The bytes of an image file, or an opened image.
        how: Options of decoding.

    Shape:
        - output: (C, H, W) uint8

    Raises:
        CorruptImageError: The bytes are not a complete image, or its values cannot be windowed.
    """
    return _pixels(
        encoded, lambda image: _fit(_eight_bit(ImageOps.exif_transpose(image), how), how.image_size)
    )


def decode_stored(encoded: Encoded, channels: int) -> NDArray[np.uint8]:
    """Decode one image at its stored size and orientation, to which boxes and masks refer.

    Args:
        encoded: The bytes of an image file, or an opened image.
        channels: 3 for colour, 1 for grey.

    Shape:
        - output: (C, H, W) uint8

    Raises:
        CorruptImageError: The bytes are not a complete image, or its values cannot be windowed.
    """
    return _pixels(encoded, lambda image: _eight_bit(image, Decoding(channels=channels)))


def _pixels(encoded: Encoded, convert: Callable[[Image.Image], Image.Image]) -> NDArray[np.uint8]:
    """Open and convert an image; (C, H, W)."""
    try:
        if isinstance(encoded, bytes):
            if not encoded:
                raise CorruptImageError("it is empty")
            encoded = _open(encoded)
        pixels = np.asarray(convert(encoded))
    except UnidentifiedImageError as error:  # its message contains the repr of a buffer
        raise CorruptImageError(
            f"it is damaged, or in no format that is read ({', '.join(FORMATS)})"
        ) from error
    except Image.DecompressionBombError as error:
        raise CorruptImageError("it has more pixels than are safe to decode") from error
    except _DAMAGED as error:
        message = " ".join(str(error).split()) or type(error).__name__
        raise CorruptImageError(f"it is damaged ({message})") from error
    return np.ascontiguousarray(pixels.transpose(2, 0, 1)) if pixels.ndim == 3 else pixels[None]


def _open(encoded: bytes) -> Image.Image:
    """Open an image of an allowed format; of an animated one, the first frame is read."""
    return Image.open(io.BytesIO(encoded), formats=FORMATS)


def has_many_bits(encoded: Encoded) -> bool:
    """Whether an image has more than 8 bits per pixel and channel, so that a window converts it."""
    try:
        image = _open(encoded) if isinstance(encoded, bytes) else encoded
    except _DAMAGED:
        return False
    return image.mode.startswith("I") or image.mode == "F"


def decode_batch(encoded: Sequence[Encoded], how: Decoding) -> tuple[NDArray[np.uint8], dict[int, str]]:
    """Decode images on all cores.

    Args:
        encoded: The images.
        how: Options of decoding.

    Returns:
        The pixels, with zeros for corrupt images, and the reasons for the corrupt ones by position.

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
    else:  # Pillow releases the global interpreter lock while it decodes
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(work, tasks))
    return pixels, dict(sorted(reasons.items()))


def _eight_bit(image: Image.Image, how: Decoding) -> Image.Image:
    mode = "RGB" if how.channels == 3 else "L"
    if image.mode.startswith("I") or image.mode == "F":
        image = _windowed(image, how)
    if image.mode == "P" and "transparency" in image.info:  # Pillow requires this intermediate mode
        image = image.convert("RGBA")
    return image if image.mode == mode else image.convert(mode)


def _windowed(image: Image.Image, how: Decoding) -> Image.Image:
    """Convert a 16- or 32-bit grey image to 8 bits."""
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
    """Resize the shorter side to `size`, then crop the centre square."""
    width, height = image.size
    short = min(width, height)
    if short != size:
        width, height = int(size * width / short), int(size * height / short)
        image = image.resize((width, height), Image.Resampling.BILINEAR)
    if (width, height) != (size, size):
        left, top = round((width - size) / 2.0), round((height - size) / 2.0)
        image = image.crop((left, top, left + size, top + size))
    return image
