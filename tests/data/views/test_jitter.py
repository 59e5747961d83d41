"""The sorted colour steps, against torchvision's steps of one image after the other."""

import pytest
import torch
from torchvision.transforms.v2 import functional as tv

from atoll.data.views.jitter import plan_jitter
from atoll.data.views.views import ViewOptions, make_views

CPU = torch.device("cpu")
STEPS = (tv.adjust_brightness, tv.adjust_contrast, tv.adjust_saturation, tv.adjust_hue)


@pytest.mark.parametrize("jitter", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("chunk", [1, 5, 30, 100])
def test_each_image_takes_the_steps_in_its_own_order(jitter, chunk):
    generator = torch.Generator().manual_seed(3)
    images = torch.rand(30, 3, 6, 6, generator=generator)
    options = ViewOptions("none", jitter=jitter, brightness=0.8, contrast=0.8, saturation=0.8, hue=0.3)
    draw = make_views(options, 6, 3).draw(30, generator)
    order, plan = plan_jitter(draw, chunk, CPU)
    for start in range(0, 30, chunk):
        rows = slice(start, start + chunk)
        assert sorted(order[rows].tolist()) == list(range(30))[rows]
        found = plan.apply(images[order[rows]], rows)
        for i, image in zip(range(30)[rows], found, strict=True):
            slow = images[i]
            for step in draw.order[i].tolist() if draw.jitter[i] else ():
                slow = STEPS[step](slow, float(draw.factors[i, step]))
            torch.testing.assert_close(image, slow, atol=1e-5, rtol=0)
