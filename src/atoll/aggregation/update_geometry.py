"""How an update differs from the model that it started from: read once, for the update checks and for the folds.

An update is large and its numbers are few. So it is gone through in blocks that stay in a core's cache together
with the model's block and their difference, and no copy of a model is ever made. Sums within a block are taken in
the weights' own precision, those over blocks in float64.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from atoll.components.messages import UpdateGeometry
from atoll.core.tree import Weights

__all__ = ["BLOCK", "Reference", "UpdateGeometry"]

# Elements. Torch computes so many on one thread: waking another for a block costs more than it gains. And three
# blocks of float32 fit in a core's second-level cache.
BLOCK = 2**15


class Reference:
    """Measures updates against one model.

    Args:
        model: That they set out from.
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
