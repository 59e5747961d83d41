"""Decoding against torchvision's per-image transforms, and by hand for images of more than 8 bits."""

import io
import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms

from atoll.data.decode import CorruptImageError, Decoding, decode, decode_batch


def encoded(image, form="PNG", **options):
    out = io.BytesIO()
    image.save(out, form, **options)
    return out.getvalue()


def picture(width, height, mode="RGB"):
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 4), dtype=np.uint8)
    return Image.fromarray(pixels, "RGBA").convert(mode)


def test_an_array_without_pixels_is_corrupt():
    file = io.BytesIO()
    np.save(file, np.zeros((0, 8), np.uint8))
    with pytest.raises(CorruptImageError, match=r"it is an array of shape \(0, 8\)"):
        decode(file.getvalue(), Decoding(8, 1))


@pytest.mark.filterwarnings("ignore:Palette images")  # Pillow's, in the expected half
@pytest.mark.parametrize("size", [(32, 32), (40, 33), (33, 57), (20, 90), (16, 16), (7, 30)])
@pytest.mark.parametrize("mode", ["RGB", "L", "P", "RGBA", "LA", "1", "CMYK"])
def test_sizes_and_modes_follow_torchvision(size, mode):
    image = picture(*size, mode)
    data = encoded(image, "TIFF" if mode == "CMYK" else "PNG")
    expected = transforms.Compose(
        [
            transforms.Lambda(lambda opened: opened.convert("RGB")),
            transforms.Resize(32),
            transforms.CenterCrop(32),
            transforms.PILToTensor(),
        ]
    )(Image.open(io.BytesIO(data)))
    assert torch.equal(torch.from_numpy(decode(data, Decoding(32, 3))), expected)


def test_an_image_of_the_right_size_keeps_every_bit():
    image = picture(32, 32)
    assert np.array_equal(decode(encoded(image), Decoding(32, 3)), np.asarray(image).transpose(2, 0, 1))


def test_grey_output_has_one_channel():
    image = picture(8, 8, "L")
    assert np.array_equal(decode(encoded(image), Decoding(8, 1)), np.asarray(image)[None])


UPRIGHT = {  # by EXIF's orientation: how the stored pixels are turned
    1: lambda pixels: pixels,
    2: np.fliplr,
    3: lambda pixels: np.rot90(pixels, 2),
    4: np.flipud,
    5: lambda pixels: np.fliplr(np.rot90(pixels, -1)),
    6: lambda pixels: np.rot90(pixels, -1),
    7: lambda pixels: np.flipud(np.rot90(pixels, -1)),
    8: lambda pixels: np.rot90(pixels, 1),
}


@pytest.mark.parametrize("orientation", UPRIGHT)
@pytest.mark.parametrize("form", ["PNG", "JPEG", "TIFF", "WEBP"])
def test_a_photograph_is_turned_upright(form, orientation):
    image = picture(8, 8)
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(image, form, exif=exif, **({"lossless": True} if form == "WEBP" else {}))
    # A JPEG has other values than the picture; a TIFF is turned by Pillow itself when it loads.
    stored = np.asarray(Image.open(io.BytesIO(data))) if form == "JPEG" else np.asarray(image)
    expected = UPRIGHT[orientation](stored).transpose(2, 0, 1)
    assert np.array_equal(decode(data, Decoding(8, 3)), expected)


SIXTEEN = np.array([[0, 1000], [4095, 65535]], dtype=np.uint16)


@pytest.mark.parametrize("form", ["PNG", "TIFF"])
@pytest.mark.parametrize(
    ("how", "expected"),
    [
        (Decoding(2, 1), [[0, 4], [16, 255]]),  # v / 257
        (Decoding(2, 1, window_high=4095), [[0, 62], [255, 255]]),
        (Decoding(2, 1, window_low=1000, window_high=4095), [[0, 0], [255, 255]]),
        (Decoding(2, 1, window="per-image"), [[0, 4], [16, 255]]),
    ],
)
def test_sixteen_bits_go_through_the_window(form, how, expected):
    assert decode(encoded(Image.fromarray(SIXTEEN), form), how).tolist() == [expected]


