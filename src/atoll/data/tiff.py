"""TIFF images that Pillow reads only in part, such as those of satellites or microscopes, read by tifffile."""

from __future__ import annotations

import io
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, TiffImagePlugin, UnidentifiedImageError

from atoll.core.extras import require
from atoll.core.text import error_words
from atoll.data.arrays import TOO_LARGE, ArrayError, most_pixels

_MOST_OF_PILLOW = 4  # channels
# Kinds of samples that are not red, green and blue.
_COLOURS = ("PALETTE", "YCBCR", "CIELAB", "ICCLAB", "ITULAB", "LOGLUV")
# TIFF's orientations, which Pillow applies itself: those that swap the axes, and the axes that are then mirrored.
_ON_SIDE = (5, 6, 7, 8)
_MIRRORED = {2: (1,), 3: (0, 1), 4: (0,), 6: (1,), 7: (0, 1), 8: (0,)}
_EXTRA = ("tiff", "a TIFF file of this kind")
_MAGIC = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")


def is_tiff(encoded: bytes) -> bool:
    """Whether bytes are a TIFF or BigTIFF file, by its first four.

    Example:
        >>> from atoll.data.tiff import is_tiff
        >>> is_tiff(bytes([73, 73, 42, 0])), is_tiff(b"GIF89a")
        (True, False)
    """
    return encoded[:4] in _MAGIC


def pillow_reads(tiff: bytes, channels: int) -> bool:
    """Whether Pillow reads all channels of a TIFF file, of 8 bits each. It drops a fourth one that is not alpha.

    Example:
        >>> import io
        >>> from PIL import Image
        >>> from atoll.data.tiff import pillow_reads
        >>> Image.new("RGBA", (2, 2)).save(file := io.BytesIO(), "TIFF")
        >>> pillow_reads(file.getvalue(), 4), pillow_reads(file.getvalue(), 2)
        (True, False)
    """
    if channels > _MOST_OF_PILLOW:
        return False
    try:
        image = Image.open(io.BytesIO(tiff), formats=["TIFF"])
    except UnidentifiedImageError:
        return False
    return len(image.getbands()) == channels and not loses_bits(image) and not misreads(image)


def num_channels(tiff: bytes) -> int:
    r"""Number of channels of a TIFF file's first image, from its header; 0 if the header is damaged.

    Example:
        >>> from atoll.data.tiff import num_channels
        >>> num_channels(b"II*\0damaged")
        0
    """
    found = _tag(tiff, TiffImagePlugin.SAMPLESPERPIXEL)
    return found if isinstance(found, int) else 0


def white_is_zero(tiff: bytes) -> bool:
    r"""Whether the value 0 of a grey TIFF file is white (TIFF 6.0, WhiteIsZero). Pillow inverts those of 8 bits.

    Example:
        >>> from atoll.data.tiff import white_is_zero
        >>> white_is_zero(b"II*\0damaged")
        False
    """
    return bool(_tag(tiff, TiffImagePlugin.PHOTOMETRIC_INTERPRETATION) == 0)


def _tag(tiff: bytes, number: int) -> Any:
    """A tag of the first image of a TIFF file; None if there is none, or the header is damaged."""
    file = io.BytesIO(tiff)
    try:
        tags = TiffImagePlugin.ImageFileDirectory_v2(file.read(16 if tiff[2] == 43 else 8))
        file.seek(tags.next)
        tags.load(file)
        return tags.get(number)
    except Exception:  # Pillow raises many undocumented kinds of errors on damaged files
        return None


def loses_bits(image: Image.Image) -> bool:
    """Whether a file contains colour of 16 bits. Pillow has no such mode, and reads only the upper 8 bits.

    Example:
        >>> from PIL import Image
        >>> from atoll.data.tiff import loses_bits
        >>> loses_bits(Image.new("RGB", (2, 2)))
        False
    """
    return image.mode[0] != "I" and any(";16" in str(tile[3]) for tile in getattr(image, "tile", ()))


