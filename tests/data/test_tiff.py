"""TIFF files of many channels: the pixels of the array that was written."""

from __future__ import annotations

import io
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from atoll.core.errors import UserError
from atoll.data.decode import CorruptImageError, Decoding, decode, decode_stored

tifffile = pytest.importorskip("tifffile", reason="the extra atoll[tiff] is not installed")
imagecodecs = pytest.importorskip("imagecodecs", reason="the extra atoll[tiff] is not installed")


def written(array: np.ndarray, **how: Any) -> bytes:
    file = io.BytesIO()
    tifffile.imwrite(file, array, photometric="minisblack", **how)
    return file.getvalue()


def scene(channels: int, kind: type = np.uint8) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (channels, 6, 6)).astype(kind)


@pytest.mark.parametrize("channels", [5, 8, 13])
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"bigtiff": True},
        {"byteorder": ">"},
        {"compression": "zlib"},
        {"compression": "lzw", "predictor": True},
        {"compression": "zstd"},
    ],
)
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


@pytest.mark.parametrize("channels", [2, 4])
@pytest.mark.parametrize("kind", [np.uint8, np.uint16])
def test_few_channels_that_are_no_transparency_are_read(channels: int, kind: type) -> None:
    """Red, green, blue and infrared, as satellites' files hold them, are neither RGB nor RGBA."""
    planes = scene(channels, kind)
    how = Decoding(6, channels, window_high=255)
    together = written(planes.transpose(1, 2, 0), planarconfig="contig")
    assert (decode(together, how) == scene(channels)).all()
    assert (decode(written(planes, planarconfig="separate"), how) == scene(channels)).all()
    if channels == 4:
        file = io.BytesIO()
        about = {"photometric": "rgb", "extrasamples": ["unspecified"]}
        tifffile.imwrite(file, planes.transpose(1, 2, 0), **about)
        assert (decode(file.getvalue(), how) == scene(channels)).all()


def test_of_8_bits_with_transparency_pillow_reads_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tifffile", None)
    file, planes = io.BytesIO(), scene(4)
    Image.fromarray(planes.transpose(1, 2, 0)).save(file, "TIFF", compression="tiff_lzw")
    assert (decode(file.getvalue(), Decoding(6, 4)) == planes).all()


@pytest.mark.parametrize("how", [{}, {"compression": "lzw"}, {"byteorder": ">"}])
def test_a_window_for_colour_of_16_bits_reads_all_of_them(how: dict[str, Any]) -> None:
    planes = scene(3, np.uint16) * 16
    file = colour(planes, planarconfig="contig", **how)
    assert (decode(file, Decoding(6, 3)) == planes // 256).all()
    for windowed in (Decoding(6, 3, window_high=4080), Decoding(6, 3, window="per-image")):
        assert (decode(file, windowed) == decode(planes, windowed)).all()
    assert (decode(planes, Decoding(6, 3, window_high=4080)) == scene(3)).all()


def test_a_window_for_colour_of_16_bits_is_refused_not_ignored_where_pillow_alone_reads_it() -> None:
    planes = scene(3, np.uint16) * 16
    file, four = colour(planes), colour(scene(4, np.uint16), extrasamples=["unassalpha"])
    png = imagecodecs.png_encode(np.ascontiguousarray(planes.transpose(1, 2, 0)))
    assert (decode(png, Decoding(6, 3)) == planes // 256).all()
    for encoded, channels in ((png, 3), (four, 3), (file, 1), (Image.open(io.BytesIO(file)), 3)):
        for how in (Decoding(6, channels, window_high=4095), Decoding(6, channels, window="per-image")):
            with pytest.raises(CorruptImageError, match=r"colour of 16 bits.*data\.window does not apply"):
                decode(encoded, how)


def colour(array: np.ndarray, **how: Any) -> bytes:
    file, planes = io.BytesIO(), how.get("planarconfig") == "separate"
    tifffile.imwrite(file, array if planes else array.transpose(1, 2, 0), photometric="rgb", **how)
    return file.getvalue()


@pytest.mark.parametrize("layout", ["contig", "separate"])
@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64, np.int8, np.int16, np.int32, np.uint32])
def test_colour_of_types_that_pillow_does_not_know_is_windowed_as_an_arrays(kind: type, layout: str) -> None:
    low = 0 if kind == np.uint32 else -100
    planes = np.random.default_rng(0).integers(low, 100, (3, 6, 6)).astype(kind)
    how = Decoding(6, 3, window_low=low, window_high=low + 255)
    assert (decode(colour(planes, planarconfig=layout), how) == planes.astype(np.float64) - low).all()