def test_per_image_window_spans_the_image_own_range():
    dark = Image.fromarray(np.array([[100, 150], [210, 300]], dtype=np.uint16))
    assert decode(encoded(dark), Decoding(2, 1, window="per-image")).tolist() == [[[0, 64], [140, 255]]]
    flat = Image.fromarray(np.full((2, 2), 700, dtype=np.uint16))
    assert decode(encoded(flat), Decoding(2, 1, window="per-image")).tolist() == [[[0, 0], [0, 0]]]


def test_signed_and_colour_output_of_a_scanner():
    hounsfield = Image.fromarray(np.array([[-1000, 0], [400, 3000]], dtype=np.int32))
    pixels = decode(encoded(hounsfield, "TIFF"), Decoding(2, 3, window_low=-1000, window_high=400))
    assert pixels.tolist() == [[[0, 182], [255, 255]]] * 3


def test_floats_need_a_window():
    image = encoded(Image.fromarray(np.array([[0.0, 0.5], [0.75, 1.0]], dtype=np.float32)), "TIFF")
    with pytest.raises(CorruptImageError, match="floating-point"):
        decode(image, Decoding(2, 1))
    assert decode(image, Decoding(2, 1, window_high=1.0)).tolist() == [[[0, 128], [191, 255]]]
    broken = encoded(Image.fromarray(np.array([[np.nan, 0.5]], dtype=np.float32)), "TIFF")
    with pytest.raises(CorruptImageError, match="not finite"):
        decode(broken, Decoding(1, 1, window="per-image"))


WHOLE = encoded(picture(32, 32), "JPEG")


