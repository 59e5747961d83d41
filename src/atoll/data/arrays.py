"""Arrays of pixels: ``.npy`` files, and the number types that Pillow reads correctly."""

from __future__ import annotations

import io
import math
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

TOO_LARGE = "it has more pixels than are safe to decode"
_MAGIC = b"\x93NUMPY"


class ArrayError(Exception):
    """Error for an array that cannot be read; the message is a clause that begins with "it"."""


def most_pixels() -> int:
    """Largest number of pixels of an image that is decoded: Pillow refuses larger ones, and so do other readers."""
    return 2 * (Image.MAX_IMAGE_PIXELS or sys.maxsize)


def is_array(encoded: bytes) -> bool:
    """Whether bytes are an array's file, by its first six.

    Example:
        >>> from atoll.data.arrays import is_array
        >>> is_array(bytes([0x93]) + b"NUMPY"), is_array(b"GIF89a")
        (True, False)
    """
    return encoded.startswith(_MAGIC)


def read_array(encoded: bytes) -> NDArray[Any]:
    """Read an array's file. Its header must not claim more data than the file has: NumPy would allocate them.

    Raises:
        ArrayError: The file has another version, or is truncated.
        ValueError: The file is damaged, or contains objects.
    """
    file = io.BytesIO(encoded)
    headers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    version = np.lib.format.read_magic(file)
    if version not in headers:
        raise ArrayError(f"it is an array's file of version {version}, which is not read")
    shape, _, dtype = headers[version](file)
    if math.prod(shape) * dtype.itemsize > len(encoded):
        raise ArrayError(f"it says that it is an array of shape {shape}, and holds less")
    array: NDArray[Any] = np.load(io.BytesIO(encoded), allow_pickle=False)
    return array


def of_pillows_types(array: NDArray[Any]) -> NDArray[Any]:
    """The same values in a type that Pillow reads correctly: Pillow treats int8 as uint8, and wraps uint32.

    Raises:
        ArrayError: The values are neither whole numbers of up to 32 bits nor floats.

    Example:
        >>> import numpy as np
        >>> from atoll.data.arrays import of_pillows_types
        >>> of_pillows_types(np.array([[-1, 70000]], dtype=np.int64)).dtype
        dtype('int32')
    """
    if array.dtype.kind == "b" or array.dtype in (np.uint8, np.uint16):
        return array
    if array.dtype.kind == "f":
        with np.errstate(over="ignore"):  # infinity is refused later
            return array.astype(np.float32)
    if array.dtype.kind not in "iu" or array.min() < -(2**31) or array.max() >= 2**31:
        what = "numbers of more than 32 bits" if array.dtype.kind in "iu" else str(array.dtype)
        raise ArrayError(f"it is an array of {what}, which are not read; store uint8, uint16 or floats")
    return array.astype(np.int32)
