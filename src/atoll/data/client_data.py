"""Data of one client: shuffled batches of views, and an ordered pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import tee

import torch
from torch import Tensor

from atoll.core.devices import upload
from atoll.core.rng import stream
from atoll.data.batch import Batch
from atoll.data.decode_workers import DecodeWorkers
from atoll.data.sources import ImageSet
from atoll.data.views.views import Views, is_local

VIEW_NAMES = ("view1", "view2", "view3")


def num_batches(samples: int, batch_size: int, drop_last: bool) -> int:
    """Number of batches in one epoch of a client.

    A last, smaller batch counts if it has at least two images and is not dropped, or if it is the only one.

    Example:
        >>> from atoll.data.client_data import num_batches
        >>> [num_batches(samples, batch_size=4, drop_last=False) for samples in (3, 4, 5, 6)]
        [1, 1, 1, 2]
    """
    full, rest = divmod(samples, batch_size)
    return max(full + (rest > 1 and not drop_last), 1)


class FederatedClient:
    """Data of one client. It stores indices, never pixels.

    Args:
        images: The training set, which the partition divides among the clients.
        indices: Indices of this client's samples in the training set.
        client: ID of the client.
        views: Augmentation.
        seed: The run's seed.
        batch_size: Batch size of training.
        drop_last: Whether to drop a last, smaller batch, unless it is the only one.
        device: Device of the batches.
        layout: Memory layout of the images.
        decoders: Reads the images of batches; None to read them in this process.
    """

    def __init__(
        self,
        images: ImageSet,
        indices: Tensor,
        client: int,
        views: Views,
        seed: int,
        batch_size: int,
        drop_last: bool,
        device: torch.device,
        layout: torch.memory_format = torch.contiguous_format,
        decoders: DecodeWorkers | None = None,
    ) -> None:
        self.num_samples = len(indices)
        self._set = images
        self._indices = indices
        self._client = client
        self._views = views
        self._seed = seed
        self._batch_size = batch_size
        self._drop_last = drop_last
        self._device = device
        self._decoders = decoders or DecodeWorkers(images.images, 0)
        self._layout = layout

    @property
    def labels(self) -> Tensor | None:
        """Labels of the client's samples, (N,) int64, on the CPU; None if there are none."""
        labels = self._set.labels
        return None if labels is None else labels[self._indices]

    def pick(self, rows: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Load images of chosen samples.

        Args:
            rows: Positions among the client's samples.
            generator: Source of the augmentation's random draws; None for images without augmentation.

        Shape:
            rows: (N,) positions among the client's samples; result: float32 (N, C, size, size).
        """
        pixels = self._pixels(rows)
        images = self._views.plain(pixels) if generator is None else self._views(pixels, generator)
        return images.contiguous(memory_format=self._layout)

    def num_batches(self) -> int:
        """Number of batches in one epoch."""
        return num_batches(self.num_samples, self._batch_size, self._drop_last)

    def batches(self, round: int, epochs: int, images: Sequence[str]) -> Iterator[Batch]:
        """Iterate over shuffled batches of ``epochs`` epochs, with the named images of each sample.

        Each kind of image has a separate random stream, so requesting another kind does not change the others.

        Args:
            round: The round; the random streams depend on it.
            epochs: Number of epochs.
            images: Names of the images to make: ``"view1"`` to ``"view3"``, ``"local1"`` and on, ``"image"``,
                ``"other"``.
        """
        keys = (round, self._client)
        kinds = {
            self._views: [name for name in VIEW_NAMES if name in images],
            self._views.local: [name for name in images if is_local(name)],
        }
        names = [name for each in kinds.values() for name in each]
        draws = {name: stream(self._seed, "views", *keys, name) for name in (*names, "other")}
        schedule, coming = tee(self._schedule(keys, epochs, "other" in images))
        stored = self._decoders.read(self._indices[torch.cat([rows, others])] for _, rows, others in coming)
        for both, (epoch, rows, _) in zip(stored, schedule, strict=False):
            on_device = upload(both, self._device)
            pixels, other = on_device[: len(rows)], on_device[len(rows) :]
            made: dict[str, Tensor] = {}
            for views, names in kinds.items():
                made |= zip(
                    names, views.make(pixels, [draws[name] for name in names], self._layout), strict=True
                )
            if "image" in images:
                made["image"] = self._views.plain(pixels).contiguous(memory_format=self._layout)
            if "other" in images:
                (made["other"],) = self._views.make(other, [draws["other"]], self._layout)
            yield Batch(rows, made, self._labels(rows), epoch)

    def _schedule(
        self, keys: tuple[int, int], epochs: int, with_others: bool
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Epoch, rows, and randomly chosen other rows of each batch; no other rows if they are not needed."""
        order, others = stream(self._seed, "order", *keys), stream(self._seed, "others", *keys)
        for epoch in range(epochs):
            for rows in self._cut(torch.randperm(self.num_samples, generator=order)):
                size = (len(rows) if with_others else 0,)
                yield epoch, rows, torch.randint(self.num_samples, size, generator=others)

    def ordered(self, generator: torch.Generator | None = None) -> Iterator[Batch]:
        """Iterate over every sample once, in order, as ``images["image"]``.

        Args:
            generator: Source of the augmentation's random draws; None for images without augmentation.
        """
        for rows in torch.split(torch.arange(self.num_samples), self._batch_size):
            pixels = self._pixels(rows)
            image = self._views.plain(pixels) if generator is None else self._views(pixels, generator)
            yield Batch(rows, {"image": image}, self._labels(rows))

    def plain(self, pixels: Tensor) -> Tensor:
        """Convert other images to the networks' input, without augmentation.

        Args:
            pixels: The images.

        Shape:
            pixels: uint8 (N, C, H, W); result: float32 (N, C, size, size), on the training device.
        """
        return self._views.plain(upload(pixels, self._device)).contiguous(memory_format=self._layout)

    def _cut(self, order: Tensor) -> list[Tensor]:
        cuts = list(torch.split(order, self._batch_size))
        short = len(cuts[-1]) < self._batch_size
        # A batch of one sample has no negatives, and BatchNorm cannot normalise it.
        if len(cuts) > 1 and (len(cuts[-1]) < 2 or (self._drop_last and short)):
            cuts.pop()
        return cuts

    def _pixels(self, rows: Tensor) -> Tensor:
        return upload(self._set.images.gather(self._indices[rows]), self._device)

    def _labels(self, rows: Tensor) -> Tensor | None:
        labels = self._set.labels
        return None if labels is None else upload(labels[self._indices[rows]], self._device)
