"""Norms of components' slices, which the update checks bound like the distance of the weights."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from atoll.components.declaration import Spec, TensorSpec, UpTo, declared_leaves
from atoll.components.messages import Slices
from atoll.core.tree import leaves


def slice_norms(slices: Slices, specs: Mapping[str, Spec]) -> dict[str, float]:
    """Return the norms of the slices that have an informative norm, which normalised rows do not have.

    The floating-point tensors of a slice count as one vector. If all of them have a variable number of rows, the
    norm is the root mean square over rows, which does not depend on their number.

    Args:
        slices: Slices of an update, by component.
        specs: Their declarations.

    Example:
        >>> import torch
        >>> from atoll.components.declaration import TensorSpec, UpTo
        >>> from atoll.engines.slice_norms import slice_norms
        >>> rows = torch.tensor([[3.0, 4.0], [3.0, 4.0]])
        >>> specs = {"matrix": TensorSpec((2, 2)), "rows": TensorSpec((UpTo(9), 2))}
        >>> {name: round(norm, 2) for name, norm in slice_norms({"matrix": rows, "rows": rows}, specs).items()}
        {'matrix': 7.07, 'rows': 5.0}
    """
    norms = {}
    for name, spec in specs.items():
        shapes = [leaf.shape for leaf in tensor_specs(spec) if not leaf.unit_rows]
        if not shapes:
            continue
        floats = [tensor for tensor in leaves(slices.get(name)) if tensor.is_floating_point()]
        norms[name] = math.sqrt(
            sum(float(torch.linalg.vector_norm(tensor.float())) ** 2 for tensor in floats)
        )
        if floats and all(any(isinstance(size, UpTo) for size in shape) for shape in shapes):
            norms[name] /= math.sqrt(sum(map(len, floats)))
    return norms


def tensor_specs(spec: Spec) -> list[TensorSpec]:
    """List the tensors that a slice may contain."""
    found = declared_leaves(spec, {"": torch.empty(0)}, "")
    return [leaf for _, leaf in found if isinstance(leaf, TensorSpec)]
