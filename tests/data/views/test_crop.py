"""Taps of crops, against torchvision's crop, resize, padded crop and flip of each image."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as tv

from atoll.data.views import ops
from atoll.data.views.crop import plan_crops
from atoll.data.views.views import ViewOptions, make_views

CPU = torch.device("cpu")


@given(
    st.integers(0, 2**31),
    st.sampled_from(["bilinear", "bicubic"]),
    st.sampled_from([7, 16]),
    st.integers(0, 6),
)
@settings(max_examples=40, deadline=None)
def test_crops_are_torchvisions(seed, interpolation, size, pad):
    generator = torch.Generator().manual_seed(seed)
    images = torch.rand(9, 2, 13, 16, generator=generator)
    options = ViewOptions("none", crop_scale=[0.1, 1.0], flip=0.5, pad_crop=pad, interpolation=interpolation)
    draw = make_views(options, size, 2).draw(9, generator, source=(13, 16))
    found = ops.separable(images, *plan_crops(draw, torch.arange(9), size, interpolation, CPU))
    for i in range(9):
        box = [int(each[i]) for each in (draw.top, draw.left, draw.height, draw.width)]
        mode = InterpolationMode(interpolation)
        slow = tv.resized_crop(images[i], *box, [size, size], mode, antialias=True)
        down, right = (draw.shift[i] + pad).tolist()
        slow = tv.crop(tv.pad(slow, [pad], padding_mode="reflect"), down, right, size, size) if pad else slow
        slow = tv.horizontal_flip(slow) if draw.flip[i] else slow
        torch.testing.assert_close(found[i], slow, atol=1e-5, rtol=1e-4)


def test_equal_crops_at_other_places_have_equal_weights():
    draw = make_views(ViewOptions("simclr"), 16, 3).draw(40, torch.Generator().manual_seed(0))
    rows, columns = plan_crops(draw, torch.arange(40), 16, "bilinear", CPU)
    pairs = [
        (i, j)
        for i in range(40)
        for j in range(i)
        if draw.height[i] == draw.height[j] and draw.top[i] != draw.top[j]
    ]
    assert pairs
    for i, j in pairs:
        assert torch.equal(rows.weights[i], rows.weights[j])
        assert torch.equal(rows.pixels[i] - draw.top[i], rows.pixels[j] - draw.top[j])
    assert rows.pixels.min() >= 0
    assert columns.pixels.max() < 16


def test_crops_of_other_extents_flips_and_shifts_are_kept_apart():
    options = ViewOptions("none", crop_scale=[0.1, 1.0], flip=0.5, pad_crop=6)
    draw = make_views(options, 7, 3).draw(300, torch.Generator().manual_seed(0))
    order = torch.randperm(300, generator=torch.Generator().manual_seed(1))
    together = plan_crops(draw, order, 7, "bilinear", CPU)
    for place, i in enumerate(order.tolist()):
        alone = plan_crops(draw[i : i + 1], torch.arange(1), 7, "bilinear", CPU)
        for many, one in zip(together, alone, strict=True):
            taps = one.weights.shape[-1]
            torch.testing.assert_close(many.weights[place, :, :taps], one.weights[0], atol=1e-6, rtol=0)
            assert torch.equal(many.pixels[place, :, :taps], one.pixels[0])
