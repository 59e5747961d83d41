"""Equality of trees to the bit, for tests that compare states, messages, updates and weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from atoll.core.tree import Tree


def same(a: Tree, b: Tree) -> bool:
    """Whether two trees are bitwise equal: 0.0 and −0.0 differ, and a NaN is equal to itself."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bytes(a), _bytes(b))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return type(a) is type(b) and repr(a) == repr(b)
    return type(a) is type(b) and bool(a == b)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)
