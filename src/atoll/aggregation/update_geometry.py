"""Update geometry: the difference between an update and its model, computed once for update checks and folds.

An update is large, and the results are few numbers. The update is therefore processed in blocks that fit in a
core's cache together with the model's block and their difference, and no model is ever copied. Sums within a block
have the precision of the weights (at least float32); sums over blocks are in float64.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from atoll.components.messages import UpdateGeometry
from atoll.core.tree import Weights

__all__ = ["BLOCK", "Reference", "UpdateGeometry"]

# Number of elements. PyTorch processes this many on one thread, and starting another thread per block would
# cost more than it saves. Three blocks of float32 fit in a core's second-level cache.
BLOCK = 2**15
Blocks = tuple[Tensor, ...]  # of one tensor


class Reference:
    """A model, as the reference for the geometry of updates that started from it.

    Args:
        model: The model from which the updates started.
    """

    def __init__(self, model: Weights) -> None:
        self.model = model
        flat = {name: tensor.flatten() for name, tensor in model.items() if tensor.is_floating_point()}
        self._squares = {name: _square(tensor) for name, tensor in flat.items()}
        self._blocks = {name: _blocks(tensor) for name, tensor in flat.items()}
        self._buffers: dict[torch.dtype, Tensor] = {}

    @torch.no_grad()
    def measure(self, weights: Weights) -> UpdateGeometry:
        """Compute an update's geometry, without missing names. Non-finite values make ``moved`` non-finite."""
        names = [name for name in self._blocks if name in weights]
        geometry = UpdateGeometry({}, {}, {}, {name: self._squares[name] for name in names})
        for name in names:
            blocks = _blocks(weights[name].flatten())
            moved, update = self._compare(blocks, self._blocks[name])
            geometry.moved[name], geometry.update[name] = moved, update
            geometry.inner[name] = _inner(blocks, self._blocks[name], moved, update, self._squares[name])
        return geometry

    def _compare(self, w: Blocks, g: Blocks) -> tuple[float, float]:
        """Compute ‖w − g‖² and ‖w‖²."""
        precise = _precise(w[0])
        if precise not in self._buffers:  # one for the differences of all blocks: it stays in cache
            self._buffers[precise] = torch.empty(BLOCK, dtype=precise, device=w[0].device)
        whole = self._buffers[precise]
        moved = update = 0.0
        for w_block, g_block in zip(w, g, strict=True):
            size = w_block.numel()
            difference = whole if size == BLOCK else whole[:size]
            if w_block.dtype != precise:
                w_block = w_block.to(precise)
            torch.sub(w_block, g_block, out=difference)
            moved += float(torch.linalg.vector_norm(difference)) ** 2
            update += float(torch.linalg.vector_norm(w_block)) ** 2
        return moved, update


def _inner(w: Blocks, g: Blocks, moved: float, update: float, model: float) -> float:
    """Compute ⟨g, w⟩ by the law of cosines, or directly if that is inaccurate: if the lengths differ tenfold."""
    if math.isfinite(moved) and max(update, model) > 100 * min(update, model):
        return sum(
            float((w_block.to(_precise(w_block)) * g_block).sum())
            for w_block, g_block in zip(w, g, strict=True)
        )
    return (update + model - moved) / 2


def _blocks(flat: Tensor) -> Blocks:
    # Most tensors of a network are small, and the call of `split` costs more than they do.
    return (flat,) if flat.numel() <= BLOCK else torch.split(flat, BLOCK)


def _square(tensor: Tensor) -> float:
    precise = _precise(tensor)
    return sum(float(torch.linalg.vector_norm(block, dtype=precise)) ** 2 for block in _blocks(tensor))


def _precise(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
