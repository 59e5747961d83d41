"""Operations on batches of images, against torchvision's on each image and PyTorch's own."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchvision.transforms.v2 import functional as tv

from atoll.core.errors import UserError
from atoll.data.views import ops
from atoll.data.views.ops import rotate90
from atoll.data.views.views import ViewOptions, make_views
from tests.data.views.test_views import FLOAT, PHOTOS, digits, generator


def blend(name: str):
    """The blend of one name, applied to all images."""
    step = ops.BLENDS.index(name)
    return lambda images, factors: ops.blend_(
        images, *ops.blend_weights(factors, torch.full((len(factors),), step))
    )


class TestOperations:
    @pytest.mark.parametrize(
        ("ours", "theirs", "low", "high"),
        [
            (blend("brightness"), tv.adjust_brightness, 0.0, 2.0),
            (blend("contrast"), tv.adjust_contrast, 0.0, 2.0),
            (blend("saturation"), tv.adjust_saturation, 0.0, 2.0),
            (ops.adjust_hue_, tv.adjust_hue, -0.5, 0.5),
            (lambda x, p: ops.grayscale_(x), lambda x, p: tv.rgb_to_grayscale(x, x.shape[0]), 0.0, 1.0),
        ],
    )
    @pytest.mark.parametrize("images", [FLOAT, digits(8).float() / 255], ids=["colour", "grey"])
    def test_colour(self, ours, theirs, low, high, images):
        parameter = torch.linspace(low, high, len(images))
        slow = torch.stack([theirs(x, p) for x, p in zip(images, parameter.tolist(), strict=True)])
        torch.testing.assert_close(ours(images.clone(), parameter), slow, atol=1e-5, rtol=0)

    def test_hue_of_more_images_than_a_part(self):
        images = torch.rand(ops.CPU_PART // 3072 + 2, 3, 32, 32, generator=generator(1))
        shift = torch.linspace(-0.5, 0.5, len(images))
        slow = torch.stack([tv.adjust_hue(x, s) for x, s in zip(images, shift.tolist(), strict=True)])
        torch.testing.assert_close(ops.adjust_hue_(images.clone(), shift), slow, atol=1e-5, rtol=0)

    def test_hue_of_pure_and_grey_colours(self):
        # Red turned by a third is green; by a third more, blue. Grey, black and white have no hue to turn.
        colours = torch.tensor([[1.0, 0, 0], [0, 1, 0], [0.5, 0.5, 0.5], [0, 0, 0], [1, 1, 1]])[
            :, :, None, None
        ]
        turned = ops.adjust_hue_(colours.clone(), torch.full((5,), 1 / 3))[:, :, 0, 0]
        expected = torch.tensor([[0.0, 1, 0], [0, 0, 1], [0.5, 0.5, 0.5], [0, 0, 0], [1, 1, 1]])
        torch.testing.assert_close(turned, expected, atol=1e-6, rtol=0)

    @given(st.integers(0, 2**31), st.sampled_from(["bilinear", "bicubic"]), st.integers(1, 40))
    @settings(max_examples=25, deadline=None)
    def test_resize_is_torchs_antialiased_interpolation(self, seed, kind, size):
        image = torch.rand(1, 1, 19, 33, generator=generator(seed))
        y, x = torch.randint(19, (2,), generator=generator(seed)).sort().values.tolist()
        a, b = torch.randint(33, (2,), generator=generator(seed + 1)).sort().values.tolist()
        positions = torch.arange(size)[None]
        rows, columns = (
            ops.resize_taps(torch.tensor([extent]), positions, largest, kind).choose(torch.tensor([0]), start)
            for start, extent, largest in (
                (torch.tensor([y]), x - y + 1, 19),
                (torch.tensor([a]), b - a + 1, 33),
            )
        )
        crop = image[:, :, y : x + 1, a : b + 1]
        slow = torch.nn.functional.interpolate(crop, (size, size), mode=kind, antialias=True)
        torch.testing.assert_close(ops.separable(image, rows, columns), slow, atol=1e-5, rtol=1e-4)

    @pytest.mark.parametrize("kernel", [3, 5, 13, 23])
    def test_blur(self, kernel):
        sigma = torch.linspace(0.1, 4.0, len(FLOAT))
        taps = ops.blur_taps(sigma, kernel, 32)
        slow = [
            tv.gaussian_blur(x, [kernel, kernel], [s]) for x, s in zip(FLOAT, sigma.tolist(), strict=True)
        ]
        torch.testing.assert_close(ops.separable(FLOAT, taps, taps), torch.stack(slow), atol=1e-5, rtol=0)

    @pytest.mark.parametrize("kernel", [4, 65])
    def test_blur_refuses_a_kernel_that_does_not_fit(self, kernel):
        with pytest.raises(ValueError, match=f"kernel {kernel}, size 32"):
            ops.blur_taps(torch.ones(1), kernel, 32)

    def test_solarize(self):
        torch.testing.assert_close(ops.solarize_(FLOAT.clone(), 0.3), tv.solarize(FLOAT, 0.3))
        at_threshold = torch.tensor([0.125, 0.25, 0.375])  # exact in binary
        assert ops.solarize_(at_threshold, 0.25).tolist() == [0.125, 0.75, 0.625]

    def test_unknown_interpolation(self):
        with pytest.raises(UserError, match="did you mean 'bicubic'"):
            ops.resize_taps(torch.ones(1), torch.zeros(1, 4), 4, "bicubik")


class TestRotate90:
    @pytest.mark.parametrize("images", [PHOTOS, FLOAT], ids=["uint8", "float"])
    def test_each_image_by_its_own_turns(self, images):
        turns = torch.arange(len(images)) - 4
        slow = [torch.rot90(x, int(k), (1, 2)) for x, k in zip(images, turns, strict=True)]
        before = images.clone()
        assert torch.equal(rotate90(images, turns), torch.stack(slow))
        assert torch.equal(images, before)

    def test_four_turns_are_none(self):
        turned = PHOTOS
        for _ in range(4):
            turned = rotate90(turned, torch.ones(len(PHOTOS), dtype=torch.long))
        assert torch.equal(turned, PHOTOS)

    def test_refuses_oblong_images(self):
        with pytest.raises(ValueError, match=r"\(2, 3, 4, 5\)"):
            rotate90(torch.zeros(2, 3, 4, 5), torch.zeros(2, dtype=torch.long))

    @pytest.mark.parametrize("shape", [(1,), (3,), (2, 1), ()])
    def test_refuses_another_number_of_turns(self, shape):
        with pytest.raises(ValueError, match=r"one number of turns for each"):
            rotate90(torch.zeros(2, 3, 4, 4), torch.zeros(shape, dtype=torch.long))


@pytest.mark.parametrize("channels", [2, 6])
def test_of_other_than_three_channels_colour_is_not_changed_and_contrast_has_one_mean(channels):
    images = torch.rand(3, channels, 8, 8, generator=generator())
    factor = torch.tensor([0.5, 1.0, 1.5])
    for step in (blend("saturation"), ops.adjust_hue_):
        assert torch.equal(step(images.clone(), factor / 3), images)
    assert torch.equal(ops.grayscale_(images.clone()), images)
    for image, by, made in zip(images, factor, blend("contrast")(images.clone(), factor), strict=True):
        torch.testing.assert_close(made, (by * image + (1 - by) * image.mean()).clamp(0, 1))
    views = make_views(ViewOptions("simclr-imagenet"), 8, channels)
    made = views((images * 255).to(torch.uint8), generator())
    assert made.shape == images.shape
    assert made.isfinite().all()
