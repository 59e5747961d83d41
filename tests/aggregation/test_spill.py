import os

import pytest
import torch

from atoll.aggregation import spill as room
from atoll.aggregation.spill import Spill
from atoll.errors import UserError
from atoll.tree import same
from folds import model


def floats(weights):
    return {name: tensor for name, tensor in weights.items() if tensor.is_floating_point()}


@pytest.fixture(params=[1, 40, 2**25])
def memory(request, monkeypatch):
    """From one coordinate a block to all in one."""
    monkeypatch.setattr(room, "MEMORY", request.param)


def test_blocks_are_the_models_coordinates(memory, tmp_path):
    models = [model(k) for k in range(3)]
    spill = Spill(tmp_path / "scratch")
    for weights in models:
        spill.add(weights)
    rows = torch.cat([block for _, block in spill.blocks()], dim=1)
    assert torch.equal(rows, torch.stack([spill.flat(weights) for weights in models]))
    assert len(spill) == 3
    assert same(spill.map(lambda block, part: block[1]), floats(models[1]))
    places = [range(33)[part] for part, _ in spill.blocks()]
    assert [i for place in places for i in place] == list(range(33))


def test_products_are_those_of_the_differences(memory):
    models, origin = [model(k) for k in range(3)], model(9)
    spill = Spill(None)
    for weights in models:
        spill.add(weights)
    moved = torch.stack([spill.flat(w).double() - spill.flat(origin).double() for w in models])
    assert torch.allclose(spill.gram(spill.flat(origin)), moved @ moved.T, rtol=1e-12)


def test_tensors_come_back_in_their_own_type():
    mixed = {"half": torch.randn(3).half(), "double": torch.randn(2, 2).double(), "scalar": torch.tensor(2.5)}
    spill = Spill(None)
    spill.add(mixed)
    assert same(spill.map(lambda block, part: block[0]), mixed)


def test_channels_last_is_layout_only():
    w = {"x": torch.randn(4, 3, 2, 2)}
    spill = Spill(None)
    spill.add({"x": w["x"].to(memory_format=torch.channels_last)})
    assert same(spill.map(lambda block, part: block[0]), w)


def test_nothing_stays_on_disk(tmp_path):
    spill = Spill(tmp_path)
    spill.add(model(0))
    assert os.listdir(tmp_path) == []  # the file has no name, so a kill leaves none


def test_no_float_tensors_at_all():
    spill = Spill(None)
    spill.add({})
    assert spill.map(lambda block, part: block[0]) == {}
    assert spill.gram(spill.flat({})).tolist() == [[0.0]]


def test_a_full_disk_is_a_sentence(monkeypatch):
    spill = Spill(None)

    class Full:
        def write(self, data):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(spill, "_file", Full())
    with pytest.raises(UserError, match="the disk is full"):
        spill.add(model(0))