@pytest.mark.parametrize(
    "data",
    [b"", b"hello", WHOLE[:200], WHOLE[: len(WHOLE) // 2], encoded(picture(32, 32))[:500]],
    ids=["empty", "text", "header", "half a JPEG", "part of a PNG"],
)
def test_damaged_bytes_are_corrupt_and_a_clause_says_so(data):
    with pytest.raises(CorruptImageError, match=r"^it is (empty|damaged)") as error:
        decode(data, Decoding(32, 3))
    assert " at 0x" not in str(error.value), "an address in memory tells nobody anything"


def test_an_image_that_is_too_large_is_not_called_damaged(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(CorruptImageError, match="more pixels than are safe"):
        decode(encoded(picture(32, 32)), Decoding(32, 3))


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def test_a_decompression_bomb_is_not_decoded():
    """A PNG of 67 bytes that says that it has 3.6 billion pixels."""
    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    bomb = (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b""))
        + chunk(b"IEND", b"")
    )
    with pytest.raises(CorruptImageError, match="more pixels than are safe"):
        decode(bomb, Decoding(32, 3))


def test_of_an_animation_the_first_frame_counts():
    frames = [Image.fromarray(np.full((8, 8, 3), value, dtype=np.uint8)) for value in (0, 255, 99)]
    for form in ("GIF", "PNG", "WEBP"):
        more = {"lossless": True} if form == "WEBP" else {}
        data = encoded(frames[0], form, save_all=True, append_images=frames[1:], duration=10, **more)
        assert Image.open(io.BytesIO(data)).n_frames == 3
        assert decode(data, Decoding(8, 3)).max() == 0


def test_a_cmyk_photograph_becomes_rgb():
    """Ink of one colour, by the formula (1 − c)(1 − k); JPEG changes values by a few levels."""
    ink = Image.new("CMYK", (16, 16), (255, 0, 128, 51))
    (red, green, blue) = decode(encoded(ink, "JPEG", quality=100), Decoding(16, 3)).mean(axis=(1, 2))
    assert [red, green, blue] == pytest.approx([0, 204, 102], abs=6)


def test_a_palette_is_resolved_also_with_transparency():
    image = Image.new("P", (8, 8), 1)
    image.putpalette([0, 0, 0, 10, 200, 30])
    for more in ({}, {"transparency": 1}):
        assert decode(encoded(image, "PNG", **more), Decoding(8, 3))[:, 0, 0].tolist() == [10, 200, 30]


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n(x) show\nshowpage\n%%EOF\n"


def test_a_picture_is_not_a_program(monkeypatch):
    """Pillow would start Ghostscript for an EPS, whatever its name."""
    monkeypatch.setattr("subprocess.check_call", lambda *_, **__: pytest.fail("a program was started"))
    monkeypatch.setattr(
        "PIL.EpsImagePlugin.Ghostscript", lambda *_, **__: pytest.fail("Ghostscript was started")
    )
    assert Image.open(io.BytesIO(EPS)).format == "EPS"  # Pillow recognises it
    with pytest.raises(CorruptImageError, match=r"in no format that is read \(PNG, JPEG, "):
        decode(EPS, Decoding(8, 3))


@pytest.mark.parametrize("form", ["PCX", "TGA", "ICO", "SGI", "DDS", "SPIDER"])
def test_only_formats_of_the_list_are_opened(form):
    image = picture(16, 16, "F" if form == "SPIDER" else "RGB")
    with pytest.raises(CorruptImageError, match="in no format"):
        decode(encoded(image, form), Decoding(8, 3, window_high=255))


@pytest.mark.parametrize("channels", [2, 4, 6])
def test_each_channel_of_an_array_is_resized_as_a_grey_image(channels):
    array = np.random.default_rng(0).integers(0, 256, (33, 40, channels), dtype=np.uint8)
    expected = [decode(Image.fromarray(array[..., c]), Decoding(16, 1))[0] for c in range(channels)]
    file = io.BytesIO()
    np.save(file, array)
    for form in (array, array.transpose(2, 0, 1), file.getvalue()):
        assert np.array_equal(decode(form, Decoding(16, channels)), expected)


def test_channels_of_sixteen_bits_go_through_the_window():
    array = np.stack([SIXTEEN, SIXTEEN // 2, SIXTEEN // 4], 2)
    pixels = decode(array, Decoding(2, 3, window_high=4095))
    assert pixels[0].tolist() == [[0, 62], [255, 255]]
    assert pixels[1].tolist() == [[0, 31], [127, 255]]
    batch = decode_batch([array, array // 2], Decoding(2, 3))
    assert (batch.values.low, batch.values.high, batch.values.scans) == (0, 65535, False)


def test_an_image_as_thin_as_a_thread_is_not_resized():
    """A row of 60,000 pixels would be resized to 224 × 13,440,000 before its centre is cropped."""
    with pytest.raises(CorruptImageError, match="60000 × 1 pixels and is too thin to resize to side 224"):
        decode(encoded(Image.new("L", (60_000, 1))), Decoding(224, 1))
    assert decode(encoded(Image.new("L", (1, 200), 9)), Decoding(8, 1)).tolist() == [[[9] * 8] * 8]


def test_transparency_is_a_channel_where_four_are_wanted():
    image = picture(8, 8, "RGBA")
    assert np.array_equal(decode(encoded(image), Decoding(8, 4)), np.asarray(image).transpose(2, 0, 1))


@pytest.mark.parametrize(
    ("image", "channels", "words"),
    [
        (picture(8, 8), 6, r"^it has 3 channels, and the encoder reads data.channels = 6"),
        (np.zeros((8, 8, 5), np.uint8), 3, r"^it has 5 channels, and the encoder reads data.channels = 3"),
        (np.zeros((5, 9, 8), np.uint8), 3, r"^it has 5 channels, and the encoder reads data.channels = 3"),
        (np.zeros((2, 8, 8, 3), np.uint8), 3, r"^it is an array of shape \(2, 8, 8, 3\)"),
    ],
)
def test_another_number_of_channels_is_a_clause(image, channels, words):
    with pytest.raises(CorruptImageError, match=words):
        decode(image, Decoding(8, channels))


def test_a_batch_names_its_corrupt_positions_and_keeps_the_order():
    images = [encoded(Image.fromarray(np.full((4, 4), i, dtype=np.uint8))) for i in range(100)]
    images[70] = b"hello"
    images[3] = b""
    batch = decode_batch(images, Decoding(4, 1))
    pixels, reasons = batch.pixels, batch.corrupt
    assert list(reasons) == [3, 70]
    assert reasons[3] == "it is empty"
    means = pixels.mean(axis=(1, 2, 3)).tolist()
    assert means == [0 if i in reasons else i for i in range(100)]
