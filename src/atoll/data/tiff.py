"""TIFF images of more than four channels, such as a satellite's or a microscope's, read by tifffile."""

from __future__ import annotations

import io
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from atoll.core.extras import require
from atoll.core.text import error_words

MOST_OF_PILLOW = 4  # channels
_MAGIC = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")


def is_tiff(encoded: bytes) -> bool:
    """Whether bytes are a TIFF or BigTIFF file, by its first four.

    Example:
        >>> from atoll.data.tiff import is_tiff
        >>> is_tiff(bytes([73, 73, 42, 0])), is_tiff(b"GIF89a")
        (True, False)
    """
    return encoded[:4] in _MAGIC


def read_tiff(encoded: bytes) -> NDArray[Any]:
    """Read the first image of a TIFF file.

    Shape:
        - output: (H, W), (H, W, C) or (C, H, W)

    Raises:
        UserError: tifffile is not installed.
        ValueError: The file is damaged, or compressed in a way that needs other libraries.
    """
    tifffile = require("tifffile", "tiff", "a TIFF file of more than four channels")
    try:
        with tifffile.TiffFile(io.BytesIO(encoded)) as file:
            page = file.pages.first
            most = 2 * MOST_OF_PILLOW * (Image.MAX_IMAGE_PIXELS or sys.maxsize)  # as many as Pillow's
            if page.size > most:
                raise ValueError("it has more pixels than are safe to decode")
            array: NDArray[Any] = np.asarray(page.asarray())
            return array
    except ValueError:
        raise
    except Exception as error:  # tifffile and its codecs raise any exception on damaged files
        raise ValueError(error_words(error)) from error
