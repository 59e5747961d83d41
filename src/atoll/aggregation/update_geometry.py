"""Update geometry: the difference between an update and its model, computed once for update checks and folds.

An update is large, and the results are few numbers. The update is therefore processed in parts that fit in a
core's cache together with the model's part and their difference, and no model is ever copied. Sums within a block
of a part have the precision of the weights (at least float32); sums over blocks are in float64. PyTorch's threads
share the blocks of a part, so the results do not depend on the number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from atoll.components.messages import UpdateGeometry
from atoll.core.tree import Weights

__all__ = ["BLOCK", "Reference", "UpdateGeometry"]

BLOCK = 2**15  # number of elements; PyTorch sums this many on one thread
PART = 8  # number of blocks: 1 MiB of float32


class Reference:
    """A model, as the reference for the geometry of updates that started from it.

    Args:
        model: The model from which the updates started.
    """

    def __init__(self, model: Weights) -> None:
        self.model = model
        self._flat = {name: tensor.flatten() for name, tensor in model.items() if tensor.is_floating_point()}
        self._squares = {name: sum(map(_square, _parts(flat))) for name, flat in self._flat.items()}
        self._differences: dict[torch.dtype, Tensor] = {}

    @torch.no_grad()
    def measure(self, weights: Weights) -> UpdateGeometry:
        """Compute the geometry of an update's tensors. Non-finite values make ``moved`` non-finite."""
        names = [name for name in self._flat if name in weights]
        geometry = UpdateGeometry({}, {}, {}, {name: self._squares[name] for name in names})
        for name in names:
            w, g = weights[name].flatten(), self._flat[name]
            moved, update = self._compare(w, g)
            geometry.moved[name], geometry.update[name] = moved, update
            geometry.inner[name] = _inner(w, g, moved, update, self._squares[name])
        return geometry

    def _compare(self, w: Tensor, g: Tensor) -> tuple[float, float]:
        """Compute ‖w − g‖² and ‖w‖²."""
        precise = _precise(w)
        if precise not in self._differences:  # one for all parts: it stays in cache
            self._differences[precise] = torch.empty(PART * BLOCK, dtype=precise, device=w.device)
        whole = self._differences[precise]
        moved = update = 0.0
        for w_part, g_part in zip(_parts(w), _parts(g), strict=True):
            difference = whole[: w_part.numel()]
            w_part = w_part.to(precise)
            torch.sub(w_part, g_part, out=difference)
            moved += _square(difference)
            update += _square(w_part)
        return moved, update


def _inner(w: Tensor, g: Tensor, moved: float, update: float, model: float) -> float:
    """Compute ⟨g, w⟩ by the law of cosines, or directly if that is inaccurate: if the lengths differ tenfold."""
    if math.isfinite(moved) and max(update, model) > 100 * min(update, model):
        parts = zip(_parts(w), _parts(g), strict=True)
        return sum(
            sum(_blocks(w_part.to(_precise(w)) * g_part).sum(dim=1).tolist()) for w_part, g_part in parts
        )
    return (update + model - moved) / 2


def _parts(flat: Tensor) -> Iterator[Tensor]:
    """Yield whole blocks, `PART` at a time, and then the rest."""
    blocks = flat.numel() // BLOCK
    for first in range(0, blocks, PART):
        yield flat[first * BLOCK : min(first + PART, blocks) * BLOCK]
    if blocks * BLOCK < flat.numel():
        yield flat[blocks * BLOCK :]


def _blocks(part: Tensor) -> Tensor:
    """Return a part's blocks as rows."""
    return part.view(-1, min(part.numel(), BLOCK))


def _square(part: Tensor) -> float:
    """Compute the squared norm of a part."""
    norms: list[float] = torch.linalg.vector_norm(_blocks(part), dim=1, dtype=_precise(part)).tolist()
    return sum(norm**2 for norm in norms)


def _precise(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
