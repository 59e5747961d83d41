"""Codec between trees and Flower's messages.

A tree is encoded by `atoll.core.tree.pack` as safetensors, which contain no code and preserve every dtype bit by
bit. The tensors in one dict, including those in its lists, form one Array: for example a model, or the slice of a
component. A further Array contains the tree itself, with a reference in place of each tensor. Flower splits arrays
into pieces named by their hash, and stores and sends each piece once. The models of a round, which all clients
receive, therefore cost the server one copy, regardless of the number of clients and of the rest of each message.
One Array for each tensor would have the same effect, but take one request per tensor: 100 requests for a small
network of 100 tensors, instead of one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from flwr.app import Array, ArrayRecord, RecordDict
from torch import Tensor

from atoll.core.tree import Tree, escape, header_bytes, pack, resolve, unpack
from atoll.engines.flower.wire_limit import TooLargeError
from atoll.engines.update_checks import SizeLimit

RECORD = "atoll"
REST = "."  # the tree without its tensors
STYPE = "atoll.core.tree.safetensors"
_REF = "→"  # marks the place of a tensor; its value is the number of the Array, and the tensor's index in it

_Key = tuple[int, ...]  # ids of the tensors in an Array


class Encoder:
    """Encodes trees as records; Arrays shared with the previous tree are not packed again."""

    def __init__(self) -> None:
        # References to the tensors, so that their ids remain unique.
        self._arrays: dict[_Key, tuple[list[Tensor], Array]] = {}

    def records(self, tree: dict[str, Tree]) -> RecordDict:
        """Encode a tree, which must be a dict, as the content of a message."""
        groups: dict[_Key, list[Tensor]] = {}
        rest = _without_tensors(escape(tree, _REF), groups, ())
        # Only the Arrays of this tree, so that one client's Arrays are released when the next message is encoded.
        self._arrays = {
            key: self._arrays.get(key) or (tensors, _array(tensors)) for key, tensors in groups.items()
        }
        # Filled by key, because the constructor copies arrays, which would then be hashed again.
        record = ArrayRecord()
        record[REST] = _array(rest)
        for number, (_, array) in enumerate(self._arrays.values()):
            record[str(number)] = array
        return RecordDict({RECORD: record})


def records(tree: dict[str, Tree]) -> RecordDict:
    """Encode one tree as the content of a message."""
    return Encoder().records(tree)


def tree(content: RecordDict, limit: SizeLimit | None = None) -> dict[str, Tree]:
    """Decode a tree that `records` encoded.

    Args:
        content: The content of a message.
        limit: Largest size that is decoded; None for no limit.

    Raises:
        ValueError: The content is not a tree, or is too large.
    """
    try:
        record = content.array_records[RECORD]
        if limit is not None:
            _check_size([array.data for array in record.values()], limit)
        arrays = {name: unpack(bytes(array.data)) for name, array in record.items()}
        made = resolve(arrays.pop(REST), _REF, lambda place: _tensor(arrays, *place))
    except TooLargeError as error:
        raise ValueError(str(error)) from None
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"the message contains no tree: {error!r}") from None
    if not isinstance(made, dict):
        raise ValueError("the message contains no tree: it is not a dict")
    return made


def _without_tensors(tree: Tree, groups: dict[_Key, list[Tensor]], key: _Key) -> Tree:
    """Replace tensors by references; ``key`` is that of the enclosing dict, and ``groups`` collects the tensors."""
    if isinstance(tree, Tensor):
        return {_REF: [list(groups).index(key), key.index(id(tree))]}
    if isinstance(tree, Mapping):
        direct = list(_direct_tensors(tree.values()))
        key = tuple(map(id, direct))
        if direct:
            groups.setdefault(key, direct)
        return {name: _without_tensors(value, groups, key) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_without_tensors(value, groups, key) for value in tree]
    return tree


def _direct_tensors(values: Iterable[Tree]) -> Iterator[Tensor]:
    """Tensors among a dict's values and in lists there, but not those in nested dicts."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _direct_tensors(value)


def _check_size(data: list[bytes], limit: SizeLimit) -> None:
    size, headers = sum(map(len, data)), sum(map(header_bytes, data))
    if size > limit.total:
        raise TooLargeError(f"it has {size:,} bytes, and answers in this run have at most {limit.total:,}")
    if headers > limit.headers:
        raise TooLargeError(
            f"its names and shapes have {headers:,} bytes, and in this run at most {limit.headers:,}"
        )


def _tensor(arrays: Mapping[str, Tree], array: object, place: object) -> Tensor:
    tensors = arrays[str(array)]
    # Indexing a tensor by a list copies a row for each entry: a small answer could fill the memory.
    if not isinstance(tensors, list) or type(place) is not int:
        raise TypeError(f"array {array} is not a list of tensors, or place {place} is no number")
    found = tensors[place]
    if not isinstance(found, Tensor):  # a tree in place of a tensor could have any depth
        raise TypeError(f"place {place} of array {array} contains no tensor")
    return found


def _array(value: Tree) -> Array:
    data = pack(value)
    return Array(dtype="uint8", shape=(len(data),), stype=STYPE, data=data)
