"""Shifts by client: rotation against torchvision and a slow loop; which client has which; noise."""

import math

import numpy as np
import pytest
import torch
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as V

from atoll.data.images import ImageSet, StoredPixels
from atoll.data.shifts.options import ShiftOptions
from atoll.data.shifts.shift import Shift, shifted, shifted_held_out

PIXELS = torch.randint(256, (12, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
IMAGES = ImageSet(StoredPixels(PIXELS), fingerprint="these")


def shift(*kinds, clients=4, seed=0, **options):
    return Shift(ShiftOptions(kinds=kinds, **options), clients, seed)


def turned(image, degrees):
    """Bilinear, about the centre, counter-clockwise, zeros outside; pixel by pixel in float64."""
    size = image.shape[-1]
    centre, angle = (size - 1) / 2, math.radians(degrees)
    result = np.zeros(image.shape)
    for y in range(size):
        for x in range(size):
            right, down = x - centre, y - centre
            u = centre + math.cos(angle) * right - math.sin(angle) * down
            v = centre + math.sin(angle) * right + math.cos(angle) * down
            for row, column in ((r, c) for r in (0, 1) for c in (0, 1)):
                j, i = math.floor(v) + row, math.floor(u) + column
                if 0 <= i < size and 0 <= j < size:
                    result[:, y, x] += (1 - abs(v - j)) * (1 - abs(u - i)) * image[:, j, i].astype(np.float64)
    return result


@pytest.mark.parametrize(("client", "degrees"), [(1, 72), (4, 288)])
def test_rotation_is_bilinear_about_the_centre(client, degrees):
    found = shift("rotation", clients=5).apply(PIXELS[:2], client, range(2))
    expected = np.stack([turned(image, degrees) for image in PIXELS[:2].numpy()])
    assert np.abs(found.numpy() - expected).max() <= 1  # rounding


@pytest.mark.parametrize("client", range(5))
def test_rotation_is_torchvisions_image_by_image(client):
    found = shift("rotation", clients=5).apply(PIXELS, client, range(12))
    expected = [V.rotate(image, 72 * client, InterpolationMode.BILINEAR) for image in PIXELS]
    assert torch.equal(found, torch.stack(expected))


@pytest.mark.parametrize("client", range(4))
def test_quarter_turns_are_exact(client):
    found = shift("rotation").apply(PIXELS, client, range(12)).int()
    assert (found - torch.rot90(PIXELS, client, (2, 3)).int()).abs().max() <= 1


def test_styles_and_corruptions_take_turns_and_compose_in_order():
    both = shift("style", "corruption", clients=20, corruptions=("contrast", "pixelate"), severity=2)
    assert [both.describe(k) for k in (0, 6, 13)] == [
        "painting, contrast 2",
        "sketch, contrast 2",
        "poster, pixelate 2",
    ]
    one = shift("style", clients=20).apply(PIXELS, 6, range(12))
    two = shift("corruption", clients=20, corruptions=("contrast", "pixelate"), severity=2).apply(
        one, 6, range(12)
    )
    assert torch.equal(both.apply(PIXELS, 6, range(12)), two)
    other = shift("corruption", "style", clients=20, corruptions=("contrast", "pixelate"), severity=2)
    assert not torch.equal(other.apply(PIXELS, 6, range(12)), two)


def test_values_are_shifted_between_0_and_1_and_rounded():
    found = shift("corruption", corruptions=("contrast",), severity=1).apply(PIXELS, 0, range(12))
    images = PIXELS.double() / 255
    means = images.mean((2, 3), keepdim=True)
    expected = ((images - means) * 0.75 + means).clamp(0, 1) * 255
    assert (found - expected).abs().max() < 0.5001


def noisy(seed=0):
    return shift("corruption", clients=2, seed=seed, corruptions=("gaussian-noise", "shot-noise"))


CLIENTS = [torch.tensor([5, 3, 8]), torch.tensor([0, 7])]


def test_each_image_has_its_clients_shift_whatever_the_batch():
    images = shifted(IMAGES, CLIENTS, noisy()).images
    whole = images.gather(torch.arange(12))
    assert torch.equal(images.gather(torch.tensor([7, 3, 3, 1])), whole[[7, 3, 3, 1]])
    nobodys = [1, 2, 4, 6, 9, 10, 11]
    assert torch.equal(whole[nobodys], PIXELS[nobodys])
    for client, indices in enumerate(CLIENTS):
        assert torch.equal(whole[indices], noisy().apply(PIXELS[indices], client, range(len(indices))))
        assert not torch.equal(whole[indices], PIXELS[indices])


def test_a_site_with_a_clients_images_alone_has_the_same_noise():
    pooled = shifted(IMAGES, CLIENTS, noisy()).images.gather(CLIENTS[1])
    site = ImageSet(StoredPixels(PIXELS[CLIENTS[1]]))
    alone = shifted(site, [torch.arange(0), torch.arange(2)], noisy()).images
    assert torch.equal(alone.gather(torch.arange(2)), pooled)


def test_noise_depends_on_the_seed_and_equal_images_have_different_noise():
    same = ImageSet(StoredPixels(PIXELS[:1].expand(4, -1, -1, -1).contiguous()))
    clients = [torch.arange(4), torch.arange(0)]
    first, again, other = (
        shifted(same, clients, noisy(seed)).images.gather(torch.arange(4)) for seed in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first[0], first[1])


def test_held_out_images_are_shared_evenly_among_clients_with_images_and_not_by_seed():
    sizes = [3, 0, 2]
    found = [
        shifted_held_out(IMAGES, sizes, shift("rotation", clients=3, seed=seed), "test").images
        for seed in (0, 1)
    ]
    assert torch.bincount(found[0].owners, minlength=3).tolist() == [6, 0, 6]
    assert torch.equal(found[0].owners, found[1].owners)
    assert torch.equal(*(images.gather(torch.arange(12)) for images in found))
    kept = found[0].gather(torch.arange(12))[found[0].owners == 0]
    assert torch.equal(kept, PIXELS[found[0].owners == 0])  # client 0 is rotated by 0°
