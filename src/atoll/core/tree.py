"""Plain trees of tensors and numbers: the format of server state, messages, updates and client state.

A tree is a dict with string keys, a list, a tensor, a number, a string, a bool or None. It is sent and stored as
safetensors: the tensors unchanged, the structure as JSON in the metadata. Nothing is ever pickled. In a file, the
structure follows the file's digest (`atoll.core.digests`); a tree in transit has none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from atoll.core.digests import DIGITS, seal_at, verify_at
from atoll.core.errors import UserError
from atoll.core.files import write_whole
from atoll.core.tensor_file import can_store, serialise

Tree = Any  # dict[str, Tree] | list[Tree] | Tensor | int | float | str | bool | None
Weights = dict[str, Tensor]

# The only metadata key: the header's map has no stable order, so two would break byte identity.
_KEY = "atoll"
FILE_KEY = "atoll-file"  # the only metadata key of a file
_MARKER = f'"{FILE_KEY}":"'.encode()  # precedes the digest in a file's header
_END = "|"  # follows the label
_WITHIN = 64  # first bytes of a file that contain the marker
_REF = "§"  # marks the position of a tensor in the structure
_MAX_DEPTH = 64  # levels of a tree that is read, so that recursive functions do not exhaust the stack


def leaves(tree: Tree) -> Iterator[Tensor]:
    """Iterate over the tensors of a tree, in the order of the tree."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from leaves(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from leaves(value)


def map_tensors(function: Callable[[Tensor], Any], tree: Tree) -> Tree:
    """Return the same tree with every tensor replaced by ``function(tensor)``."""
    return _map_leaves(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, tree)


def _map_leaves(function: Callable[[Any], Any], tree: Tree) -> Tree:
    if isinstance(tree, Mapping):
        return {key: _map_leaves(function, value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_map_leaves(function, value) for value in tree]
    return function(tree)


def as_sent(tree: Tree) -> Tree:
    """Return a tree as it arrives from a message or a file: contiguous tensors without a graph, plain numbers.

    Sums and products of tensors with another layout, such as transposed ones, have other last bits. NumPy's float64
    is a subclass of float.
    """

    def sent(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.detach().contiguous()
        return float(leaf) if isinstance(leaf, float) else leaf

    return _map_leaves(sent, tree)


def checked(slices: dict[str, Tree], hook: str) -> dict[str, Tree]:
    """Check that a file can hold the slices that a hook of several components returned; return them as sent.

    Keys that are not texts would become texts in a file or a message, and would no longer be found.

    Raises:
        UserError: A slice is not such a tree.
    """
    for name, tree in slices.items():
        if (found := _no_tree(tree)) is not None:
            raise UserError(
                f"{name!r}.{hook} returns {found}; states and messages are made of tensors, numbers, texts, lists, "
                "and dicts whose keys are texts, such as str(client)"
            )
    return {name: as_sent(tree) for name, tree in slices.items()}


def _no_tree(tree: Tree) -> str | None:
    """Name the first part of a value that a tree cannot contain; None if there is none."""
    if isinstance(tree, Tensor):
        return (
            None if can_store(tree) else f"a tensor of {tree.layout} and {tree.dtype}, which no file can hold"
        )
    if isinstance(tree, Mapping):
        wrong = next((key for key in tree if not isinstance(key, str)), None)
        if wrong is not None:
            return f"a dict with the key {wrong!r}, of type {type(wrong).__name__}"
        return next((found for value in tree.values() if (found := _no_tree(value)) is not None), None)
    if isinstance(tree, list | tuple):
        return next((found for value in tree if (found := _no_tree(value)) is not None), None)
    return None if tree is None or isinstance(tree, int | float | str) else f"a {_type_name(tree)}"


def _type_name(value: object) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def num_bytes(tree: Tree) -> int:
    """Size of a tree in transfer: the bytes of its tensors and of its texts in UTF-8, and 8 for every number."""
    if isinstance(tree, Tensor):
        return tree.numel() * tree.element_size()
    if isinstance(tree, Mapping):
        return sum(map(num_bytes, tree.values()))
    if isinstance(tree, list | tuple):
        return sum(map(num_bytes, tree))
    if isinstance(tree, str):
        return len(tree.encode(errors="replace"))
    return 0 if tree is None else 8


def named_bytes(tree: Tree) -> dict[str, int]:
    """Size in transfer of each tensor and number of a tree, by its place: names joined by dots.

    Example:
        >>> import torch
        >>> from atoll.core.tree import named_bytes
        >>> named_bytes({"weights": {"a": torch.zeros(3)}, "samples": 40})
        {'weights.a': 12, 'samples': 8}
    """
    return {".".join(place): size for place, size in placed_bytes(tree)}


def placed_bytes(tree: Tree, place: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], int]]:
    """Iterate over the size in transfer of each tensor and number of a tree, with the names that lead to it."""
    if isinstance(tree, Mapping):
        pairs: Iterable[tuple[object, Tree]] = tree.items()
    elif isinstance(tree, list | tuple):
        pairs = enumerate(tree)
    else:
        if tree is not None:
            yield place, num_bytes(tree)
        return
    for key, value in pairs:
        yield from placed_bytes(value, (*place, str(key)))


def clone(tree: Tree) -> Tree:
    """Deep copy on the CPU, of contiguous tensors, that shares no memory with the original."""
    layout = torch.contiguous_format
    return map_tensors(lambda tensor: tensor.detach().to("cpu", copy=True, memory_format=layout), tree)


def marks(tree: Tree) -> Tree:
    """Replace tensors by their identity and the number of their changes: equal marks, unchanged tree."""
    return _map_leaves(lambda leaf: (id(leaf), leaf._version) if isinstance(leaf, Tensor) else leaf, tree)


