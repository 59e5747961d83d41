"""Trees in Flower's messages.

A tree travels as the bytes of `atoll.core.tree.pack`: safetensors, which hold no code and keep every dtype to the
bit. The tensors that lie in one dict, in its lists too, are an Array of their own: a model is one, and so is what a
component of the method sends. The rest is one more: the tree itself, with a reference in each tensor's place.
Flower cuts arrays into pieces named by their hash, stores a piece once and sends it once: the models of a round,
which all clients get, cost the server one copy, however many clients there are and whatever else each of them gets.
One Array for each tensor would do so too, at a request a tensor; a small network of 100 tensors would need 100
requests where one does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from flwr.app import Array, ArrayRecord, RecordDict
from torch import Tensor

from atoll.core.tree import Tree, pack, resolve, unpack

RECORD = "atoll"
REST = "."  # the tree without its tensors
STYPE = "atoll.core.tree.safetensors"
_REF = "→"  # marks a tensor's place; then come its Array and which of that Array's tensors it is

_Key = tuple[int, ...]  # the identities of an Array's tensors


class Encoder:
    """Makes records of trees; what a tree has in common with the one before it is not packed again."""

    def __init__(self) -> None:
        self._made: dict[
            _Key, tuple[list[Tensor], Array]
        ] = {}  # tensors are held, so that ids stay their own

    def records(self, tree: dict[str, Tree]) -> RecordDict:
        """A tree, which must be a dict, as the content of a message."""
        groups: dict[_Key, list[Tensor]] = {}
        rest = _without_tensors(tree, groups, ())
        # Only this tree's: what a single client gets must not be held until all have theirs.
        self._made = {
            key: self._made.get(key) or (tensors, _array(tensors)) for key, tensors in groups.items()
        }
        record = ArrayRecord()  # which would copy what it is made of, and so have it hashed once more
        record[REST] = _array(rest)
        for number, (_, array) in enumerate(self._made.values()):
            record[str(number)] = array
        return RecordDict({RECORD: record})


def records(tree: dict[str, Tree]) -> RecordDict:
    """One tree as the content of a message."""
    return Encoder().records(tree)


def tree(content: RecordDict, most_bytes: int | None = None) -> dict[str, Tree]:
    """The tree that `records` wrote.

    Args:
        content: of a message.
        most_bytes: a larger one is not read.

    Raises:
        ValueError: the content is something else, or too large.
    """
    size = sum(len(array.data) for array in content.array_records.get(RECORD, {}).values())
    if most_bytes is not None and size > most_bytes:
        raise ValueError(
            f"it has {size:,} bytes, and what this run's method declares has {most_bytes:,} at most"
        )
    try:
        arrays = {name: unpack(bytes(array.data)) for name, array in content.array_records[RECORD].items()}
        made = resolve(arrays.pop(REST), _REF, lambda place: _tensor(arrays, *place))
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"the message holds no tree: {error!r}") from None
    if not isinstance(made, dict):
        raise ValueError("the message holds no tree: it is not a dict")
    return made


def _without_tensors(tree: Tree, groups: dict[_Key, list[Tensor]], key: _Key) -> Tree:
    """The tree with references in its tensors' places; ``key`` is of the dict around it, ``groups`` are filled."""
    if isinstance(tree, Tensor):
        return {_REF: [list(groups).index(key), key.index(id(tree))]}
    if isinstance(tree, Mapping):
        near = list(_near(tree.values()))
        key = tuple(map(id, near))
        if near:
            groups.setdefault(key, near)
        return {name: _without_tensors(value, groups, key) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_without_tensors(value, groups, key) for value in tree]
    return tree


def _near(values: Iterable[Tree]) -> Iterator[Tensor]:
    """The tensors among a dict's values and in lists there, but not those in further dicts."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _near(value)


def _tensor(arrays: Mapping[str, list[Tensor]], array: int, place: int) -> Tensor:
    found = arrays[str(array)][place]
    if not isinstance(found, Tensor):  # a tree in its place could be of any depth
        raise TypeError(f"place {place} of array {array} holds no tensor")
    return found


def _array(value: Tree) -> Array:
    data = pack(value)
    return Array(dtype="uint8", shape=(len(data),), stype=STYPE, data=data)
