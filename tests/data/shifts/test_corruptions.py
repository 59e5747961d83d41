"""Corruptions against Pillow, SciPy, colorsys and known moments."""

import colorsys
import io

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.ndimage import gaussian_filter

from atoll.core.rng import stream
from atoll.data.shifts.corruptions import CORRUPTIONS

IMAGES = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(0)).mul(255).round().div(255)


def corrupt(name, images=IMAGES, severity=3, first=0):
    return CORRUPTIONS[name](
        images, severity, [stream(0, "test", place) for place in range(first, first + len(images))]
    )


@pytest.mark.parametrize("name", CORRUPTIONS)
@pytest.mark.parametrize("channels", [1, 3])
def test_a_corruption_is_deterministic_by_image_and_in_range(name, channels):
    images = IMAGES[:, :channels]
    once, alone = corrupt(name, images), corrupt(name, images[2:3], first=2)
    assert torch.allclose(once[2:3], alone, atol=1e-6)  # whatever else is in the batch
    assert once.shape == images.shape
    assert (once.min() >= 0, once.max() <= 1) == (True, True)
    assert not torch.equal(once, images)


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_each_severity_changes_more_than_the_one_below(name):
    changes = [float((corrupt(name, severity=severity) - IMAGES).abs().mean()) for severity in range(1, 6)]
    assert changes == sorted(set(changes))


@pytest.mark.parametrize("name", ["pixelate", "jpeg-compression"])
@pytest.mark.parametrize("channels", [2, 5])
def test_other_numbers_of_channels_are_grey_images(name, channels):
    images = torch.cat([IMAGES, IMAGES.flip(3)], dim=1)[:, :channels]
    for channel, found in enumerate(corrupt(name, images).unbind(1)):
        assert torch.equal(found[:, None], corrupt(name, images[:, channel : channel + 1]))


def test_noise_has_the_deviation_of_its_severity():
    grey = torch.full((16, 3, 32, 32), 0.5)
    assert corrupt("gaussian-noise", grey).std().item() == pytest.approx(0.08, rel=0.02)
    assert corrupt("shot-noise", grey).std().item() == pytest.approx((0.5 / 100) ** 0.5, rel=0.02)
    assert corrupt("shot-noise", grey).mean().item() == pytest.approx(0.5, abs=0.002)
    spotted = corrupt("impulse-noise", grey)
    for value in (0, 1):
        assert (spotted == value).float().mean().item() == pytest.approx(0.015, abs=0.002)
    assert (spotted == 0.5).float().mean().item() == pytest.approx(0.97, abs=0.003)


@pytest.mark.parametrize(("severity", "sigma"), [(1, 0.4), (2, 0.6), (3, 0.7), (4, 0.8), (5, 1.0)])
def test_blur_is_scipys(severity, sigma):
    expected = gaussian_filter(IMAGES.double().numpy(), (0, 0, sigma, sigma), mode="mirror", truncate=4)
    assert torch.allclose(
        corrupt("gaussian-blur", severity=severity).double(), torch.from_numpy(expected), atol=2e-4
    )


def test_blur_of_a_small_image_reaches_as_far_as_it_can_be_mirrored():
    small = IMAGES[..., :3, :3]
    expected = gaussian_filter(small.double().numpy(), (0, 0, 1, 1), mode="mirror", radius=(0, 0, 2, 2))
    assert torch.allclose(
        corrupt("gaussian-blur", small, severity=5).double(), torch.from_numpy(expected), atol=1e-6
    )


def test_contrast_moves_values_to_the_mean_of_their_channel():
    expected = [
        [np.mean(channel) + 0.4 * (channel - np.mean(channel)) for channel in image]
        for image in IMAGES.numpy()
    ]
    assert np.allclose(corrupt("contrast").numpy(), expected, atol=1e-6)


def test_brightness_adds_to_v_of_hsv():
    found = corrupt("brightness", IMAGES[:1])[0].permute(1, 2, 0).reshape(-1, 3)
    for before, after in zip(IMAGES[0].permute(1, 2, 0).reshape(-1, 3).tolist(), found.tolist(), strict=True):
        hue, saturation, value = colorsys.rgb_to_hsv(*before)
        assert after == pytest.approx(colorsys.hsv_to_rgb(hue, saturation, min(1, value + 0.15)), abs=1e-5)
    assert torch.allclose(corrupt("brightness", torch.zeros(1, 3, 4, 4)), torch.tensor(0.15))


def pillow(image):
    return Image.fromarray((image.permute(1, 2, 0) * 255).round().byte().numpy())


def test_pixelate_is_pillows():
    box = Image.Resampling.BOX
    for image, found in zip(IMAGES, corrupt("pixelate"), strict=True):
        expected = np.asarray(pillow(image).resize((27, 27), box).resize((32, 32), box))
        assert np.array_equal(found.mul(255).round().byte().permute(1, 2, 0).numpy(), expected)


def test_jpeg_is_pillows():
    for image, found in zip(IMAGES, corrupt("jpeg-compression"), strict=True):
        file = io.BytesIO()
        pillow(image).save(file, "JPEG", quality=58)
        changed = found.mul(255).round().byte().permute(1, 2, 0)
        assert np.array_equal(changed.numpy(), np.asarray(Image.open(file)))
