"""JPEG 2000 images that Pillow does not read correctly."""

from __future__ import annotations

from PIL import Image

from atoll.data.arrays import ArrayError

_START = b"\xff\x4f\xff\x51"  # of the codestream: the markers SOC and SIZ (ISO/IEC 15444-1, A.5.1)
# Bytes from there to the number of components and to the first one's depth, and from one depth to the next.
_COUNT, _DEPTHS, _STEP = 40, 42, 3


def refuse_wrapped(encoded: bytes, image: Image.Image) -> None:
    """Refuse colour of more than 8 bits, which Pillow rounds to 8 bits: white becomes 256, which wraps to 0, black.

    Args:
        encoded: The file.
        image: The image that Pillow opened.

    Raises:
        ArrayError: The file is such an image.

    Example:
        >>> from PIL import Image
        >>> from atoll.data.jpeg2000 import refuse_wrapped
        >>> refuse_wrapped(b"GIF89a", Image.new("RGB", (2, 2)))
    """
    if image.format != "JPEG2000" or len(image.getbands()) == 1:
        return
    if (start := encoded.find(_START)) < 0:
        return
    count = int.from_bytes(encoded[start + _COUNT : start + _DEPTHS], "big")
    depths = encoded[start + _DEPTHS : start + _DEPTHS + _STEP * count : _STEP]
    bits = max((1 + (depth & 0x7F) for depth in depths), default=0)  # the highest bit is the sign
    if bits > 8:
        raise ArrayError(
            f"it is a JPEG 2000 file in colour of {bits} bits, of which Pillow makes white black; convert it to 8 "
            "bits or to an array (.npy)"
        )
