"""Decoding of images to uint8 arrays of one size.

Decoding follows torchvision's ``ImageFolder``, ``Resize`` and ``CenterCrop``, so that numbers are comparable:
alpha is dropped, the shorter side is resized (bilinear, antialiased), and the centre is cropped; an image that
already has the size is not changed. In addition, EXIF orientation is applied, and images of more than 8 bits are
windowed, DICOM images by the window in the file. Arrays may have any number of channels; each is resized
separately.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from atoll.core.errors import UserError
from atoll.core.processes import num_cores
from atoll.core.schema import ImageSize
from atoll.core.text import error_words
from atoll.data import tiff
from atoll.data.arrays import TOO_LARGE, ArrayError, is_array, of_pillows_types, read_array
from atoll.data.dicom import DicomError, Scan, is_dicom, read_dicom
from atoll.data.jpeg2000 import refuse_wrapped

Encoded = bytes | Image.Image | NDArray[Any]
Window = Literal["fixed", "per-image"]

# Exceptions that Pillow's plugins raise on damaged files; any other exception is a defect here and propagates.
_DAMAGED: tuple[type[Exception], ...] = (
    *(OSError, EOFError, SyntaxError, ValueError, IndexError, TypeError),
    *(struct.error, zlib.error),
)

# The formats that are opened. Pillow supports more, but EPS starts another program (Ghostscript), and every format
# is additional code that reads untrusted bytes.
FORMATS = ("PNG", "JPEG", "BMP", "TIFF", "WEBP", "GIF", "PPM", "JPEG2000")

_FULL_RANGE = (0.0, 65535.0)
_THIN = 100  # ratio of length to width; such images may become large before the centre is cropped:
_MOST_RESIZED = 2**26  # pixels


@dataclass(frozen=True)
class Decoding:
    """Options of decoding: the fields of the same names in `atoll.data.options.DataOptions`.

    Attributes:
        image_size: Side of a decoded image.
        channels: 3 for colour, 1 for grey; any other number for arrays with that number of channels.
        window: How images of more than 8 bits become 8 bits: ``"fixed"`` or ``"per-image"``.
        window_low: The value that becomes 0, for a fixed window.
        window_high: The value that becomes 255, for a fixed window.
    """

    image_size: ImageSize = 32
    channels: int = 3
    window: str = "fixed"
    window_low: float = _FULL_RANGE[0]
    window_high: float = _FULL_RANGE[1]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape (C, H, W) of a decoded image."""
        return self.channels, self.image_size, self.image_size

    @property
    def says_window(self) -> bool:
        """Whether the values that become black and white are given, not only the default."""
        return (self.window_low, self.window_high) != _FULL_RANGE


@dataclass(frozen=True)
class Values:
    """Values of images with more than 8 bits, before the window.

    Attributes:
        low: The smallest value.
        high: The largest value.
        scans: Whether they are DICOM's, whose files contain a window.
    """

    low: float
    high: float
    scans: bool = False

    def joined(self, other: Values | None) -> Values:
        """The values of both."""
        if other is None:
            return self
        return Values(min(self.low, other.low), max(self.high, other.high), self.scans or other.scans)


class CorruptImageError(Exception):
    """Error for an image that cannot be decoded; the message is a clause with the reason and begins with "it"."""


def decode(encoded: Encoded, how: Decoding) -> NDArray[np.uint8]:
    """Decode one image.

    Args:
        encoded: The bytes of an image file, an opened image, or an array (H, W), (H, W, C) or (C, H, W).
        how: Options of decoding.

    Shape:
        - output: (C, H, W) uint8

    Raises:
        CorruptImageError: The bytes are not a complete image, its values cannot be windowed, or it has another
            number of channels.
    """
    return _decoded(encoded, how)[0]


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
    return _decoded(encoded, Decoding(channels=channels), stored=True)[0]


