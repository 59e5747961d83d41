"""Image sets: gathering, views of views, and what travels to a worker process."""

import pickle

import numpy as np
import pytest
import torch

from atoll.data.images import DevicePixels, ImageSet, SelectedPixels, StoredPixels

PIXELS = torch.arange(10, dtype=torch.uint8).view(10, 1, 1, 1).expand(10, 3, 2, 2).contiguous()


def some_images():
    return ImageSet(
        StoredPixels(PIXELS),
        labels=torch.arange(10) % 3,
        classes=["a", "b", "c"],
        columns={"domain": torch.arange(10) // 5},
        column_values={"domain": ["left", "right"]},
        fingerprint="whole",
    )


def test_gather_copies_in_the_order_asked():
    store = StoredPixels(PIXELS)
    batch = store.gather(torch.tensor([7, 0, 7]))
    assert batch[:, 0, 0, 0].tolist() == [7, 0, 7]
    batch.zero_()
    assert store.gather(torch.tensor([7]))[0, 0, 0, 0] == 7


def test_pixels_on_a_device_are_those_they_were_made_of(monkeypatch):
    monkeypatch.setattr("atoll.data.images._UPLOADED", 4)  # three copies: the last is smaller
    chosen = SelectedPixels(StoredPixels(PIXELS), torch.tensor([9, 4, 2, 0, 1, 3, 5, 6, 7]))
    there = DevicePixels(chosen, torch.device("cpu"))
    assert (there.shape, len(there)) == (chosen.shape, 9)
    rows = torch.tensor([8, 0, 3, 3])
    assert torch.equal(there.gather(rows), chosen.gather(rows))
    assert there.gather(rows).device.type == "cpu"


@pytest.mark.parametrize("index", [-1, 10])
def test_indices_outside_are_refused(index):
    for pixels in (StoredPixels(PIXELS), SelectedPixels(StoredPixels(PIXELS), torch.arange(10))):
        with pytest.raises(IndexError):
            pixels.gather(torch.tensor([index]))


def test_a_subset_of_a_subset_is_one_view_with_everything_aligned():
    images = some_images().subset(torch.tensor([9, 4, 2, 0])).subset(torch.tensor([2, 0]))
    assert images.images.shape == (2, 3, 2, 2)
    assert len(images) == 2
    assert images.images.gather(torch.tensor([0, 1]))[:, 0, 0, 0].tolist() == [2, 9]
    assert images.labels.tolist() == [2, 0]
    assert images.columns["domain"].tolist() == [0, 1]
    assert isinstance(images.images.base, StoredPixels)


def test_a_subset_is_fingerprinted_by_its_indices():
    images = some_images()
    first = images.subset(torch.tensor([1, 2])).fingerprint
    assert first == images.subset(torch.tensor([1, 2])).fingerprint
    assert len({first, images.subset(torch.tensor([2, 1])).fingerprint, images.fingerprint}) == 3


def test_a_mapped_file_travels_as_its_path(tmp_path):
    np.save(tmp_path / "pixels.npy", np.zeros((1000, 3, 32, 32), dtype=np.uint8) + 7)
    store = StoredPixels.open(tmp_path / "pixels.npy")
    message = pickle.dumps(SelectedPixels(store, torch.tensor([3, 5])))
    assert len(message) < 2000
    assert pickle.loads(message).gather(torch.tensor([1])).unique().tolist() == [7]


def test_only_bytes_of_images_are_pixels():
    with pytest.raises(ValueError, match=r"uint8 .*float32"):
        StoredPixels(PIXELS.float())
    with pytest.raises(ValueError, match="uint8"):
        StoredPixels(PIXELS[0])
