"""What is drawn for views, against torchvision's draws and against the rates that the settings name."""

import pytest
import torch
from scipy.stats import chisquare, ks_2samp
from torchvision.transforms import v2

from atoll.data.views.views import ViewOptions, make_views


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize(
    ("height", "width", "scale", "ratio"),
    [(32, 32, (0.08, 1.0), (3 / 4, 4 / 3)), (24, 90, (0.5, 1.0), (1 / 3, 3.0))],
)
def test_crops_are_distributed_as_torchvisions(height, width, scale, ratio):
    n = 3000
    views = make_views(ViewOptions("none", crop_scale=scale, crop_ratio=ratio), height, 3)
    draw = views.draw(n, generator(), source=(height, width))
    torch.manual_seed(0)
    transform = v2.RandomResizedCrop(8, scale=scale, ratio=ratio)
    image = torch.empty(3, height, width)
    theirs = [transform.make_params([image]) for _ in range(n)]
    for name in ("top", "left", "height", "width"):
        ours = getattr(draw, name)
        assert ks_2samp(ours.numpy(), [row[name] for row in theirs]).pvalue > 1e-3, name
    area = [row["height"] * row["width"] for row in theirs]
    assert ks_2samp((draw.height * draw.width).numpy(), area).pvalue > 1e-3
    assert (draw.top >= 0).all()
    assert (draw.top + draw.height <= height).all()
    assert (draw.left + draw.width <= width).all()


@pytest.mark.parametrize(("height", "width"), [(20, 90), (91, 20), (32, 32)])
def test_crop_that_never_fits_is_torchvisions_middle(height, width):
    # At scale 1 only a crop of the image's own ratio fits, and a draw rarely has that.
    options = ViewOptions("none", crop_scale=(1.0, 1.0), crop_ratio=(0.8, 1.25))
    draw = make_views(options, 32, 3).draw(1, generator(), source=(height, width))
    tall, wide = min(height, round(width / 0.8)), min(width, round(height * 1.25))
    box = [int(each) for each in (draw.top, draw.left, draw.height, draw.width)]
    assert box == [(height - tall) // 2, (width - wide) // 2, tall, wide]
    torch.manual_seed(0)
    transform = v2.RandomResizedCrop(8, scale=(1.0, 1.0), ratio=(0.8, 1.25))
    theirs = transform.make_params([torch.empty(3, height, width)])
    assert box == [theirs[name] for name in ("top", "left", "height", "width")]


def test_the_ratio_is_width_to_height():
    """Ratios on both sides of 1, as usual ones, cannot tell a crop from one on its side."""
    options = ViewOptions("none", crop_scale=(0.25, 0.25), crop_ratio=(4.0, 4.0))
    draw = make_views(options, 32, 3).draw(4, generator(), source=(32, 32))
    assert {*zip(draw.height.tolist(), draw.width.tolist(), strict=True)} == {(8, 32)}


def test_a_crop_of_no_pixel_does_not_fit():
    """A hundredth of 16 pixels rounds to a side of 0, so the crop is that of the middle."""
    draw = make_views(ViewOptions("none", crop_scale=(0.01, 0.01)), 4, 3).draw(3, generator())
    assert draw.height.tolist() == draw.width.tolist() == [4] * 3


def test_without_a_crop_the_whole_image_is_taken():
    draw = make_views(ViewOptions("none"), 32, 3).draw(2, generator(), source=(20, 90))
    box = zip(*(each.tolist() for each in (draw.top, draw.left, draw.height, draw.width)), strict=True)
    assert [*box] == [(0, 0, 20, 90)] * 2


def test_rates_and_ranges():
    n = 20_000
    chosen = ViewOptions("ssd", flip=0.3, blur=0.6, solarize=0.1, brightness=1.5, pad_crop=2, hue=0.2)
    draw = make_views(chosen, 32, 3).draw(n, generator())
    rates = {"flip": 0.3, "jitter": 0.8, "grayscale": 0.2, "blur": 0.6, "solarize": 0.1}
    for name, rate in rates.items():
        assert getattr(draw, name).float().mean().item() == pytest.approx(rate, abs=0.015), name
    bounds = torch.tensor([[0.0, 2.5], [0.2, 1.8], [0.2, 1.8], [-0.2, 0.2]])
    for column, (low, high) in zip(draw.factors.T, bounds.tolist(), strict=True):
        assert ks_2samp(column.numpy(), torch.linspace(low, high, n).numpy()).pvalue > 1e-3
    assert ks_2samp(draw.sigma.numpy(), torch.linspace(0.1, 2.0, n).numpy()).pvalue > 1e-3
    for shift in draw.shift.T:
        assert chisquare(torch.bincount(shift + 2, minlength=5).numpy()).pvalue > 1e-3


def test_every_order_of_the_jitter_is_as_likely():
    order = make_views(ViewOptions(), 32, 3).draw(12_000, generator()).order
    assert torch.equal(order.sort(1).values, torch.arange(4).expand_as(order))
    code = (order * torch.tensor([64, 16, 4, 1])).sum(1)
    assert chisquare(code.unique(return_counts=True)[1].numpy()).pvalue > 1e-3
    assert len(code.unique()) == 24


def test_events_are_independent():
    draw = make_views(ViewOptions("l-dawa", solarize=0.5), 32, 3).draw(20_000, generator())
    columns = [draw.flip, draw.jitter, draw.grayscale, draw.blur, draw.solarize, draw.left]
    columns += [*draw.factors.T, draw.sigma]
    correlation = torch.corrcoef(torch.stack([each.float() for each in columns])).fill_diagonal_(0)
    assert correlation.abs().max() < 0.04


def test_other_settings_leave_the_draws_alone():
    one, other = (make_views(ViewOptions(name), 32, 3).draw(50, generator()) for name in ("simclr", "ssd"))
    for name in ("top", "left", "height", "width", "flip", "jitter", "order", "grayscale"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
