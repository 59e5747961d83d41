"""Data of one client: shuffled batches of views, and an ordered pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, tee
from typing import NamedTuple

import torch
from torch import Tensor

from atoll.core.devices import upload
from atoll.core.rng import stream
from atoll.data.batch import Batch
from atoll.data.decode_workers import DecodeWorkers, is_streamed
from atoll.data.sources import ImageSet
from atoll.data.views.views import Views, is_local

VIEW_NAMES = ("view1", "view2", "view3")
# How much is made in one pass: enough to amortise the draws, and the start of some 160 kernels on a GPU.
MOST_BATCHES = 16
MOST_VALUES = 1 << 23


class _Planned(NamedTuple):
    """A batch before its images are read.

    Attributes:
        epoch: Local epoch, from 0.
        rows: Positions among the client's samples.
        others: As many positions, drawn at random; none if they are not needed.
    """

    epoch: int
    rows: Tensor
    others: Tensor


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


def batches_in_a_pass(values: int) -> int:
    """Number of batches, each of ``values`` values, whose images are made in one pass.

    Example:
        >>> from atoll.data.client_data import batches_in_a_pass
        >>> [batches_in_a_pass(images * 3 * 32 * 32) for images in (64, 1024, 4096)]
        [16, 2, 1]
    """
    return max(1, min(MOST_BATCHES, MOST_VALUES // max(values, 1)))


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
        return self._shown(rows, generator).contiguous(memory_format=self._layout)

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
        draws = {name: stream(self._seed, "views", *keys, name) for name in images}
        schedule, together = self._schedule(keys, epochs, "other" in images), self.batches_in_a_pass(images)
        passes, coming = tee(iter(lambda: list(islice(schedule, together)), []))
        stored = self._decoders.read(
            self._indices[torch.cat([*(one.rows for one in some), *(one.others for one in some)])]
            for some in coming
        )
        for pixels, some in zip(stored, passes, strict=False):
            yield from self._batches(some, upload(pixels, self._device), images, draws)

    def batches_in_a_pass(self, images: Sequence[str]) -> int:
        """Number of consecutive batches whose images are made together, which is faster for small batches.

        The images do not depend on it.

        Args:
            images: Names of the images; see `batches`.
        """
        # A transform may draw numbers of its own, and streamed images are decoded batch by batch.
        if self._views.transform is not None or is_streamed(self._set.images):
            return 1
        source = self._set.images.shape[-2:]
        values = sum((self._views.local if is_local(name) else self._views).values(source) for name in images)
        return batches_in_a_pass(min(self._batch_size, self.num_samples) * values)

    def _batches(
        self,
        some: list[_Planned],
        pixels: Tensor,
        images: Sequence[str],
        draws: Mapping[str, torch.Generator],
    ) -> Iterator[Batch]:
        """Make the images of consecutive batches in one pass, given the pixels of all rows and all other rows."""
        sizes = [len(one.rows) for one in some]
        pixels, others = pixels[: sum(sizes)], pixels[sum(sizes) :]
        made: dict[str, Tensor] = {}
        kinds = {
            self._views: [name for name in VIEW_NAMES if name in images],
            self._views.local: [name for name in images if is_local(name)],
        }
        for views, names in kinds.items():
            generators = [draws[name] for name in names]
            made |= zip(names, views.make(pixels, generators, self._layout, sizes), strict=True)
        if "image" in images:
            made["image"] = self._views.plain(pixels).contiguous(memory_format=self._layout)
        if "other" in images:
            (made["other"],) = self._views.make(others, [draws["other"]], self._layout, sizes)
        labels = self._labels(torch.cat([one.rows for one in some]))
        cut = {name: torch.split(image, sizes) for name, image in made.items()}
        cut_labels = [None] * len(some) if labels is None else torch.split(labels, sizes)
        for i, one in enumerate(some):
            yield Batch(one.rows, {name: image[i] for name, image in cut.items()}, cut_labels[i], one.epoch)

    def _schedule(self, keys: tuple[int, int], epochs: int, with_others: bool) -> Iterator[_Planned]:
        order, others = stream(self._seed, "order", *keys), stream(self._seed, "others", *keys)
        for epoch in range(epochs):
            for rows in self._cut(torch.randperm(self.num_samples, generator=order)):
                size = (len(rows) if with_others else 0,)
                yield _Planned(epoch, rows, torch.randint(self.num_samples, size, generator=others))

    def ordered(self, generator: torch.Generator | None = None) -> Iterator[Batch]:
        """Iterate over every sample once, in order, as ``images["image"]``.

        Args:
            generator: Source of the augmentation's random draws; None for images without augmentation.
        """
        for rows in torch.split(torch.arange(self.num_samples), self._batch_size):
            yield Batch(rows, {"image": self._shown(rows, generator)}, self._labels(rows))

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

    def _shown(self, rows: Tensor, generator: torch.Generator | None) -> Tensor:
        """Images of samples; a view of each if there is a generator."""
        pixels = upload(self._set.images.gather(self._indices[rows]), self._device)
        return self._views.plain(pixels) if generator is None else self._views(pixels, generator)

    def _labels(self, rows: Tensor) -> Tensor | None:
        labels = self._set.labels
        return None if labels is None else upload(labels[self._indices[rows]], self._device)
