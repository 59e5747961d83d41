"""Processes that read and decode the images of later batches while the current one trains."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Iterator
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from atoll.core.errors import RunError, UserError
from atoll.core.processes import process_context, why_ended
from atoll.data.cache import StreamedPixels
from atoll.data.images import Pixels

AHEAD = 2  # batches that each process decodes ahead


class DecodeWorkers:
    """Reads batches of images in order, decoded ahead by processes that live as long as this object.

    The order and the pixels do not depend on the number of processes.

    Args:
        pixels: The images.
        count: Number of processes; 0 to read in this process. A process that must not start others reads itself,
            too.
    """

    def __init__(self, pixels: Pixels, count: int) -> None:
        self._pixels = pixels
        self._count = 0 if multiprocessing.current_process().daemon else count
        self._plan = _Plan()
        self._loader: DataLoader[Any] | None = None
        self._busy = False

    def read(self, batches: Iterable[Tensor]) -> Iterator[Tensor]:
        """Gather batch after batch (see `atoll.data.images.Pixels.gather`).

        Args:
            batches: Indices of each batch; they are drawn ahead of the images.

        Raises:
            UserError: An image can no longer be read or decoded.
            RunError: A process died.
        """
        if not self._count or self._busy:
            yield from map(self._pixels.gather, batches)
            return
        self._busy, self._plan.batches = True, batches
        try:
            for decoded in self._loaded():
                if isinstance(decoded, str):
                    raise UserError(decoded)
                yield torch.from_numpy(decoded)
        except RuntimeError as error:
            died = [code for process in self._processes() if (code := process.exitcode)]
            if not died:
                raise
            raise RunError(
                f"a process that decodes images {why_ended(died[0])}; resume the run to continue from its last "
                "complete round"
            ) from error
        finally:
            self._busy = False

    def _processes(self) -> list[BaseProcess]:
        return getattr(getattr(self._loader, "_iterator", None), "_workers", [])

    def _loaded(self) -> Iterator[NDArray[np.uint8] | str]:
        if self._loader is None:
            self._loader = DataLoader(
                _Images(self._pixels),
                batch_sampler=self._plan,
                num_workers=self._count,
                collate_fn=_unchanged,
                prefetch_factor=AHEAD,
                persistent_workers=True,
                multiprocessing_context=process_context(),
                generator=torch.Generator(),  # otherwise, it would draw from the stream of the networks
            )
        return iter(self._loader)


def is_streamed(pixels: Pixels) -> bool:
    """Whether images are decoded when they are read."""
    while (base := getattr(pixels, "base", None)) is not None:
        pixels = base
    return isinstance(pixels, StreamedPixels)


class _Plan:
    """The batches of the next iteration, for the loader, which keeps one sampler."""

    batches: Iterable[Tensor] = ()

    def __iter__(self) -> Iterator[list[int]]:
        return (batch.tolist() for batch in self.batches)


class _Images(Dataset[Any]):
    def __init__(self, pixels: Pixels) -> None:
        self._pixels = pixels

    def __getitems__(self, indices: list[int]) -> NDArray[np.uint8] | str:
        # An array is sent through a pipe; a tensor would need more shared memory than containers usually have.
        try:
            pixels: NDArray[np.uint8] = self._pixels.gather(torch.tensor(indices)).numpy()
        except UserError as error:
            return str(error)
        return pixels


def _unchanged(decoded: Any) -> Any:
    return decoded
