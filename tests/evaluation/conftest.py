"""Real images, few and small."""

from collections.abc import Iterator

import pytest
import torch
from sklearn.datasets import load_digits

from atoll.data.images import ImageSet, StoredPixels


@pytest.fixture(scope="package", autouse=True)
def _one_thread() -> Iterator[None]:
    """Operations this small lose by a second thread, and lose much on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def digits() -> tuple[ImageSet, ImageSet]:
    """600 and 200 real digits, 8×8."""
    pixels, labels = load_digits(return_X_y=True)
    images = torch.from_numpy((pixels * 15.9375).round()).to(torch.uint8).view(-1, 1, 8, 8)
    y = torch.from_numpy(labels).long()
    return (
        ImageSet(StoredPixels(images[:600]), y[:600], [str(c) for c in range(10)]),
        ImageSet(StoredPixels(images[600:800]), y[600:800], [str(c) for c in range(10)]),
    )
