"""Trees in Flower's messages."""

from __future__ import annotations

import weakref

import pytest

pytest.importorskip("flwr", reason="the extra atoll[flower] is not installed")

import safetensors.torch
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from atoll.core.tree import pack
from atoll.engines.flower.codec import RECORD, REST, Encoder, records, tree
from atoll.engines.update_checks import SizeLimit
from tests.trees import same

TREE = {
    "round": 3,
    "none": None,
    "words": ["a", "β"],
    "models": {"global": {"w": torch.randn(3, 4), "n": torch.tensor(7), "empty": torch.zeros(0, 2)}},
    "parts": {
        "x": [torch.tensor([True]), {"half": torch.randn(5).half(), "brain": torch.randn(5).bfloat16()}]
    },
}


def made_of(rest, *named):
    """What a stranger may send: a tree with references to what is not there, or not a tree at all."""
    trees = {REST: rest, **dict(zip(named[::2], named[1::2], strict=True))}
    packed = {name: pack(value) for name, value in trees.items()}
    found = {name: Array("uint8", (len(data),), "x", data) for name, data in packed.items()}
    return RecordDict({RECORD: ArrayRecord(found)})


def nested(levels):
    value = 1
    for _ in range(levels):
        value = [value]
    return value


def deeper_than_the_stack():
    deep = "[" * 100_000 + "]" * 100_000
    data = safetensors.torch.save({}, metadata={"atoll": deep})
    return RecordDict({RECORD: ArrayRecord({REST: Array("uint8", (len(data),), "x", data)})})


def test_a_tree_comes_back_to_the_bit_through_flowers_own_bytes():
    made = records(TREE)
    record = made.array_records[RECORD]
    for array in record.values():
        assert not array.data.startswith(b"\x80")  # a pickle's first byte
        assert b"".join(bytes(piece.data) for _, piece in array.slice_array()) == array.data
    assert same(tree(made), TREE)


def arrays(content):
    return [array for name, array in content.array_records[RECORD].items() if name != REST]


def test_what_messages_have_in_common_is_one_object():
    """Deep in the tree, too, and whatever stands beside it."""
    encoder = Encoder()
    models = {"global": {"w": torch.randn(1000)}}
    control = {"w": torch.randn(1000)}

    def message(k):
        retained = {"rows": torch.full((4, 3), float(k)), "share": k}
        return {"client": k, "message": {"models": models, "parts": {"control": control, "own": retained}}}

    first, second = (arrays(encoder.records(message(k))) for k in range(2))
    assert [a is b for a, b in zip(first, second, strict=True)] == [True, True, False]
    other = arrays(Encoder().records(message(0)))
    assert [array.object_id for array in other] == [
        array.object_id for array in first
    ]  # Flower stores it once
    assert same(tree(Encoder().records(message(1))), message(1))


def test_what_only_an_earlier_message_held_is_let_go():
    encoder = Encoder()
    model = {"w": torch.randn(10)}
    held = []
    for k in range(5):
        retained = torch.full((1000,), float(k))
        held.append(weakref.ref(retained))
        encoder.records({"model": model, "own": {"rows": retained}})
        del retained
    assert [one() is None for one in held] == [True, True, True, True, False]


@pytest.mark.parametrize(
    "content",
    [
        RecordDict(),
        RecordDict({RECORD: ConfigRecord({"a": 1})}),
        RecordDict({RECORD: ArrayRecord({REST: Array("uint8", (3,), "x", b"abc")})}),
        RecordDict({RECORD: ArrayRecord({"models": Array("uint8", (3,), "x", b"abc")})}),
        made_of([1, 2]),
        made_of({"weights": {"→": [0, 0]}}),
        made_of({"weights": {"→": [0, 7]}}, "0", [torch.zeros(1)]),
        made_of({"weights": {"→": ["a", "b", "c"]}}),
        made_of({"weights": {"→": None}}),
        made_of({"weights": {"→": [0, 0]}}, "0", [nested(50)]),
        made_of(
            {"weights": {"→": [0, [0, 0, 0]]}}, "0", torch.zeros(1, 5)
        ),  # would be three copies of the row
        made_of({"weights": {"→": [0, 0]}}, "0", torch.zeros(1, 5)),
        made_of({"weights": {"→": [0, True]}}, "0", [torch.zeros(1), torch.zeros(1)]),
        made_of({"deep": nested(150)}),
        deeper_than_the_stack(),
    ],
)
def test_anything_else_is_a_value_error(content):
    with pytest.raises(ValueError, match="tree"):
        tree(content)


def test_a_message_that_is_larger_than_allowed_is_not_decoded(monkeypatch):
    sent = {"update": {"weights": {"w": torch.zeros(1000)}}}
    content = records(sent)
    size = sum(len(array.data) for array in content.array_records["atoll"].values())
    assert same(tree(content, SizeLimit(size, size)), sent)
    monkeypatch.setattr("atoll.engines.flower.codec.unpack", lambda data: pytest.fail("it was decoded"))
    with pytest.raises(
        ValueError, match=rf"it has {size:,} bytes, and answers in this run have at most {size - 1:,}"
    ):
        tree(content, SizeLimit(size - 1, size))


def test_many_small_tensors_are_not_decoded(monkeypatch):
    """As many bytes as one honest update has take far longer in 5,000 tensors."""
    limit = SizeLimit(1_000_000, 100_000)
    assert tree(records({"w": torch.zeros(200_000)}), limit)
    many = records({"w": [torch.zeros(16) for _ in range(5_000)]})
    monkeypatch.setattr("atoll.engines.flower.codec.unpack", lambda data: pytest.fail("it was decoded"))
    with pytest.raises(ValueError, match=r"its names and shapes have [\d,]+ bytes, and .* at most 100,000"):
        tree(many, limit)
    lying = Array("uint8", (12,), "x", b"\xff" * 8 + b"{}  ")
    with pytest.raises(ValueError, match="at most 100,000"):
        tree(RecordDict({RECORD: ArrayRecord({REST: lying})}), limit)