def test_grey_of_types_that_pillow_does_not_know_is_read_for_encoders_of_colour() -> None:
    for kind in (np.int8, np.uint64):
        grey = np.random.default_rng(0).integers(0, 100, (1, 6, 6)).astype(kind)
        for channels in (1, 3):
            data = written(grey[0])
            assert (decode(data, Decoding(6, channels, window_high=255)) == grey).all()


@pytest.mark.parametrize("byteorder", ["<", ">"])
@pytest.mark.parametrize("compression", [None, "zlib"])
def test_planes_of_16_bits_are_not_read_as_planes_of_8(byteorder: str, compression: str | None) -> None:
    """Pillow reads them so, and shows neither an error nor the image."""
    planes = scene(3, np.uint16) * 257
    data = colour(planes, planarconfig="separate", byteorder=byteorder, compression=compression)
    assert (decode(data, Decoding(6, 3)) == scene(3)).all()


@pytest.mark.parametrize("byteorder", ["<", ">"])
@pytest.mark.parametrize("compression", [None, "zlib"])
@pytest.mark.parametrize("kind", [np.uint16, np.int16, np.int32, np.float32])
def test_compressed_grey_values_of_any_byte_order_are_read(
    kind: type, compression: str | None, byteorder: str
) -> None:
    """Of signed and floating-point ones, Pillow swaps the bytes of each value."""
    low = 0 if kind == np.uint16 else -100
    grey = np.random.default_rng(0).integers(low, 100, (6, 6)).astype(kind)
    data = written(grey, byteorder=byteorder, compression=compression)
    how = Decoding(6, 1, window_low=low, window_high=low + 255)
    assert (decode(data, how)[0] == grey.astype(np.float64) - low).all()


