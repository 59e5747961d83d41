"""Views against torchvision's per-image tensor transforms, at the same drawn parameters, on real images."""

import itertools

import pytest
import torch
from sklearn.datasets import load_digits, load_sample_images
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as tv

from atoll.core.errors import UserError
from atoll.data.views import ops as ops
from atoll.data.views import views as views_module
from atoll.data.views.transform import Transform, give_transform
from atoll.data.views.views import PRESETS, ViewOptions, ViewSettings, make_views


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def photos(n: int, height: int, width: int) -> Tensor:
    """Crops of two photographs, uint8 (n, 3, height, width)."""
    chosen = generator(7)
    pictures = [torch.tensor(picture).permute(2, 0, 1) for picture in load_sample_images().images]
    crops = []
    for i in range(n):
        picture = pictures[i % 2]
        top = int(torch.randint(picture.shape[1] - height, (1,), generator=chosen))
        left = int(torch.randint(picture.shape[2] - width, (1,), generator=chosen))
        crops.append(picture[:, top : top + height, left : left + width])
    return torch.stack(crops)


def digits(n: int) -> Tensor:
    return torch.from_numpy(load_digits().images[:n, None] * 255 / 16).round().to(torch.uint8)


PHOTOS = photos(24, 32, 32)
FLOAT = PHOTOS.float() / 255


