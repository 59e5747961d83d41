"""Disk buffer of a round's updates, for aggregations that need all updates at once."""

from __future__ import annotations

import contextlib
import tempfile
import weakref
from collections.abc import Callable, Iterator
from functools import reduce
from itertools import accumulate
from pathlib import Path
from typing import IO

import numpy as np
import torch
from torch import Tensor

from atoll.core.errors import UserError
from atoll.core.files import disk_sentence
from atoll.core.tree import Weights

MEMORY = 2**25  # maximum bytes of updates in memory at once


class DiskBuffer:
    """Models as flat vectors in an unnamed file, which the system deletes even if the process is killed.

    Only floating-point tensors are stored, in the widest of their types.

    Args:
        scratch: Folder of the file; None for the system's folder for temporary files.
    """

    def __init__(self, scratch: Path | None) -> None:
        if scratch is not None:
            scratch.mkdir(parents=True, exist_ok=True)
        self._folder = scratch or Path(tempfile.gettempdir())
        self._file = tempfile.TemporaryFile(dir=scratch)  # noqa: SIM115 - closed with the buffer's last reference
        weakref.finalize(self, _close, self._file)
        self._like: Weights = {}
        self._dtype = torch.float32
        self._rows = 0

    def __len__(self) -> int:
        return self._rows

    def add(self, weights: Weights) -> None:
        """Write a model; all models must have the same names and shapes.

        Raises:
            UserError: The disk is full.
        """
        if not self._like:
            floats = {name: tensor for name, tensor in weights.items() if tensor.is_floating_point()}
            self._like = {name: torch.empty_like(tensor, device="meta") for name, tensor in floats.items()}
            types = (tensor.dtype for tensor in floats.values())
            self._dtype = reduce(torch.promote_types, types, torch.float32)
        try:
            for name in self._like:
                self._file.write(weights[name].detach().to(self._dtype).flatten().contiguous().numpy().data)
            self._file.flush()
        except OSError as error:
            raise UserError(disk_sentence(self._folder, error)) from None
        self._rows += 1

    def flat(self, weights: Weights) -> Tensor:
        """Flatten the same tensors of another model to one vector."""
        if not self._like:
            return torch.empty(0)
        return torch.cat([weights[name].to(self._dtype).flatten() for name in self._like])

    def unflat(self, vector: Tensor) -> Weights:
        """Convert a flat vector to a model."""
        sizes = [tensor.numel() for tensor in self._like.values()]
        return {
            name: vector[end - size : end].view(tensor.shape).to(tensor.dtype)
            for (name, tensor), size, end in zip(self._like.items(), sizes, accumulate(sizes), strict=True)
        }

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield all models' coordinates block by block: the slice of the flat vector, and a (K, block) tensor."""
        itemsize = self._dtype.itemsize
        step = max(1, MEMORY // (itemsize * max(1, self._rows)))
        kind = torch.empty(0, dtype=self._dtype).numpy().dtype
        for start in range(0, self._size, step):
            stop = min(start + step, self._size)
            block = np.empty((self._rows, stop - start), kind)
            for row in range(self._rows):
                self._file.seek((row * self._size + start) * itemsize)
                self._file.readinto(block[row].data)
            yield slice(start, stop), torch.from_numpy(block)

    def map(self, function: Callable[[Tensor, slice], Tensor]) -> Weights:
        """Apply ``function`` to all models' coordinates, (K, block) → (block,), and return the resulting model."""
        vector = torch.empty(self._size, dtype=self._dtype)
        for block, rows in self.blocks():
            vector[block] = function(rows, block)
        return self.unflat(vector)

    def gram(self, origin: Tensor, scale: Tensor | None = None) -> Tensor:
        """Compute ⟨s (w_i − o), s (w_j − o)⟩ for all pairs of models, (K, K) in float64.

        Args:
            origin: The flat vector o.
            scale: The flat vector s; None for 1.
        """
        gram = torch.zeros(self._rows, self._rows, dtype=torch.float64)
        for block, rows in self.blocks():
            moved = rows.double() - origin[block].double()
            if scale is not None:
                moved *= scale[block]
            gram += moved @ moved.T
        return gram

    @property
    def _size(self) -> int:
        return sum(tensor.numel() for tensor in self._like.values())


def _close(file: IO[bytes]) -> None:
    with contextlib.suppress(OSError):  # the error of a full disk, which `add` has already reported
        file.close()
