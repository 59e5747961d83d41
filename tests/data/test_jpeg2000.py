"""JPEG 2000 files of 4 × 4 pixels that OpenJPEG wrote without loss: a black line on white."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
from PIL import Image

from atoll.data.decode import CorruptImageError, Decoding, decode

_COLOUR_OF_8 = (
    "/0//UQAvAAAAAAAEAAAABAAAAAAAAAAAAAAABAAAAAQAAAAAAAAAAAADBwEBBwEBBwEB/1IADAAAAAEBAAQEAAH/XAAEQED/ZAAlAAFDcmVhdGVk"
    "IGJ5IE9wZW5KUEVHIHZlcnNpb24gMi41LjT/kAAKAAAAAAAiAAH/k9+AeBKAuIfXJimMB3Ybbbbbf4CA/9k="
)
_COLOUR_OF_12 = (
    "/0//UQAvAAAAAAAEAAAABAAAAAAAAAAAAAAABAAAAAQAAAAAAAAAAAADCwEBCwEBCwEB/1IADAAAAAEBAAQEAAH/XAAEQGD/ZAAlAAFDcmVhdGVk"
    "IGJ5IE9wZW5KUEVHIHZlcnNpb24gMi41LjT/kAAKAAAAAAAoAAH/k9/gVBKAuIfXJimMB3Ybbbbbbbbbbbbbf4CA/9k="
)
_GREY_AND_ALPHA_OF_12 = (
    "/0//UQAsAAAAAAAEAAAABAAAAAAAAAAAAAAABAAAAAQAAAAAAAAAAAACCwEBCwEB/1IADAAAAAEAAAQEAAH/XAAEQGD/ZAAlAAFDcmVhdGVkIGJ5"
    "IE9wZW5KUEVHIHZlcnNpb24gMi41LjT/kAAKAAAAAAA+AAH/k9/gVBKAuIfXJimMB3Ybbbbbbbbbbbbbf9/gVBKAuIfXJimMB3Ybbbbbbbbbbbbb"
    "f//Z"
)
_SCENE = np.full((4, 4), 255, np.uint8)
_SCENE[0] = 0


def test_colour_of_8_bits_is_read() -> None:
    assert (decode(base64.b64decode(_COLOUR_OF_8), Decoding(4, 3)) == _SCENE).all()


@pytest.mark.parametrize("file", [_COLOUR_OF_12, _GREY_AND_ALPHA_OF_12])
@pytest.mark.parametrize("channels", [1, 3])
def test_colour_of_more_bits_is_refused(file: str, channels: int) -> None:
    """Pillow reads white as black, without a word."""
    with pytest.raises(
        CorruptImageError, match="colour of 12 bits, of which Pillow makes white black; convert it"
    ):
        decode(base64.b64decode(file), Decoding(4, channels))


def test_grey_of_16_bits_is_read() -> None:
    grey, file = np.where(_SCENE, 65535, 0).astype(np.uint16), io.BytesIO()
    Image.fromarray(grey).save(file, "JPEG2000", irreversible=False)
    assert (decode(file.getvalue(), Decoding(4, 1))[0] == _SCENE).all()