def _decoded(
    encoded: Encoded, how: Decoding, stored: bool = False
) -> tuple[NDArray[np.uint8], Values | None]:
    """Open and convert an image; (C, H, W), and its values if it has more than 8 bits."""
    try:
        if isinstance(encoded, bytes):
            if not encoded:
                raise CorruptImageError("it is empty")
            opened = _open(encoded, how.channels)
        elif isinstance(opened := encoded, Image.Image) and tiff.misreads(opened):
            raise CorruptImageError("it is a TIFF file of a kind that Pillow misreads; give the file instead")
        windowed = how.says_window or how.window != "fixed"
        if windowed and isinstance(opened, Image.Image) and tiff.loses_bits(opened):
            opened = tiff.read_all_bits(encoded, how.channels)
        inverted = isinstance(encoded, bytes) and tiff.is_tiff(encoded) and tiff.white_is_zero(encoded)
        found: list[Values] = []
        planes = []
        for band, mode in _bands(opened, how.channels):
            if isinstance(band, Image.Image) and not stored:
                band = ImageOps.exif_transpose(band)
            image = _eight_bit(band, mode, how, found, inverted)
            plane = np.asarray(image if stored else _fit(image, how.image_size))
            planes.append(plane.transpose(2, 0, 1) if plane.ndim == 3 else plane[None])
    except UserError:  # a library is not installed
        raise
    except (ArrayError, DicomError) as error:
        raise CorruptImageError(str(error)) from error
    except UnidentifiedImageError as error:  # its message contains the repr of a buffer
        raise CorruptImageError(
            f"it is damaged, or in no format that is read ({', '.join(FORMATS)})"
        ) from error
    except (Image.DecompressionBombError, MemoryError) as error:
        raise CorruptImageError(TOO_LARGE) from error
    except _DAMAGED as error:
        raise CorruptImageError(f"it is damaged ({error_words(error)})") from error
    values = reduce(Values.joined, found) if found else None
    return np.ascontiguousarray(np.concatenate(planes)), values


def _open(encoded: bytes, channels: int) -> Image.Image | Scan | NDArray[Any]:
    """Open an image of an allowed format; of several frames, the first is read."""
    if is_dicom(encoded):
        return read_dicom(encoded)
    if is_array(encoded):
        return read_array(encoded)
    if channels not in (1, 3) and tiff.is_tiff(encoded) and not tiff.pillow_reads(encoded, channels):
        return tiff.read_tiff(encoded)
    try:
        image = Image.open(io.BytesIO(encoded), formats=FORMATS)
        refuse_wrapped(encoded, image)
        if not tiff.misreads(image):
            return image
        found = tiff.num_channels(encoded) or 1
    except UnidentifiedImageError:
        found = tiff.num_channels(encoded) if tiff.is_tiff(encoded) else 0
        if not found:
            raise
    if found not in (1, channels):
        raise _other_channels(found, channels)
    return tiff.read_tiff(encoded)  # such as floating-point colour


def _bands(
    opened: Image.Image | Scan | NDArray[Any], channels: int
) -> list[tuple[Image.Image | Scan, Literal["RGB", "L"]]]:
    """The parts of an image, with the modes to which they are converted: the image itself, or its channels."""
    if isinstance(opened, np.ndarray):
        if opened.ndim not in (2, 3) or 0 in opened.shape:
            raise CorruptImageError(
                f"it is an array of shape {opened.shape}, and not (H, W), (H, W, C) or (C, H, W)"
            )
        opened = of_pillows_types(opened)
        if opened.ndim == 3 and _channels_first(opened.shape, channels):
            opened = np.ascontiguousarray(opened.transpose(1, 2, 0))
        if opened.ndim == 3 and opened.shape[-1] == channels:
            return [(Image.fromarray(np.ascontiguousarray(opened[..., c])), "L") for c in range(channels)]
        if opened.ndim == 3 and opened.shape[-1] == 1:
            opened = opened[..., 0]
        if opened.ndim == 3 and (opened.shape[-1] not in (3, 4) or opened.dtype != np.uint8):
            first, *others = opened.shape
            raise _other_channels(first if first < min(others) else others[-1], channels)
        opened = Image.fromarray(opened)  # grey, or colour with 8 bits
    if channels == 3:
        return [(opened, "RGB")]
    if channels == 1:
        return [(opened, "L")]
    bands = opened.split() if isinstance(opened, Image.Image) else (opened,)
    if len(bands) != channels:
        raise _other_channels(len(bands), channels)
    return [(band, "L") for band in bands]


def _channels_first(shape: tuple[int, ...], channels: int) -> bool:
    """Whether an array is (C, H, W), with the wanted number of channels or else a usual one."""
    first, last, usual = shape[0], shape[-1], (1, 3, 4)
    return last != channels and (first == channels or (first in usual and last not in usual))


def _other_channels(found: int, wanted: int) -> CorruptImageError:
    has = f"it has {found} channel{'s' * (found != 1)}"
    return CorruptImageError(f"{has}, and the encoder reads data.channels = {wanted}")


