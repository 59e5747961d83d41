"""Decoding against torchvision's per-image transforms, and by hand for images of more than 8 bits."""

import io

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


def test_a_photograph_taken_upright_is_turned_upright():
    image = picture(8, 8)
    exif = Image.Exif()
    exif[0x0112] = 6  # stored lying on its side
    turned = decode(encoded(image, exif=exif), Decoding(8, 3))
    assert np.array_equal(turned, np.rot90(np.asarray(image), -1).transpose(2, 0, 1))


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


def test_a_batch_names_its_corrupt_positions_and_keeps_the_order():
    images = [encoded(Image.fromarray(np.full((4, 4), i, dtype=np.uint8))) for i in range(100)]
    images[70] = b"hello"
    images[3] = b""
    pixels, reasons = decode_batch(images, Decoding(4, 1))
    assert list(reasons) == [3, 70]
    assert reasons[3] == "it is empty"
    means = pixels.mean(axis=(1, 2, 3)).tolist()
    assert means == [0 if i in reasons else i for i in range(100)]
