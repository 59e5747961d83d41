"""Trees in Flower's messages."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="the extra atoll[flower] is not installed")

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from atoll.engines.flower.wire import RECORD, REST, Encoder, records, tree
from atoll.tree import same

TREE = {
    "round": 3,
    "none": None,
    "words": ["a", "β"],
    "models": {"global": {"w": torch.randn(3, 4), "n": torch.tensor(7), "empty": torch.zeros(0, 2)}},
    "parts": {
        "x": [torch.tensor([True]), {"half": torch.randn(5).half(), "brain": torch.randn(5).bfloat16()}]
    },
}


def test_a_tree_comes_back_to_the_bit_through_flowers_own_bytes():
    made = records(TREE)
    record = made.array_records[RECORD]
    for array in record.values():
        assert not array.data.startswith(b"\x80")  # a pickle's first byte
        assert b"".join(bytes(piece.data) for _, piece in array.slice_array()) == array.data
    assert same(tree(made), TREE)


def test_what_messages_have_in_common_is_one_object():
    encoder = Encoder()
    models = {"global": {"w": torch.randn(1000)}}
    first, second = (encoder.records({"models": models, "client": k}) for k in range(2))
    arrays = [content.array_records[RECORD]["models"] for content in (first, second)]
    assert arrays[0].data is arrays[1].data
    other = Encoder().records({"models": models, "client": 0}).array_records[RECORD]["models"]
    assert other.object_id == arrays[0].object_id  # equal trees are equal bytes, which Flower stores once


@pytest.mark.parametrize(
    "content",
    [
        RecordDict(),
        RecordDict({RECORD: ConfigRecord({"a": 1})}),
        RecordDict({RECORD: ArrayRecord({REST: Array("uint8", (3,), "x", b"abc")})}),
        RecordDict({RECORD: ArrayRecord({"models": Array("uint8", (3,), "x", b"abc")})}),
    ],
)
def test_anything_else_is_a_value_error(content):
    with pytest.raises(ValueError, match="tree"):
        tree(content)
