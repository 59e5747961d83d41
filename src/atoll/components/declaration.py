"""Declarations of the slices that components send: names, shapes, dtypes and ranges.

One declaration (`Component.declares`) serves three purposes: the check of clients' slices (`mismatch`), the list of
the data that leaves a client (`declared_leaves`), and the maximum size of an update on the wire (`max_bytes`). A
declaration is a spec, a mapping of names to specs, or a tuple of specs:

    TensorSpec((UpTo(128), setting.embedding_dim), unit_rows=True)       up to 128 normalised embeddings
    {"mean": TensorSpec((8,)), "count": NumberSpec(int, least=0)}        exactly these two entries
    PerWeight(without=setting.buffers)                                   a tensor like each trained weight
    Optional(ChoiceSpec(("left", "right")))                              a word, or nothing
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from atoll.core.text import short
from atoll.core.tree import Tree, Weights

LARGEST = 1e30  # maximum number that a client may send: sums of such numbers are finite in float32
MOST_IMAGES = 20_000_000  # maximum number of images of one client: ImageNet-21k has 14 million
NUMBER_BYTES = 8  # size of a number, as `num_bytes` counts it
LEAF_BYTES = 512  # size of a tensor's or a number's entry in the headers and in their JSON, without names
NAME_BYTES = 12  # size of one character of a name, which occurs at most twice in JSON


@dataclass(frozen=True)
class UpTo:
    """A size from 1 to ``most``.

    Attributes:
        most: Maximum size.
    """

    most: int

    def __str__(self) -> str:
        return f"1 to {self.most}"


@dataclass(frozen=True)
class TensorSpec:
    """A tensor with finite values.

    Attributes:
        shape: A size, or a range of sizes, for each dimension.
        dtype: Data type of the values.
        least: Minimum value.
        most: Maximum value.
        unit_rows: Whether rows (along the last dimension) must have length 1, within 1e-3.
        follows_embeddings: The scale is that of embeddings, which training may change by orders of magnitude: the
            update checks bound the norm by 10⁶, or by earlier rounds if these have more.
    """

    shape: tuple[int | UpTo, ...]
    dtype: torch.dtype = torch.float32
    least: float = -math.inf
    most: float = math.inf
    unit_rows: bool = False
    follows_embeddings: bool = False

    def mismatch(self, value: Tree, place: str) -> str | None:
        """Describe how a value differs from this spec; None if it matches."""
        return self.form_mismatch(value, place) or self._value_mismatch(value, place)

    def form_mismatch(self, value: Tree, place: str) -> str | None:
        """Describe how a value's shape or dtype differs from this spec, without reading the values."""
        if not isinstance(value, Tensor):
            return f"{place} is {_short(value)}, not a tensor of shape {_shape(self.shape)}"
        if value.shape != self.shape and not _fit(value.shape, self.shape):  # most have fixed sizes
            return f"{place} has shape {_shape(value.shape)}, not {_shape(self.shape)}"
        if value.dtype != self.dtype:
            return f"{place} is {value.dtype}, not {self.dtype}"
        return None

    def _value_mismatch(self, value: Tensor, place: str) -> str | None:
        if value.is_floating_point() and not torch.isfinite(value.sum()):
            return f"{place} holds values that are not finite, or that overflow"
        bounded = value.numel() and (self.least > -math.inf or self.most < math.inf)
        if bounded and not (self.least <= value.min().item() and value.max().item() <= self.most):
            return f"{place} holds values outside [{_number(self.least)}, {_number(self.most)}]"
        if self.unit_rows and not bool((torch.linalg.vector_norm(value, dim=-1) - 1).abs().max() < 1e-3):
            return f"{place} holds rows that are not normalised"
        return None

    @property
    def largest(self) -> tuple[int, ...]:
        """The largest shape."""
        return tuple(size.most if isinstance(size, UpTo) else size for size in self.shape)

    @property
    def num_bytes(self) -> int:
        """Size of the values of the largest tensor."""
        return math.prod(self.largest) * self.dtype.itemsize

    @property
    def max_bytes(self) -> int:
        """Size of the largest tensor on the wire."""
        return LEAF_BYTES + self.num_bytes


@dataclass(frozen=True)
class NumberSpec:
    """A number.

    Attributes:
        kind: ``int`` or ``float``.
        least: Minimum value.
        most: Maximum value.
    """

    kind: type[int] | type[float] = float
    least: float = -LARGEST
    most: float = LARGEST
    num_bytes: ClassVar[int] = NUMBER_BYTES

    def mismatch(self, value: Tree, place: str) -> str | None:
        """Describe how a value differs from this spec; None if it matches."""
        if type(value) is not self.kind or not self.least <= value <= self.most:
            least, most = _number(self.least), _number(self.most)
            kind = "an int" if self.kind is int else "a float"
            return f"{place} is {_short(value)}, not {least if least == most else f'{kind} from {least} to {most}'}"
        return None

    @property
    def max_bytes(self) -> int:
        """Size of the longest number on the wire."""
        return LEAF_BYTES


@dataclass(frozen=True)
class ChoiceSpec:
    """One of the given words.

    Attributes:
        words: The words.
    """

    words: tuple[str, ...]

    def mismatch(self, value: Tree, place: str) -> str | None:
        """Describe how a value differs from this spec; None if it matches."""
        if isinstance(value, str) and value in self.words:
            return None
        return f"{place} is {_short(value)}, not one of {', '.join(map(repr, self.words))}"

    @property
    def num_bytes(self) -> int:
        """Size of the longest word."""
        return max((len(word.encode()) for word in self.words), default=0)

    @property
    def max_bytes(self) -> int:
        """Size of the longest word on the wire."""
        return LEAF_BYTES + NAME_BYTES * max(map(len, self.words), default=0)


