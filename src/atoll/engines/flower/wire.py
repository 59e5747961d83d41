"""Trees in Flower's messages.

A tree travels as the bytes of `atoll.tree.pack`: safetensors, which hold no code and keep every dtype to the bit.
Each top-level entry that holds tensors is an Array of its own, the rest is one more. Flower cuts arrays into pieces
named by their hash, stores a piece once and sends it once: the models of a round, which all clients get, cost the
server one copy, however many clients there are. One Array for each tensor would do so too, at a request a tensor;
a small network of 100 tensors would need 100 requests where one does.
"""

from __future__ import annotations

from flwr.app import Array, ArrayRecord, RecordDict

from atoll.tree import Tree, leaves, pack, unpack

RECORD = "atoll"
REST = "."  # the entries without tensors
STYPE = "atoll.tree.safetensors"


class Encoder:
    """Makes records of trees; what several trees have in common is packed once."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, ...], tuple[Tree, Array]] = {}

    def records(self, tree: dict[str, Tree]) -> RecordDict:
        """A tree, which must be a dict, as the content of a message."""
        arrays: dict[str, Array] = {}
        rest: dict[str, Tree] = {}
        for name, value in tree.items():
            tensors = list(leaves(value))
            if not tensors:
                rest[name] = value
                continue
            key = (id(value), *map(id, tensors))
            if key not in self._made:
                self._made[key] = (value, _array(value))  # the value is held, so that its id stays its own
            arrays[name] = self._made[key][1]
        return RecordDict({RECORD: ArrayRecord({REST: _array(rest), **arrays})})


def records(tree: dict[str, Tree]) -> RecordDict:
    """One tree as the content of a message."""
    return Encoder().records(tree)


def tree(content: RecordDict) -> dict[str, Tree]:
    """The tree that `records` wrote.

    Raises:
        ValueError: the content is something else.
    """
    try:
        arrays = dict(content.array_records[RECORD])
        made: dict[str, Tree] = dict(unpack(bytes(arrays.pop(REST).data)))
        return {**made, **{name: unpack(bytes(array.data)) for name, array in arrays.items()}}
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"the message holds no tree: {error!r}") from None


def _array(value: Tree) -> Array:
    data = pack(value)
    return Array(dtype="uint8", shape=(len(data),), stype=STYPE, data=data)
