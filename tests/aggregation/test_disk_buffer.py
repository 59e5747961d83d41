import os
import warnings

import pytest
import torch

from atoll.aggregation import disk_buffer
from atoll.aggregation.disk_buffer import DiskBuffer
from atoll.core.errors import UserError
from tests.folds import model
from tests.trees import same


def floats(weights):
    return {name: tensor for name, tensor in weights.items() if tensor.is_floating_point()}


@pytest.fixture(params=[1, 40, 2**25])
def memory(request, monkeypatch):
    """From one coordinate a block to all in one."""
    monkeypatch.setattr(disk_buffer, "MEMORY", request.param)


def test_blocks_are_the_models_coordinates(memory, tmp_path):
    models = [model(k) for k in range(3)]
    disk_buffer = DiskBuffer(tmp_path / "scratch")
    for weights in models:
        disk_buffer.add(weights)
    rows = torch.cat([block for _, block in disk_buffer.blocks()], dim=1)
    assert torch.equal(rows, torch.stack([disk_buffer.flat(weights) for weights in models]))
    assert len(disk_buffer) == 3
    assert same(disk_buffer.map(lambda block, component: block[1]), floats(models[1]))
    places = [range(33)[component] for component, _ in disk_buffer.blocks()]
    assert [i for place in places for i in place] == list(range(33))


def test_products_are_those_of_the_differences(memory):
    models, origin = [model(k) for k in range(3)], model(9)
    disk_buffer = DiskBuffer(None)
    for weights in models:
        disk_buffer.add(weights)
    moved = torch.stack([disk_buffer.flat(w).double() - disk_buffer.flat(origin).double() for w in models])
    assert torch.allclose(disk_buffer.gram(disk_buffer.flat(origin)), moved @ moved.T, rtol=1e-12)


def test_tensors_come_back_in_their_own_type():
    mixed = {"half": torch.randn(3).half(), "double": torch.randn(2, 2).double(), "scalar": torch.tensor(2.5)}
    disk_buffer = DiskBuffer(None)
    disk_buffer.add(mixed)
    assert same(disk_buffer.map(lambda block, component: block[0]), mixed)


def test_channels_last_is_layout_only():
    w = {"x": torch.randn(4, 3, 2, 2)}
    disk_buffer = DiskBuffer(None)
    disk_buffer.add({"x": w["x"].to(memory_format=torch.channels_last)})
    assert same(disk_buffer.map(lambda block, component: block[0]), w)


def test_nothing_stays_on_disk(tmp_path):
    disk_buffer = DiskBuffer(tmp_path)
    disk_buffer.add(model(0))
    assert os.listdir(tmp_path) == []  # the file has no name, so a kill leaves none


def test_its_file_is_closed_without_a_warning(recwarn):
    warnings.simplefilter("always")
    disk_buffer = DiskBuffer(None)
    disk_buffer.add(model(0))
    file = disk_buffer._file
    del disk_buffer
    assert file.closed
    del file
    assert not recwarn.list


def test_no_float_tensors_at_all():
    disk_buffer = DiskBuffer(None)
    disk_buffer.add({})
    assert disk_buffer.map(lambda block, component: block[0]) == {}
    assert disk_buffer.gram(disk_buffer.flat({})).tolist() == [[0.0]]


def test_a_full_disk_is_a_sentence(monkeypatch):
    disk_buffer = DiskBuffer(None)

    class Full:
        def write(self, data):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk_buffer, "_file", Full())
    with pytest.raises(UserError, match="the disk is full"):
        disk_buffer.add(model(0))
