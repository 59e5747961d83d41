"""Synthetic images: each is the same in any batch and set, of its class's pattern, and no two are equal."""

import pytest
import torch

from atoll.core.errors import UserError
from atoll.data.options import DataOptions
from atoll.data.sources import load_data, read_listings, why_missing
from atoll.data.synthetic import NOISE


def load(**options):
    return load_data(DataOptions(source="synthetic", image_size=6, channels=1, **options), seed=0)


def test_an_image_is_the_same_wherever_it_is_read():
    some, more = load(limit=100), load(limit=1000)
    assert (len(some.train), len(some.test), len(more.test)) == (100, 20, 200)
    rows = torch.tensor([7, 3, 99])
    alone = torch.cat([some.train.images.gather(rows[k : k + 1]) for k in range(3)])
    assert torch.equal(some.train.images.gather(rows), alone)
    assert torch.equal(more.train.images.gather(rows), alone)
    assert torch.equal(
        more.train.images.gather(torch.arange(100, 120)), some.test.images.gather(torch.arange(20))
    )


def test_images_of_a_class_share_a_pattern_and_no_two_are_equal():
    train = load(limit=400).train
    pixels = train.images.gather(torch.arange(400)).flatten(1).long()
    assert len(torch.unique(pixels, dim=0)) == 400
    for c in range(10):
        own = pixels[train.labels == c]
        assert (own.amax(0) - own.amin(0)).max() < NOISE
    means = torch.stack([pixels[train.labels == c].float().mean(0) for c in range(10)])
    assert torch.cdist(means, means).fill_diagonal_(99).min() > NOISE / 2


def test_options_and_errors():
    splits = load(limit=50, validation_fraction=0.2, test_fraction=0, labels=False)
    assert (len(splits.train), len(splits.validation), splits.test) == (40, 10, None)
    assert splits.train.labels is None
    assert why_missing(DataOptions(source="synthetic")) == ""
    with pytest.raises(IndexError):
        splits.train.images.gather(torch.tensor([40]))
    with pytest.raises(UserError, match="made up"):
        read_listings(DataOptions(source="synthetic"))
    assert load(limit=60).train.fingerprint != load(limit=61).train.fingerprint
