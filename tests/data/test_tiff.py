"""TIFF files of many channels: the pixels of the array that was written."""

from __future__ import annotations

import io
import sys
from typing import Any

import numpy as np
import pytest
from PIL import Image

from atoll.core.errors import UserError
from atoll.data.decode import CorruptImageError, Decoding, decode

tifffile = pytest.importorskip("tifffile", reason="the extra atoll[tiff] is not installed")


def written(array: np.ndarray, **how: Any) -> bytes:
    file = io.BytesIO()
    tifffile.imwrite(file, array, photometric="minisblack", **how)
    return file.getvalue()


def scene(channels: int, kind: type = np.uint8) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (channels, 6, 6)).astype(kind)


@pytest.mark.parametrize("channels", [5, 8, 13])
@pytest.mark.parametrize("how", [{}, {"bigtiff": True}, {"byteorder": ">"}, {"compression": "zlib"}])
def test_each_channel_is_read(channels: int, how: dict[str, Any]) -> None:
    planes = scene(channels)
    apart = written(planes, planarconfig="separate", **how)
    together = written(planes.transpose(1, 2, 0), planarconfig="contig", **how)
    for data in (apart, together):
        assert (decode(data, Decoding(6, channels)) == planes).all()


def test_16_bits_are_windowed_as_an_arrays() -> None:
    planes = scene(5, np.uint16) * 16
    how = Decoding(6, 5, window_low=0, window_high=4080)
    assert (decode(written(planes, planarconfig="separate"), how) == decode(planes, how)).all()
    assert (decode(planes, how) == scene(5)).all()


def test_a_file_of_other_channels_says_so() -> None:
    with pytest.raises(CorruptImageError, match=r"has 6 channels, and data\.channels is 5"):
        decode(written(scene(6).transpose(1, 2, 0), planarconfig="contig"), Decoding(6, 5))


@pytest.mark.parametrize("end", [6, 60, -1, -40])
@pytest.mark.parametrize("how", [{}, {"compression": "zlib"}, {"tile": (16, 16)}])
def test_a_damaged_file_is_corrupt(end: int, how: dict[str, Any]) -> None:
    with pytest.raises(CorruptImageError, match=r"^it is damaged \("):
        decode(written(scene(5), planarconfig="separate", **how)[:end], Decoding(6, 5))


def test_more_pixels_than_pillow_opens_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 17)
    with pytest.raises(CorruptImageError, match="more pixels than are safe"):
        decode(written(scene(5), planarconfig="separate"), Decoding(6, 5))


def test_without_tifffile_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    data = written(scene(5), planarconfig="separate")
    monkeypatch.setitem(sys.modules, "tifffile", None)
    with pytest.raises(
        UserError, match=r"needs tifffile; install Atoll's extra 'tiff': pip install '\.\[tiff\]'"
    ):
        decode(data, Decoding(6, 5))