@dataclass(frozen=True)
class Batch:
    """Decoded images.

    Attributes:
        pixels: (n, C, H, W) uint8, with zeros for corrupt images.
        corrupt: Reasons for the corrupt ones by position.
        values: Values of those with more than 8 bits; None if there are none.
    """

    pixels: NDArray[np.uint8]
    corrupt: dict[int, str]
    values: Values | None


def decode_batch(encoded: Sequence[Encoded], how: Decoding) -> Batch:
    """Decode images on all cores.

    Args:
        encoded: The images.
        how: Options of decoding.
    """
    pixels = np.zeros((len(encoded), *how.shape), dtype=np.uint8)
    reasons: dict[int, str] = {}
    found: list[Values] = []

    def work(positions: range) -> None:
        for i in positions:
            try:
                pixels[i], values = _decoded(encoded[i], how)
            except CorruptImageError as error:
                reasons[i] = str(error)
            else:
                found.extend([] if values is None else [values])

    workers = num_cores()
    tasks = [range(start, min(start + 32, len(encoded))) for start in range(0, len(encoded), 32)]
    if workers == 1 or len(tasks) == 1:
        work(range(len(encoded)))
    else:  # Pillow releases the global interpreter lock while it decodes
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(work, tasks))
    return Batch(pixels, dict(sorted(reasons.items())), reduce(Values.joined, found) if found else None)


def _eight_bit(
    image: Image.Image | Scan,
    mode: Literal["RGB", "L"],
    how: Decoding,
    found: list[Values],
    inverted: bool,
) -> Image.Image:
    """Convert to 8 bits a channel; the values of an image with more are added to `found`."""
    if isinstance(image, Scan):
        found.append(seen := replace(_range(image.values), scans=True))
        low, high = (how.window_low, how.window_high) if how.says_window else image.window or (None, None)
        if image.shown is not None and not how.says_window and how.window == "fixed":
            image = _windowed(image.shown, (0.0, 1.0), image.inverted)
        else:
            image = _windowed(image.values, _ends(how, low, high, seen), image.inverted)
    elif image.mode.startswith("I") or image.mode == "F":
        if how.window == "fixed" and image.mode == "F" and not how.says_window:
            raise CorruptImageError(
                "it holds floating-point values, and the recipe does not say which are black and white "
                "(data.window_low and data.window_high, or data.window = 'per-image')"
            )
        values = np.asarray(image).astype(np.float64)
        found.append(seen := _range(values))
        image = _windowed(values, _ends(how, how.window_low, how.window_high, seen), inverted)
    if image.mode == "P" and "transparency" in image.info:  # Pillow requires this mode in between
        image = image.convert("RGBA")
    return image if image.mode == mode else image.convert(mode)


def _range(values: NDArray[np.float64]) -> Values:
    return Values(float(values.min()), float(values.max()))


def _ends(how: Decoding, low: float | None, high: float | None, seen: Values) -> tuple[float, float]:
    """The values that become black and white; without a window, the image's own range."""
    if how.window == "per-image" or low is None or high is None:
        return seen.low, seen.high
    return low, high


def _windowed(values: NDArray[np.float64], ends: tuple[float, float], inverted: bool = False) -> Image.Image:
    """Convert the values of a grey image to 8 bits."""
    if not np.isfinite(values).all():
        raise CorruptImageError("it holds values that are not finite")
    low, high = ends
    scaled = ((values - low) * (255.0 / (high - low if high > low else 1.0))).clip(0, 255)
    return Image.fromarray(np.rint(255 - scaled if inverted else scaled).astype(np.uint8))


def _fit(image: Image.Image, size: int) -> Image.Image:
    """Resize the shorter side to `size`, then crop the centre square."""
    width, height = image.size
    short = min(width, height)
    if short != size:
        if max(width, height) > _THIN * short and size * size * max(width, height) > _MOST_RESIZED * short:
            raise CorruptImageError(
                f"it has {width} × {height} pixels and is too thin to resize to side {size}"
            )
        width, height = int(size * width / short), int(size * height / short)
        image = image.resize((width, height), Image.Resampling.BILINEAR)
    if (width, height) != (size, size):
        left, top = round((width - size) / 2.0), round((height - size) / 2.0)
        image = image.crop((left, top, left + size, top + size))
    return image