@pytest.mark.parametrize("compression", [None, "zlib"])
def test_numbers_that_pillow_makes_negative_are_refused(
    compression: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others of the type are read without tifffile."""
    for window in ({"window": "per-image"}, {"window_high": 2.0**32}):
        with pytest.raises(CorruptImageError, match="numbers of more than 32 bits"):
            decode(written(scene(1, np.uint32)[0] << 24, compression=compression), Decoding(6, 1, **window))
    grey = scene(1, np.uint32)
    data = written(grey[0], compression=compression)
    monkeypatch.setitem(sys.modules, "tifffile", None)
    assert (decode(data, Decoding(6, 1, window_high=255)) == grey).all()


@pytest.mark.parametrize("turned", range(1, 9))
def test_an_orientation_is_applied_as_pillow_does(turned: int) -> None:
    planes, how = scene(3)[:, :, :4], {"extratags": [(274, 3, 1, turned, True)]}
    pillows, ours = colour(planes, **how), colour(planes.astype(np.int16), **how)
    window = Decoding(4, 3, window_high=255)
    assert (decode(ours, window) == decode(pillows, Decoding(4, 3))).all()
    apart = colour(planes.astype(np.uint16) * 257, planarconfig="separate", **how)  # Pillow misreads it
    assert (decode(apart, Decoding(4, 3)) == decode(pillows, Decoding(4, 3))).all()
    assert (decode_stored(apart, 3) == decode_stored(pillows, 3)).all()


def test_what_pillow_misreads_is_refused_where_pillow_opened_it() -> None:
    for data in (colour(scene(3, np.uint16), planarconfig="separate"), written(scene(1, np.int8)[0])):
        with pytest.raises(
            CorruptImageError, match=r"^it is a TIFF file of a kind that Pillow misreads; give the file"
        ):
            decode(Image.open(io.BytesIO(data)), Decoding(6, 3))
    plain = colour(scene(3))
    assert (decode(Image.open(io.BytesIO(plain)), Decoding(6, 3)) == decode(plain, Decoding(6, 3))).all()


def test_colours_that_nothing_converts_are_refused() -> None:
    """Their numbers are no red, green and blue, and those of a palette are no grey values."""
    palette = {"photometric": "palette", "colormap": np.zeros((3, 2**16), np.uint16)}
    for array, how in (
        (scene(3).transpose(1, 2, 0), {"photometric": "icclab"}),
        (scene(3, np.uint16).transpose(1, 2, 0), {"photometric": "cielab"}),
        (scene(1, np.uint16)[0], palette),
    ):
        tifffile.imwrite(file := io.BytesIO(), array, **how)
        kind = str(how["photometric"]).upper()
        with pytest.raises(
            CorruptImageError, match=f"^it is a TIFF file with colours as {kind}, which are not read"
        ):
            decode(file.getvalue(), Decoding(6, 3))


@pytest.mark.parametrize("how", [{}, {"byteorder": ">"}, {"compression": "zlib"}])
@pytest.mark.parametrize("kind", [np.uint8, np.int8, np.uint16, np.int16, np.float32])
def test_white_may_be_zero_with_any_type(kind: type, how: dict[str, Any]) -> None:
    """Pillow inverts 8 bits alone; the window is of the values in the file, as for DICOM's MONOCHROME1."""
    grey, file = scene(1)[0] >> 1, io.BytesIO()
    tifffile.imwrite(file, grey.astype(kind), photometric="miniswhite", **how)
    for channels in (1, 3):
        assert (decode(file.getvalue(), Decoding(6, channels, window_high=255)) == 255 - grey).all()


@pytest.mark.parametrize("compression", [None, "zlib"])
@pytest.mark.parametrize("kind", [np.uint8, np.uint16])
def test_three_planes_are_three_channels_and_not_the_first_one(kind: type, compression: str | None) -> None:
    """Pillow passes over further planes without a meaning, as a microscope's files have them."""
    planes = scene(3, kind)
    data = written(planes, planarconfig="separate", compression=compression)
    how = Decoding(6, 3, window_high=255)
    assert (decode(data, how) == scene(3)).all()
    with pytest.raises(
        CorruptImageError, match=r"^it has 3 channels, and the encoder reads data.channels = 1$"
    ):
        decode(data, replace(how, channels=1))


@pytest.mark.parametrize("channels", [1, 3, 4, 5])
@pytest.mark.parametrize("how", [{}, {"bigtiff": True}, {"byteorder": ">"}])
def test_a_file_of_other_channels_says_so(
    channels: int, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file has more channels than Pillow reads, so that it called those of an encoder of 1 or 3 damaged."""
    planes = np.random.default_rng(0).integers(0, 256, (6, 8, 8)).astype(np.uint8)
    apart = written(planes, planarconfig="separate", **how)
    together = written(planes.transpose(1, 2, 0), planarconfig="contig", **how)
    if channels in (1, 3):
        monkeypatch.setitem(sys.modules, "tifffile", None)  # it is not needed for this
    for data in (apart, together):
        with pytest.raises(
            CorruptImageError, match=rf"^it has 6 channels, and the encoder reads data.channels = {channels}$"
        ):
            decode(data, Decoding(8, channels))


def test_as_many_channels_as_pixels_in_a_line_are_told_apart() -> None:
    planes = scene(6)
    assert (decode(written(planes, planarconfig="separate"), Decoding(6, 6)) == planes).all()


@pytest.mark.parametrize("end", [6, 60, -1, -40])
@pytest.mark.parametrize("how", [{}, {"compression": "zlib"}, {"compression": "zstd"}, {"tile": (16, 16)}])
def test_a_damaged_file_is_corrupt(end: int, how: dict[str, Any]) -> None:
    with pytest.raises(CorruptImageError, match=r"^it is damaged \("):
        decode(written(scene(5), planarconfig="separate", **how)[:end], Decoding(6, 5))


def test_more_pixels_than_pillow_opens_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 17)
    with pytest.raises(CorruptImageError, match=r"^it has more pixels than are safe"):
        decode(written(scene(5), planarconfig="separate"), Decoding(6, 5))


def test_without_tifffile_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    data = written(scene(5), planarconfig="separate")
    monkeypatch.setitem(sys.modules, "tifffile", None)
    with pytest.raises(
        UserError, match=r"needs tifffile; install Atoll's extra 'tiff': pip install '\.\[tiff\]'"
    ):
        decode(data, Decoding(6, 5))


def test_without_imagecodecs_one_sentence_says_what_to_install(tmp_path: Path) -> None:
    """It decompresses for tifffile, which looks for it once."""
    file = tmp_path / "scene.tif"
    file.write_bytes(written(scene(5), planarconfig="separate", compression="lzw"))
    script = f"""
import sys
sys.modules["imagecodecs"] = None
from pathlib import Path
from atoll.core.errors import UserError
from atoll.data.decode import Decoding, decode
try:
    decode(Path({str(file)!r}).read_bytes(), Decoding(6, 5))
except UserError as error:
    print(error)
"""
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert "needs imagecodecs; install Atoll's extra 'tiff': pip install '.[tiff]'" in said
