"""Styles against slow loops in float64."""

import numpy as np
import pytest
import torch

from atoll.data.shifts.styles import DARK, LIGHT, STYLES, duotone, mosaic, painting, poster, sketch
from atoll.data.views.ops import LUMA

IMAGES = torch.rand(3, 3, 17, 17, generator=torch.Generator().manual_seed(0))


def grey(image):
    return np.tensordot(np.array(LUMA), image, 1) if len(image) == 3 else image[0]


def each(function, images=IMAGES):
    return torch.from_numpy(np.stack([function(image.double().numpy()) for image in images])).float()


@pytest.mark.parametrize("size", [8, 32, 48])
def test_painting_is_kuwaharas_filter(size):
    images = torch.rand(2, 3, size, size, generator=torch.Generator().manual_seed(1))

    def kuwahara(image):
        radius = max(1, size // 16)
        padded = np.pad(image, [(0, 0), (radius, radius), (radius, radius)], mode="reflect")
        shades, result = grey(padded), np.empty_like(image)
        for y in range(size):
            for x in range(size):
                parts = [
                    np.s_[y + top : y + top + radius + 1, x + left : x + left + radius + 1]
                    for top in (0, radius)
                    for left in (0, radius)
                ]
                calmest = parts[int(np.argmin([shades[part].var() for part in parts]))]
                result[:, y, x] = padded[(slice(None), *calmest)].mean((1, 2))
        return result

    # Rounding may decide between two neighbourhoods of nearly equal variance, at few pixels.
    close = (painting(images) - each(kuwahara, images)).abs().amax(1) < 1e-5
    assert close.float().mean() > 0.99


def test_painting_leaves_a_flat_image_and_a_straight_edge():
    edge = torch.zeros(1, 3, 32, 32)
    edge[..., 16:] = 1
    assert torch.allclose(painting(edge), edge, atol=1e-6)


def test_sketch_is_the_complement_of_sobels_gradient():
    def drawn(image):
        padded = np.pad(grey(image), 1, mode="edge")
        result = np.empty_like(image)
        for y in range(image.shape[1]):
            for x in range(image.shape[2]):
                (a, b, c), (d, _, e), (f, g, h) = padded[y : y + 3, x : x + 3]
                across, down = c + 2 * e + h - a - 2 * d - f, f + 2 * g + h - a - 2 * b - c
                result[:, y, x] = max(0, 1 - np.hypot(across, down))
        return result

    assert torch.allclose(sketch(IMAGES), each(drawn), atol=1e-5)


@pytest.mark.parametrize("size", [8, 17, 32])
def test_mosaic_has_flat_tiles_with_dark_seams(size):
    images, tile = IMAGES[..., :size, :size] if size < 17 else torch.rand(2, 3, size, size), max(2, size // 8)

    def tiled(image):
        result = np.empty_like(image)
        for y in range(0, size, tile):
            for x in range(0, size, tile):
                result[:, y : y + tile, x : x + tile] = image[:, y : y + tile, x : x + tile].mean((1, 2))[
                    :, None, None
                ]
        seam = np.arange(size) % tile == 0
        return result * np.where(seam[:, None] | seam[None], 0.5, 1)

    assert torch.allclose(mosaic(images), each(tiled, images), atol=1e-6)


def test_poster_has_three_levels():
    values = torch.tensor([0.0, 0.33, 0.34, 0.66, 0.67, 1.0]).view(1, 1, 1, 6)
    assert poster(values).flatten().tolist() == [0, 0, 0.5, 0.5, 1, 1]


def test_duotone_mixes_two_inks():
    expected = each(
        lambda image: (
            np.array(DARK)[:, None, None]
            + (np.array(LIGHT) - np.array(DARK))[:, None, None] * grey(image)[None]
        )
    )
    assert torch.allclose(duotone(IMAGES), expected, atol=1e-6)
    assert duotone(IMAGES[:, :1]).shape == (3, 1, 17, 17)


@pytest.mark.parametrize("name", STYLES)
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [4, 8, 33])
def test_a_style_keeps_shape_and_range_and_its_input(name, channels, size):
    images = torch.rand(2, channels, size, size, generator=torch.Generator().manual_seed(2))
    before = images.clone()
    styled = STYLES[name](images)
    assert styled.shape == images.shape
    assert (styled.min() >= 0, styled.max() <= 1) == (True, True)
    assert torch.equal(images, before)
    assert not torch.allclose(styled, images, atol=0.02)
