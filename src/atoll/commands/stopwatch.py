"""Timing of a client's training steps: which clients are timed, and by what."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import cast

import torch

from atoll.data.batch import Batch, ClientData
from atoll.data.client_data import FederatedClient
from atoll.engines.federation import Federation


def largest_cohort(federation: Federation) -> list[int]:
    """The largest clients, the largest first, as many as take part in a round: a round's own draw may be empty."""
    setting = federation.setting
    return sorted(range(setting.num_clients), key=lambda client: -setting.sizes[client])[
        : setting.cohort_size
    ]


class Enough(Exception):  # noqa: N818
    """Stops the training when all steps are timed; not an error."""


class Stopwatch:
    """Times a client's steps on full batches, and the passes that make its batches, of which one makes several.

    It is the progress callback of a client's training, on the data that `over` returns.

    Args:
        steps: Number of steps on full batches after which the training stops.
        device: Device of the training.

    Attributes:
        seconds: Duration of each of these steps, without the making of its batch.
        images: Number of images of a full batch.
        making: Seconds an image of each pass.
    """

    def __init__(self, steps: int, device: torch.device) -> None:
        self.seconds: list[float] = []
        self.images = 0
        self.making: list[float] = []
        self._steps = steps
        self._device = device
        self._last = time.perf_counter()

    def over(self, data: FederatedClient, epochs: int) -> ClientData:
        """Return the data with timed batches, made as in a round of ``epochs`` epochs.

        In a short round, fewer batches are made in one pass.
        """
        return cast(ClientData, _TimedData(data, self, max(1, epochs)))

    def step_seconds(self, warm: int, choose: Callable[[list[float]], float]) -> float:
        """Duration of a step on a full batch and of the batch's making, each chosen among those that are timed."""
        return choose(self.seconds[warm:]) + choose(self.making) * self.images

    def __call__(self, images: int) -> None:
        """Record a step of ``images`` images."""
        seconds = self.lap()
        if images >= self.images:
            self.images = images
            self.seconds.append(seconds)
        if len(self.seconds) == self._steps:
            raise Enough

    def lap(self) -> float:
        """Return the seconds since the last call."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        last, self._last = self._last, time.perf_counter()
        return self._last - last


class _TimedData:
    """A client's data, with timed batches."""

    def __init__(self, data: FederatedClient, watch: Stopwatch, epochs: int) -> None:
        self._data, self._watch, self._epochs = data, watch, epochs

    def __getattr__(self, name: str) -> object:
        return getattr(self._data, name)

    def batches(self, round: int, epochs: int, images: Sequence[str]) -> Iterator[Batch]:
        """Iterate over the batches of the round's epochs, again and again; see `FederatedClient.batches`."""
        together = self._data.batches_in_a_pass(images)
        next(self._data.batches(round, self._epochs, images))  # a first pass takes longer
        for start in range(0, epochs, self._epochs):
            batches = self._data.batches(round, min(self._epochs, epochs - start), images)
            self._watch.lap()
            while made := list(islice(batches, together)):
                self._watch.making.append(self._watch.lap() / sum(len(batch.indices) for batch in made))
                for batch in made:
                    yield batch
                    self._watch.lap()
