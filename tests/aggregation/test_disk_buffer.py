import gc
import os
import sys
import tempfile
import warnings
from functools import partial
from pathlib import Path

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
    disk_buffer = DiskBuffer(tmp_path / "run" / "scratch")
    for weights in models:
        disk_buffer.add(weights)
    rows = torch.cat([block for _, block in disk_buffer.blocks()], dim=1)
    assert torch.equal(rows, torch.stack([disk_buffer.flat(weights) for weights in models]))
    assert len(disk_buffer) == 3
    assert same(disk_buffer.map(lambda block, component: block[1]), floats(models[1]))
    places = [range(33)[component] for component, _ in disk_buffer.blocks()]
    assert [i for place in places for i in place] == list(range(33))


def test_a_block_holds_no_more_bytes_than_the_limit(memory):
    """In a type of eight bytes, in which nothing is lost, and at least one coordinate of each model."""
    models = [model(k, torch.float64) for k in range(3)]
    buffer = DiskBuffer(None)
    for weights in models:
        buffer.add(weights)
    assert all(block.nbytes <= max(disk_buffer.MEMORY, 3 * 8) for _, block in buffer.blocks())
    for k, weights in enumerate(models):
        assert same(buffer.map(lambda rows, block, k=k: rows[k]), floats(weights))


def test_models_may_name_their_tensors_in_different_orders(memory):
    models = [model(0), dict(reversed(model(1).items()))]
    buffer = DiskBuffer(None)
    for weights in models:
        buffer.add(weights)
    for k, weights in enumerate(models):
        assert same(buffer.map(lambda rows, block, k=k: rows[k]), floats(weights))


def test_a_function_learns_where_its_block_is(memory):
    other, buffer = model(5), DiskBuffer(None)
    buffer.add(model(0))
    vector = buffer.flat(other)
    assert same(buffer.map(lambda rows, block: vector[block]), floats(other))


@pytest.mark.parametrize("scaled", [False, True])
def test_products_are_those_of_the_differences(memory, scaled):
    models, origin = [model(k) for k in range(3)], model(9)
    disk_buffer = DiskBuffer(None)
    for weights in models:
        disk_buffer.add(weights)
    moved = torch.stack([disk_buffer.flat(w).double() - disk_buffer.flat(origin).double() for w in models])
    scale = torch.arange(1.0, 34.0) if scaled else None
    moved = moved if scale is None else moved * scale
    assert torch.allclose(disk_buffer.gram(disk_buffer.flat(origin), scale), moved @ moved.T, rtol=1e-12)


def test_tensors_come_back_in_their_own_type():
    mixed = {"half": torch.randn(3).half(), "double": torch.randn(2, 2).double(), "scalar": torch.tensor(2.5)}
    disk_buffer = DiskBuffer(None)
    disk_buffer.add(mixed)
    assert same(disk_buffer.map(lambda block, component: block[0]), mixed)


def test_channels_last_is_layout_only():
    w = {"x": torch.randn(4, 3, 2, 2), "strided": torch.randn(4, 2)[:, 0]}
    disk_buffer = DiskBuffer(None)
    disk_buffer.add({**w, "x": w["x"].to(memory_format=torch.channels_last)})
    assert same(disk_buffer.map(lambda block, component: block[0]), w)


def test_nothing_stays_on_disk(tmp_path):
    disk_buffer = DiskBuffer(tmp_path)
    disk_buffer.add(model(0))
    assert os.listdir(tmp_path) == []  # the file has no name, so a kill leaves none


def test_the_file_is_in_the_folder_that_was_given(tmp_path, monkeypatch):
    """The system's folder for temporary files is often in memory."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    buffer = DiskBuffer(tmp_path / "scratch")
    buffer.add(model(0))
    assert same(buffer.map(lambda rows, block: rows[0]), floats(model(0)))


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


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a device that is always full")
def test_a_full_disk_is_reported_with_its_folder_before_the_next_step_and_only_once(tmp_path, monkeypatch):
    """A small model stays in the file's own buffer until it is flushed."""
    unraised = []
    monkeypatch.setattr(sys, "unraisablehook", unraised.append)
    full = partial(open, "/dev/full", "r+b")
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda dir: full())
    buffer = DiskBuffer(tmp_path)
    with pytest.raises(UserError) as error:
        buffer.add(model(0))
    assert f"the disk is full: {tmp_path} could not be written" in str(error.value)
    assert len(buffer) == 0
    del buffer, error  # its traceback refers to the buffer
    gc.collect()
    assert not unraised