def pack(tree: Tree) -> bytes:
    """Serialise a tree; equal trees give equal bytes. A tensor that occurs several times is stored once."""
    structure, tensors = _split(tree)
    return b"".join(serialise(tensors, {_KEY: structure}))


def unpack(data: bytes) -> Tree:
    """Deserialise a tree that `pack` wrote.

    Raises:
        ValueError: The bytes are not such a tree.
    """
    return _read(data, _KEY)[0]


def header_bytes(data: bytes) -> int:
    """Size of the header before the tensors' values in the bytes of a tree, as the bytes themselves state it."""
    return 8 + int.from_bytes(data[:8], "little")


def save(path: Path, tree: Tree, label: str = "", shared: bool = False, synced: bool = True) -> None:
    """Write a tree to a file atomically, with a digest.

    Args:
        path: Path of the file.
        tree: The tree.
        label: Words that identify the file's content, so that a file in the place of another is detected.
        shared: Whether several processes may write the file at the same time.
        synced: Whether to wait until the file is on the disk.
    """
    structure, tensors = _split(tree)
    value = f"{'0' * DIGITS}{label}{_END}{structure}"
    write_whole(path, seal_at(serialise(tensors, {FILE_KEY: value}), _MARKER), shared, synced)


def load(path: Path, label: str | None = None) -> Tree:
    """Read a tree from a file that `save` wrote; a file of Atoll 0.1 has no digest and is read unverified.

    Args:
        path: Path of the file.
        label: The label that the file must have, if it has one; None for any.

    Raises:
        UserError: The file is missing or damaged, has another label, or was not written by Atoll.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    return read(data, str(path), label)


def read(data: bytes, place: str, label: str | None = None) -> Tree:
    """Read a tree from the bytes of a file that `save` wrote.

    Args:
        data: The bytes.
        place: Where they come from, for the error message.
        label: The label that they must have, if they have one; None for any.

    Raises:
        UserError: The bytes are damaged, have another label, or were not written by Atoll.
    """
    try:
        if not sealed(data):
            return unpack(data)
        verify_at(data, _MARKER)
        tree, found = _read(data, FILE_KEY)
    except ValueError as error:
        raise UserError(f"{place} is damaged or not written by Atoll: {error}") from None
    if label is not None and found not in ("", label):
        raise UserError(f"{place} is a file from elsewhere ({found}), not the {label}")
    return tree


def sealed(data: bytes) -> bool:
    """Whether the bytes of a tree's file, or the first 64 of them, show a digest."""
    return _MARKER in data[:_WITHIN]


def _read(data: bytes, key: str) -> tuple[Tree, str]:
    """Deserialise the tree whose structure is in the metadata under a key; return also the file's label."""
    try:
        header_size = int.from_bytes(data[:8], "little")
        value = json.loads(data[8 : 8 + header_size])["__metadata__"][key]
        label, _, structure = value[DIGITS:].partition(_END) if key == FILE_KEY else ("", "", value)
        tensors = safetensors.torch.load(data)
        return resolve(json.loads(structure), _REF, tensors.__getitem__), label
    except (KeyError, RecursionError, TypeError, safetensors.SafetensorError, ValueError) as error:
        raise ValueError(f"these bytes are not a tree of tensors: {error}") from None


def _split(tree: Tree) -> tuple[str, Weights]:
    tensors: Weights = {}
    places: dict[int, str] = {}

    def place(tensor: Tensor) -> dict[str, str]:
        if id(tensor) not in places:
            places[id(tensor)] = str(len(tensors))
            tensors[str(len(tensors))] = tensor.detach().cpu().contiguous()
        return {_REF: places[id(tensor)]}

    structure = json.dumps(map_tensors(place, escape(tree, _REF)), separators=(",", ":"))
    return structure, tensors


def escape(tree: Tree, mark: str) -> Tree:
    """Add a mark to each dict's only key if it consists of marks, so that it is not mistaken for a reference.

    Args:
        tree: The tree.
        mark: The key, of one character, that will mark a tensor; see `resolve`.
    """
    if isinstance(tree, Mapping):
        lone = len(tree) == 1
        return {
            key + mark if lone and _all_marks(key, mark) else key: escape(value, mark)
            for key, value in tree.items()
        }
    if isinstance(tree, list | tuple):
        return [escape(value, mark) for value in tree]
    return tree


def _all_marks(key: object, mark: str) -> bool:
    return isinstance(key, str) and key != "" and not key.strip(mark)


def resolve(structure: Tree, mark: str, find: Callable[[Any], Tensor], depth: int = 0) -> Tree:
    """Build the tree that a structure describes, in which ``{mark: place}`` stands for the tensor ``find(place)``.

    Args:
        structure: JSON values, made from a tree that `escape` returned.
        mark: The key that marks a tensor, of one character.
        find: Returns the tensor for a place.
        depth: Depth of the structure in the whole tree.

    Raises:
        ValueError: The structure is nested too deeply.
    """
    if depth > _MAX_DEPTH:
        raise ValueError(f"it nests more than {_MAX_DEPTH} levels deep")
    if isinstance(structure, dict):
        if structure.keys() == {mark}:
            return find(structure[mark])
        if len(structure) == 1 and _all_marks(key := next(iter(structure)), mark):
            structure = {key[:-1]: structure[key]}
        return {key: resolve(value, mark, find, depth + 1) for key, value in structure.items()}
    if isinstance(structure, list):
        return [resolve(value, mark, find, depth + 1) for value in structure]
    return structure
