"""How an update lies to the model that it set out from: read once, for the door and for the folds.

An update is large and its numbers are few. So it is gone through in blocks that stay in a core's cache together
with the model's block and their difference, and no copy of a model is ever made. Sums within a block are taken in
the weights' own precision, those over blocks in float64.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.core.tree import Weights

# Elements. Torch computes so many on one thread: waking another for a block costs more than it gains. And three
# blocks of float32 fit in a core's second-level cache.
BLOCK = 2**15


@dataclass(frozen=True)
class UpdateGeometry:
    """An update w next to its model g, for each floating-point tensor.

    Attributes:
        moved: ‖w − g‖², from the difference itself (‖w‖² + ‖g‖² − 2⟨g, w⟩ would drown small steps in rounding).
        inner: ⟨g, w⟩.
        update: ‖w‖².
        model: ‖g‖².
    """

    moved: dict[str, float]
    inner: dict[str, float]
    update: dict[str, float]
    model: dict[str, float]

    def distance(self, without: Collection[str] = ()) -> float:
        """‖w − g‖ over all tensors but these."""
        return math.sqrt(sum(moved for name, moved in self.moved.items() if name not in without))

    def cosine(self, names: Iterable[str] | None = None) -> float:
        """⟨g, w⟩ / (‖g‖‖w‖) over these tensors taken as one vector, or over all; 1 where either is zero.

        Equal vectors give exactly 1.
        """
        names = list(self.moved if names is None else names)
        inner, update, model = (
            sum(values[name] for name in names) for values in (self.inner, self.update, self.model)
        )
        scale = math.sqrt(update) * math.sqrt(model) if update != model else update
        return min(max(inner / scale, -1.0), 1.0) if scale > 0 else 1.0


class Reference:
    """Measures updates against one model.

    Args:
        model: that they set out from.
    """

    def __init__(self, model: Weights) -> None:
        self.model = model
        self._flat = {name: tensor.flatten() for name, tensor in model.items() if tensor.is_floating_point()}
        self._squares = {name: _square(tensor) for name, tensor in self._flat.items()}

    @torch.no_grad()
    def measure(self, weights: Weights) -> UpdateGeometry:
        """Measure an update; names it lacks are left out. Values that are not finite show in ``moved``."""
        names = [name for name in self._flat if name in weights]
        measure = UpdateGeometry({}, {}, {}, {name: self._squares[name] for name in names})
        room: dict[torch.dtype, Tensor] = {}  # for differences, block after block, so that it stays in cache
        for name in names:
            w, g = weights[name].flatten(), self._flat[name]
            precise = _precise(w)
            if precise not in room:
                room[precise] = torch.empty(BLOCK, dtype=precise, device=w.device)
            moved, update = _compare(w, g, room[precise])
            measure.moved[name], measure.update[name] = moved, update
            measure.inner[name] = _inner(w, g, moved, update, self._squares[name])
        return measure


def _compare(w: Tensor, g: Tensor, room: Tensor) -> tuple[float, float]:
    """‖w − g‖² and ‖w‖²."""
    moved = update = 0.0
    for ours, theirs in zip(torch.split(w, BLOCK), torch.split(g, BLOCK), strict=True):
        difference = room[: ours.numel()]
        ours = ours.to(room.dtype)
        torch.sub(ours, theirs, out=difference)
        moved += float(torch.linalg.vector_norm(difference)) ** 2
        update += float(torch.linalg.vector_norm(ours)) ** 2
    return moved, update


def _inner(w: Tensor, g: Tensor, moved: float, update: float, model: float) -> float:
    """⟨g, w⟩ by the law of cosines; where the lengths differ tenfold that says too little, and it is summed."""
    if math.isfinite(moved) and max(update, model) > 100 * min(update, model):
        blocks = zip(torch.split(w, BLOCK), torch.split(g, BLOCK), strict=True)
        return sum(float((ours.to(_precise(w)) * theirs).sum()) for ours, theirs in blocks)
    return (update + model - moved) / 2


def _square(tensor: Tensor) -> float:
    precise = _precise(tensor)
    return sum(
        float(torch.linalg.vector_norm(block, dtype=precise)) ** 2 for block in torch.split(tensor, BLOCK)
    )


def _precise(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