def read_all_bits(encoded: object, channels: int) -> NDArray[Any]:
    """Read a file that `loses_bits` with all its bits, for a window.

    Shape:
        - output: (H, W, C)

    Raises:
        UserError: See `read_tiff`.
        ArrayError: It is not a TIFF file of this number of channels, so that only Pillow reads it.
        ValueError: See `read_tiff`.
    """
    if isinstance(encoded, bytes) and is_tiff(encoded) and num_channels(encoded) == channels:
        return read_tiff(encoded)
    raise ArrayError(
        "it is colour of 16 bits, of which the upper 8 are read, so that data.window does not apply; convert it to "
        "8 bits, to an array (.npy), or to a TIFF file of as many channels as data.channels"
    )


def misreads(image: Image.Image) -> bool:
    """Whether Pillow misinterprets the samples of a TIFF file without an error.

    It reads signed samples of 8 bits as unsigned, uncompressed planes of 16 bits as planes of 8, compressed signed
    or floating-point samples of the other byte order as those of this machine, the first of several compressed
    planes as a grey image, and numbers from 2³¹ on as negative.

    Example:
        >>> from PIL import Image
        >>> from atoll.data.tiff import misreads
        >>> misreads(Image.new("RGB", (2, 2)))
        False
    """
    if not isinstance(image, TiffImagePlugin.TiffImageFile):
        return False
    one_band = len(image.getbands()) == 1
    apart = image.tag_v2.get(TiffImagePlugin.PLANAR_CONFIGURATION) == 2
    if one_band and apart and image.tag_v2.get(TiffImagePlugin.SAMPLESPERPIXEL, 1) > 1:
        return True
    bits = max(image.tag_v2.get(TiffImagePlugin.BITSPERSAMPLE, (1,)))
    signed = 2 in image.tag_v2.get(TiffImagePlugin.SAMPLEFORMAT, (1,))
    if bits <= 8:
        return bits == 8 and signed
    if not one_band:
        return not loses_bits(image)
    if image.mode == "I" and not signed and np.asarray(image).min() < 0:
        return True
    other_order = (image.tag_v2.prefix == b"MM") == (sys.byteorder == "little")
    # libtiff returns samples in this machine's byte order, which Pillow's raw modes with an N expect.
    return other_order and any(tile[0] == "libtiff" and "N" not in str(tile[3]) for tile in image.tile)


def read_tiff(encoded: bytes) -> NDArray[Any]:
    """Read the first image of a TIFF file.

    Shape:
        - output: (H, W) or (H, W, C)

    Raises:
        UserError: tifffile is not installed, or imagecodecs, which it needs for decompression.
        ArrayError: It is too large, or its samples are colours of a kind that cannot be converted.
        ValueError: The file is damaged, or compressed in a way that imagecodecs does not know.
    """
    tifffile = require("tifffile", *_EXTRA)
    try:
        with tifffile.TiffFile(io.BytesIO(encoded)) as file:
            page = file.pages.first
            if page.size > _MOST_OF_PILLOW * most_pixels():
                raise ArrayError(TOO_LARGE)
            kind = getattr(page.photometric, "name", "")
            if kind in _COLOURS:
                raise ArrayError(
                    f"it is a TIFF file with colours as {kind}, which are not read; convert it to RGB"
                )
            array: NDArray[Any] = np.asarray(page.asarray())
            if page.axes == "SYX":  # S: samples, TIFF's channels
                array = np.moveaxis(array, 0, -1)
            turned = page.tags.valueof(ExifTags.Base.Orientation)
            return np.flip(array.swapaxes(0, 1) if turned in _ON_SIDE else array, _MIRRORED.get(turned, ()))
    except ArrayError:
        raise
    except Exception as error:  # tifffile and its codecs raise any exception on damaged files
        if "imagecodecs" in str(error):  # it is needed
            require("imagecodecs", *_EXTRA)
        raise ValueError(error_words(error)) from error