@dataclass(frozen=True)
class PerWeight:
    """An entry for each weight of the update, by the weight's name.

    Attributes:
        each: Spec of an entry; None for a tensor of the weight's shape and dtype.
        without: Names of weights without an entry.
        min_dims: Weights with fewer dimensions have no entry.
        some: Entries may be missing.
    """

    each: Spec | None = None
    without: frozenset[str] = frozenset()
    min_dims: int = 0
    some: bool = False

    def by_name(self, weights: Weights) -> dict[str, Spec]:
        """Return the specs of the entries for these weights."""
        return {
            name: TensorSpec(tuple(weight.shape), weight.dtype) if self.each is None else self.each
            for name, weight in weights.items()
            if name not in self.without and weight.ndim >= self.min_dims
        }


@dataclass(frozen=True)
class Optional:
    """A value that matches the spec, or nothing.

    Attributes:
        spec: Spec of the value.
    """

    spec: Spec


Leaf = TensorSpec | NumberSpec | ChoiceSpec
Spec = Leaf | PerWeight | Optional | Mapping[str, "Spec"] | tuple["Spec", ...]


def is_spec(declared: object) -> bool:
    """Whether what a component declares is a spec, and so is all in it."""
    if isinstance(declared, Optional):
        return is_spec(declared.spec)
    if isinstance(declared, PerWeight):
        return declared.each is None or is_spec(declared.each)
    if isinstance(declared, Mapping):
        return all(isinstance(name, str) and is_spec(one) for name, one in declared.items())
    return isinstance(declared, Leaf) or (isinstance(declared, tuple) and all(map(is_spec, declared)))


def mismatch(spec: Spec, value: Tree, weights: Weights, place: str) -> str | None:
    """Describe how a value differs from its declaration, in a sentence; None if it matches.

    Args:
        spec: The declaration.
        value: The value that was sent.
        weights: The weights of the same update, already checked.
        place: Name of the value in the sentence.
    """
    if value is None:
        return None if isinstance(spec, Optional) else f"{place} is missing"
    if isinstance(spec, Optional):
        return mismatch(spec.spec, value, weights, place)
    if isinstance(spec, TensorSpec | NumberSpec | ChoiceSpec):
        return spec.mismatch(value, place)
    if isinstance(spec, tuple):
        if not isinstance(value, list | tuple) or len(value) != len(spec):
            return f"{place} is {_short(value)}, not a list of {len(spec)}"
        for k, (one, entry) in enumerate(zip(spec, value, strict=True)):
            if wrong := mismatch(one, entry, weights, f"entry {k} of {place}"):
                return wrong
        return None
    if not isinstance(value, Mapping):
        return f"{place} is {_short(value)}, not a table of names"
    named = spec.by_name(weights) if isinstance(spec, PerWeight) else spec
    if extra := value.keys() - named.keys():
        return f"{place} holds {_short(min(extra, key=str))}, which was not declared"
    partial = isinstance(spec, PerWeight) and spec.some
    for name in value if partial else named:
        if wrong := mismatch(named[name], value.get(name), weights, f"{name!r} in {place}"):
            return wrong
    return None


def max_bytes(spec: Spec, weights: Weights) -> int:
    """Return the maximum size of a declared value, packed for the wire."""
    if isinstance(spec, TensorSpec | NumberSpec | ChoiceSpec):
        return spec.max_bytes
    if isinstance(spec, Optional):
        return max_bytes(spec.spec, weights)
    if isinstance(spec, tuple):
        return LEAF_BYTES + sum(max_bytes(one, weights) for one in spec)
    named = spec.by_name(weights) if isinstance(spec, PerWeight) else spec
    return LEAF_BYTES + sum(NAME_BYTES * len(name) + max_bytes(one, weights) for name, one in named.items())


def declared_leaves(spec: Spec, weights: Weights, place: str) -> Iterator[tuple[str, Leaf]]:
    """Yield the declared tensors, numbers and words with their place in the tree (names joined by dots)."""
    if isinstance(spec, TensorSpec | NumberSpec | ChoiceSpec):
        yield place, spec
    elif isinstance(spec, Optional):
        yield from declared_leaves(spec.spec, weights, place)
    else:
        named = spec.by_name(weights) if isinstance(spec, PerWeight) else spec
        pairs = enumerate(named) if isinstance(named, tuple) else named.items()
        for name, one in pairs:
            yield from declared_leaves(one, weights, f"{place}.{name}")


def _fit(sizes: tuple[int, ...], allowed: tuple[int | UpTo, ...]) -> bool:
    return len(sizes) == len(allowed) and all(map(_fits, sizes, allowed))


def _fits(size: int, allowed: int | UpTo) -> bool:
    return 1 <= size <= allowed.most if isinstance(allowed, UpTo) else size == allowed


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def _shape(sizes: tuple[int | UpTo, ...]) -> str:
    return f"({', '.join(map(str, sizes))}{',' if len(sizes) == 1 else ''})"


def _short(value: Tree) -> str:
    """Describe an untrusted value in a few characters."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {_shape(value.shape)}"
    return short(value)