def by_torchvision(image: Tensor, draw: views_module.Draw, chosen: ViewSettings, size: int) -> Tensor:
    """The slow way: one image, one transform after the other. `draw` has one row."""
    interpolation = v2.InterpolationMode(chosen.interpolation)
    box = [int(each) for each in (draw.top, draw.left, draw.height, draw.width)]
    view = tv.resized_crop(image.float() / 255, *box, [size, size], interpolation, antialias=True).clamp(0, 1)
    pad = chosen.pad_crop
    if pad:
        down, right = (draw.shift[0] + pad).tolist()
        view = tv.crop(tv.pad(view, [pad], padding_mode="reflect"), down, right, size, size)
    if draw.flip:
        view = tv.horizontal_flip(view)
    if draw.jitter:
        brightness, contrast, saturation, hue = draw.factors[0].tolist()
        for step in draw.order[0].tolist():
            view = (
                lambda x: tv.adjust_brightness(x, brightness),
                lambda x: tv.adjust_contrast(x, contrast),
                lambda x: tv.adjust_saturation(x, saturation),
                lambda x: tv.adjust_hue(x, hue),
            )[step](view)
    if draw.grayscale:
        view = tv.rgb_to_grayscale(view, num_output_channels=image.shape[0])
    if draw.blur:
        kernel = chosen.blur_kernel or max(3, 2 * (size // 20) + 1)
        view = tv.gaussian_blur(view, [kernel, kernel], [float(draw.sigma)])
    if draw.solarize:
        view = tv.solarize(view, chosen.solarize_threshold)
    channels = len(view)
    one_each = [list(each) * (channels // len(each)) for each in (chosen.mean, chosen.std)]
    return tv.normalize(view, *one_each)


EVERYTHING = {
    "crop_scale": [0.1, 0.9],
    "pad_crop": 3,
    "flip": 0.5,
    "jitter": 0.8,
    "brightness": 0.8,
    "contrast": 0.8,
    "saturation": 0.8,
    "hue": 0.5,
    "grayscale": 0.2,
    "blur": 0.5,
    "solarize": 0.3,
}


class TestApply:
    @pytest.mark.parametrize("preset", PRESETS)
    def test_preset_is_torchvision_per_image(self, preset):
        views = make_views(ViewOptions(preset), 32, 3)
        draw = views.draw(len(PHOTOS), generator())
        slow = [by_torchvision(PHOTOS[i], draw[i : i + 1], views.settings, 32) for i in range(len(PHOTOS))]
        torch.testing.assert_close(views.apply(PHOTOS, draw), torch.stack(slow), atol=2e-5, rtol=0)

    @pytest.mark.parametrize(
        ("stored", "size"),
        [((32, 32), 32), ((96, 96), 64), ((40, 72), 48), ((20, 20), 32), ((24, 160), 32), ((160, 24), 32)],
    )
    def test_every_operation_at_once_and_other_sizes(self, stored, size):
        images = photos(16, *stored)
        views = make_views(ViewOptions("none", size=size, **EVERYTHING), stored[0], 3)
        draw = views.draw(len(images), generator(1), source=stored)
        slow = [by_torchvision(images[i], draw[i : i + 1], views.settings, size) for i in range(len(images))]
        torch.testing.assert_close(views.apply(images, draw), torch.stack(slow), atol=2e-5, rtol=0)

    @pytest.mark.parametrize("only", ["brightness", "contrast", "saturation", "hue"])
    def test_a_jitter_of_one_kind(self, only):
        views = make_views(ViewOptions("none", jitter=1.0, **{only: 0.4}), 32, 3)
        draw = views.draw(4, generator())
        slow = torch.stack([by_torchvision(PHOTOS[i], draw[i : i + 1], views.settings, 32) for i in range(4)])
        assert not torch.allclose(slow, FLOAT[:4], atol=1e-2)
        torch.testing.assert_close(views.apply(PHOTOS[:4], draw), slow, atol=2e-5, rtol=0)

    def test_digits(self):
        images = digits(24)
        views = make_views(ViewOptions("digits", blur=0.5, solarize=0.2), 8, 1)
        draw = views.draw(len(images), generator())
        slow = [by_torchvision(images[i], draw[i : i + 1], views.settings, 8) for i in range(len(images))]
        torch.testing.assert_close(views.apply(images, draw), torch.stack(slow), atol=2e-5, rtol=0)

    def test_one_channel_ignores_saturation_hue_and_grayscale(self):
        images = digits(16)
        off = {"saturation": 0.0, "hue": 0.0, "grayscale": 0.0}
        full, without = (make_views(ViewOptions("ssd", **change), 8, 1) for change in ({}, off))
        torch.testing.assert_close(full(images, generator()), without(images, generator()), atol=0, rtol=0)

    def test_several_views_of_each_image(self):
        views = make_views(ViewOptions("ssd"), 32, 3)
        draw = views.draw(len(PHOTOS), generator(), generator(1), generator(2))
        assert torch.equal(views.apply(PHOTOS, draw), views.apply(PHOTOS.repeat(3, 1, 1, 1), draw))

    @pytest.mark.parametrize("count", [0, 5, 9])
    def test_a_draw_of_another_number_is_refused(self, count):
        views = make_views(ViewOptions("ssd"), 32, 3)
        with pytest.raises(ValueError, match=rf"a draw of 6 views cannot be applied to images \({count}, 3"):
            views.apply(PHOTOS[:count], views.draw(6, generator()))

    @pytest.mark.parametrize("sizes", [[], [2], [4, 4], [24, 24], [23, 2]])
    def test_batches_of_another_number_of_images_are_refused(self, sizes):
        views = make_views(ViewOptions("ssd"), 32, 3)
        with pytest.raises(ValueError, match="cannot be made of 24"):
            views.make(PHOTOS, [generator(), generator()], sizes=sizes)

    def test_image_does_not_depend_on_its_batch(self, monkeypatch):
        views = make_views(ViewOptions("ssd", blur=0.5, solarize=0.2), 32, 3)
        draw = views.draw(len(PHOTOS), generator())
        together = views.apply(PHOTOS, draw)
        chosen = torch.tensor([5, 17, 3])
        torch.testing.assert_close(
            views.apply(PHOTOS[chosen], draw[chosen]), together[chosen], atol=1e-6, rtol=0
        )
        for values in (5 * 32 * 32 * 3, 1):  # an image may have more values than a chunk
            monkeypatch.setattr(views_module, "CPU_CHUNK", values)
            torch.testing.assert_close(views.apply(PHOTOS, draw), together, atol=1e-6, rtol=0)

    @pytest.mark.parametrize("preset", ["ssd", "l-dawa", "dino"])
    def test_several_views_in_one_pass_are_those_made_one_by_one(self, preset):
        views = make_views(ViewOptions(preset), 32, 3)
        seeds = (3, 1, 4)
        together = views.make(PHOTOS, [generator(seed) for seed in seeds])
        for seed, made in zip(seeds, together, strict=True):
            torch.testing.assert_close(made, views(PHOTOS, generator(seed)), atol=1e-6, rtol=0)
        assert views.make(PHOTOS, []) == []

    def test_several_batches_in_one_pass_are_those_made_one_by_one(self):
        """Each batch is drawn by itself, so a generator gives the first batch's numbers before the second's."""
        views, sizes = make_views(ViewOptions("ssd"), 32, 3), (5, 12, 7)
        together = views.make(PHOTOS, [generator(3), generator(1)], sizes=sizes)
        draws = [generator(3), generator(1)]
        alone = [views.make(batch, draws) for batch in torch.split(PHOTOS, sizes)]
        for made, batches in zip(together, zip(*alone, strict=True), strict=True):
            torch.testing.assert_close(made, torch.cat(batches), atol=1e-6, rtol=0)

    def test_deterministic_and_leaves_the_images_alone(self):
        images = PHOTOS.clone()
        views = make_views(ViewOptions("l-dawa"), 32, 3)
        first, second = views(images, generator(3)), views(images, generator(3))
        assert torch.equal(first, second)
        assert torch.equal(images, PHOTOS)
        assert not torch.allclose(first, views(images, generator(4)))

    def test_every_image_has_a_draw_of_its_own(self):
        same = PHOTOS[:1].expand(16, -1, -1, -1)
        made = make_views(ViewOptions("simclr"), 32, 3)(same, generator())
        assert all(not torch.allclose(a, b) for a, b in itertools.combinations(made, 2))

    def test_memory_layout_does_not_matter(self):
        views = make_views(ViewOptions("ssd"), 32, 3)
        turned = PHOTOS.contiguous(memory_format=torch.channels_last)
        assert torch.equal(views(turned, generator()), views(PHOTOS, generator()))

    @pytest.mark.parametrize("transform", [None, Transform(give_transform(torch.clone))])
    def test_views_have_the_layout_that_is_asked_for(self, transform):
        views = make_views(ViewOptions("ssd"), 32, 3)
        views.transform = transform
        (plain,), (turned,) = (
            views.make(PHOTOS, [generator()], *layout) for layout in ((), (torch.channels_last,))
        )
        assert torch.equal(plain, turned)
        assert plain.is_contiguous()
        assert turned.is_contiguous(memory_format=torch.channels_last)

    def test_full_precision_inside_autocast(self):
        views = make_views(ViewOptions("l-dawa"), 32, 3)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = views(PHOTOS, generator())
        assert inside.dtype == torch.float32
        assert torch.equal(inside, views(PHOTOS, generator()))

    def test_empty_batch(self):
        views = make_views(ViewOptions("ssd"), 32, 3)
        assert views(PHOTOS[:0], generator()).shape == (0, 3, 32, 32)
        taps = ops.blur_taps(torch.ones(0), 3, 32)
        assert ops.separable(PHOTOS[:0], taps, taps).shape == (0, 3, 32, 32)

    def test_refuses_wrong_images_and_draws(self):
        views = make_views(ViewOptions(), 32, 3)
        with pytest.raises(ValueError, match=r"uint8 images \(N, 3, H, W\); got torch.float32"):
            views(FLOAT, generator())
        with pytest.raises(ValueError, match=r"\(24, 1, 32, 32\)"):
            views(PHOTOS[:, :1], generator())
        with pytest.raises(ValueError, match="a draw of 3 views"):
            views.apply(PHOTOS, views.draw(3, generator()))


class TestPlain:
    def test_values_and_normalisation(self):
        views = make_views(ViewOptions("l-dawa"), 32, 3)
        settings_ = views.settings
        normal = tv.normalize(FLOAT, list(settings_.mean), list(settings_.std))
        torch.testing.assert_close(views.plain(PHOTOS), normal)
        torch.testing.assert_close(views.plain(PHOTOS, normalise=False), FLOAT)

    @pytest.mark.parametrize("mean", [(0.0, 0.0, 0.0), (0.0, 0.5, 0.2)])
    @pytest.mark.parametrize("std", [(1.0, 1.0, 1.0), (1.0, 2.0, 0.5)])
    def test_some_channels_may_need_no_normalisation(self, mean, std):
        views = make_views(ViewOptions("none", mean=mean, std=std), 32, 3)
        normal = tv.normalize(FLOAT, list(mean), list(std))
        torch.testing.assert_close(views.plain(PHOTOS), normal)
        torch.testing.assert_close(views(PHOTOS, generator()), normal)

    def test_other_size(self):
        large = photos(4, 96, 80)
        plain = make_views(ViewOptions("none", size=64), 96, 3).plain(large)
        torch.testing.assert_close(plain, tv.resize(large.float() / 255, [64, 64], antialias=True))

    def test_view_that_does_nothing_is_plain(self):
        views = make_views(ViewOptions("mae"), 32, 3)
        torch.testing.assert_close(views(PHOTOS, generator()), views.plain(PHOTOS))


class TestLocal:
    def test_a_local_crop_is_a_view_of_its_own_size_and_scale(self):
        views = make_views(ViewOptions("simclr", local_size=12, local_scale=(0.05, 0.4)), 32, 3)
        plain = make_views(ViewOptions("simclr", size=12, crop_scale=(0.05, 0.4)), 32, 3)
        crops = views.local(PHOTOS, generator())
        assert crops.shape == (24, 3, 12, 12)
        assert torch.equal(crops, plain(PHOTOS, generator()))
        draw = views.local.draw(2000, generator())
        area = (draw.height * draw.width).double() / 32**2
        assert 0.03 < float(area.min()) < 0.08  # rounded to whole pixels
        assert 0.36 < float(area.max()) < 0.44

    def test_by_default_it_has_the_size_of_the_views(self):
        assert make_views(ViewOptions("simclr"), 32, 3).local.size == 32
        assert make_views(ViewOptions("simclr", size=24), 32, 3).local.size == 24

    def test_operations_that_do_not_fit_a_small_crop_are_refused(self):
        with pytest.raises(UserError, match=r"views.pad_crop is 4; it must be less than the views' size, 4"):
            make_views(ViewOptions("fedx", local_size=4), 32, 3)
        with pytest.raises(UserError, match=r"blur_kernel is 13; for views of size 6"):
            make_views(ViewOptions("l-dawa", local_size=6), 32, 3)
