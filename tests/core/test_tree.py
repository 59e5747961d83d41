import json
import os
import stat
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from atoll.core import tree
from atoll.core.errors import UserError
from tests.trees import same

numbers = st.one_of(
    st.integers(-(2**40), 2**40), st.floats(allow_nan=False), st.booleans(), st.none(), st.text()
)
tensors = st.sampled_from(
    [torch.arange(6.0).reshape(2, 3), torch.tensor(7), torch.zeros(0, 4), torch.ones(2, dtype=torch.bfloat16)]
)
trees = st.recursive(
    st.one_of(numbers, tensors),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(), inner, max_size=3)),
    max_leaves=8,
)


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.text(), trees, max_size=3))
@example({"§": 0})  # what stands for a tensor in the file
@example({"a": [{"§§": torch.zeros(2)}, {"§": {"§": "0"}}]})
def test_a_tree_survives_packing(value):
    assert same(tree.unpack(tree.pack(value)), value)


@pytest.mark.parametrize("whole", [torch.tensor, float])
def test_equal_trees_are_equal_to_the_bit(whole):
    zero, minus, missing = whole(0.0), whole(-0.0), whole(float("nan"))
    assert not same({"a": [zero]}, {"a": [minus]})
    assert same({"a": [missing]}, {"a": [missing]})
    assert same({"a": [zero]}, {"a": [whole(0.0)]})


def test_equal_tensors_may_differ_in_layout():
    table = torch.arange(6.0).reshape(2, 3)
    assert same(table.T, table.T.contiguous())
    assert same(table[0, ::2], torch.tensor([0.0, 2.0]))
    assert same(torch.ones(1).expand(4), torch.ones(4))


def test_views_of_one_storage_and_other_layouts_keep_their_values():
    arena = torch.arange(48.0)
    value = {
        "a": arena[:4],
        "b": arena[4:12].reshape(2, 4).T,
        "c": arena.reshape(1, 3, 4, 4).contiguous(memory_format=torch.channels_last),
        "d": arena,
    }
    back = tree.unpack(tree.pack(value))
    assert same(back, {name: tensor.contiguous() for name, tensor in value.items()})


@pytest.mark.parametrize("copied", [tree.clone, tree.as_sent])
def test_copies_have_the_layout_of_a_file(copied):
    value = {
        "a": torch.arange(6.0).reshape(2, 3).T,
        "b": [torch.ones(1).expand(4), torch.ones(2, requires_grad=True)],
    }
    made, stored = copied(value), tree.unpack(tree.pack(value))
    assert same(made, stored)
    for here, there in zip(tree.leaves(made), tree.leaves(stored), strict=True):
        assert (here.stride(), here.requires_grad) == (there.stride(), False)


def test_numbers_as_sent_have_the_types_of_a_file():
    value = {"a": np.float64(0.5), "b": [np.float64(2.0), 3, True, "text", None]}
    made, stored = tree.as_sent(value), tree.unpack(tree.pack(value))
    assert same(made, stored)
    assert [type(made["a"]), *map(type, made["b"])] == [float, float, int, bool, str, type(None)]


def test_a_tensor_in_several_places_is_stored_once():
    big = torch.ones(1000)
    assert len(tree.pack({"a": big, "b": [big, big]})) < 2 * big.numel() * 4


def test_equal_trees_give_equal_bytes_in_any_process():
    program = (
        "import sys, torch; from atoll.core import tree;"
        "value = {'x': torch.arange(3.), 'deep': {'y': 1.5, 'z': [torch.ones(2), None]}};"
        "sys.stdout.buffer.write(tree.pack(value))"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1


def test_bytes_on_the_wire():
    value = {"w": torch.zeros(3, 4), "n": 5, "none": None, "list": [torch.zeros(2, dtype=torch.int64)]}
    assert tree.num_bytes(value) == 3 * 4 * 4 + 8 + 16


@pytest.mark.parametrize("damage", [b"", b"hello", None])
def test_what_is_no_tree_is_refused_in_a_sentence(tmp_path, damage):
    path = tmp_path / "x.safetensors"
    path.write_bytes(tree.pack({"a": torch.ones(3)})[:-4] if damage is None else damage)
    with pytest.raises(UserError, match="damaged or not written by Atoll"):
        tree.load(path)


def test_another_programs_safetensors_are_refused(tmp_path):
    import safetensors.torch

    path = tmp_path / "x.safetensors"
    safetensors.torch.save_file({"a": torch.ones(2)}, path)
    with pytest.raises(UserError):
        tree.load(path)


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "x"
    tree.write_whole(path, b"old")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="the disk is full"):
        tree.write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]


def synced(monkeypatch, path):
    """Which files and folders are synced from now on, each with whether ``path`` had its name by then."""
    seen, sync = [], os.fsync

    def fsync(descriptor):
        seen.append((os.fstat(descriptor).st_ino, path.exists()))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    return seen


def test_a_files_name_outlives_a_power_cut_and_so_do_its_new_folders(tmp_path, monkeypatch):
    path = tmp_path / "clients" / "000003" / "x"
    seen = synced(monkeypatch, path)
    tree.write_whole(path, b"new")
    folders = [path.parent, path.parent.parent, tmp_path]
    assert seen == [(path.stat().st_ino, False), *((folder.stat().st_ino, True) for folder in folders)]
    del seen[:]
    tree.write_whole(path, b"newer")
    assert [inode for inode, _ in seen] == [path.stat().st_ino, path.parent.stat().st_ino]


def test_where_folders_cannot_be_opened_or_synced_files_are_written_all_the_same(tmp_path, monkeypatch):
    sync = os.fsync

    def no_folders(path, *_, **__):
        raise PermissionError(13, "Permission denied")

    def files_only(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(22, "Invalid argument")
        sync(descriptor)

    monkeypatch.setattr(os, "open", no_folders)
    tree.write_whole(tmp_path / "x", b"one")
    monkeypatch.undo()
    monkeypatch.setattr(os, "fsync", files_only)
    tree.write_whole(tmp_path / "y", b"two")
    assert (tmp_path / "x").read_bytes() + (tmp_path / "y").read_bytes() == b"onetwo"


@pytest.mark.parametrize("depth", [60, 200, 2_000, 200_000])
@pytest.mark.parametrize("where", ["header", "structure"])
def test_bytes_that_nest_too_deeply_are_a_value_error(depth, where):
    deep = "[" * depth + "]" * depth
    structure = json.dumps({"__metadata__": {"atoll": deep}})
    header = (structure if where == "structure" else structure[:-1] + f', "x": {deep}' + "}").encode()
    data = len(header).to_bytes(8, "little") + header
    if where == "structure" and depth == 60:
        assert same(tree.unpack(data), json.loads(deep))
        return
    with pytest.raises(ValueError, match="these bytes are not a tree"):
        tree.unpack(data)


def test_one_metadata_key():
    data = tree.pack({"a": torch.ones(1)})
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert len(header["__metadata__"]) == 1


def test_a_text_has_the_bytes_of_its_letters():
    assert tree.num_bytes({"key": "ε" * 10, "numbers": [1, 2.5, True], "nothing": None}) == 20 + 3 * 8
    assert tree.named_bytes({"keys": {"mask": "a" * 88}}) == {"keys.mask": 88}
