"""Aggregation rules that bound the effect of a few wrong updates: coordinate median, trimmed mean, multi-Krum.

All clients have equal weight, because a reported size could be false. All updates are needed at once, so they are
buffered on disk, and coordinates are processed in blocks. BatchNorm's counters take the maximum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from atoll.aggregation.disk_buffer import DiskBuffer
from atoll.aggregation.running_mean import RunningMean
from atoll.components.base import Aggregation, Models, Setting, Update, UpdateGeometry
from atoll.core.schema import AtLeast, Below
from atoll.core.tree import Weights

Combine = Callable[[DiskBuffer, Weights], Weights]


@dataclass(frozen=True)
class Robust(Aggregation):
    """Base class of these rules: collect a round's updates, then combine them."""

    whole_cohort: ClassVar[bool] = True
    keeps_updates: ClassVar[bool] = False

    def open(self, models: Models, setting: Setting, round: int, scratch: Path | None) -> CollectingFold:
        """Start to collect a round's updates."""
        return CollectingFold(models["global"], partial(self.combine, buffers=setting.buffers), scratch)

    def combine(self, updates: DiskBuffer, current: Weights, buffers: frozenset[str]) -> Weights:
        """Compute the next model's floating-point tensors; no gradient trains those named in ``buffers``."""
        raise NotImplementedError


class CollectingFold:
    """Collection of a round's updates on disk."""

    def __init__(self, current: Weights, combine: Combine, scratch: Path | None) -> None:
        self._current = current
        self._combine = combine
        self._updates = DiskBuffer(scratch)
        self._counters = RunningMean()

    def add(self, client: int, update: Update, geometry: UpdateGeometry) -> None:
        """Write one client's model to disk."""
        weights = update["weights"]
        self._updates.add(weights)
        self._counters.add(
            {n: tensor for n, tensor in weights.items() if not tensor.is_floating_point()}, 1.0
        )

    def close(self) -> Models:
        """Combine the updates; tensors that no client sent are unchanged."""
        combined = self._combine(self._updates, self._current)
        return {"global": {**self._current, **self._counters.mean, **combined}}


@dataclass(frozen=True)
class Median(Robust):
    """The median of every coordinate; for an even number of updates, the mean of the two middle values."""

    name: ClassVar[str] = "median"
    source: ClassVar[str] = "Yin et al. 2018, Definition 1"

    def combine(self, updates: DiskBuffer, current: Weights, buffers: frozenset[str]) -> Weights:
        """Compute the medians."""
        low, high = (len(updates) - 1) // 2, len(updates) // 2

        def median(rows: Tensor, block: slice) -> Tensor:
            ordered = rows.sort(dim=0).values
            return ordered[low] if low == high else torch.lerp(ordered[low], ordered[high], 0.5)

        return updates.map(median)


@dataclass(frozen=True)
class TrimmedMean(Robust):
    """The mean of every coordinate without its ⌊βK⌋ smallest and ⌊βK⌋ largest values.

    Attributes:
        trim: β, in [0, ½).
    """

    name: ClassVar[str] = "trimmed_mean"
    source: ClassVar[str] = "Yin et al. 2018, Definition 2"
    trim: Annotated[float, AtLeast(0), Below(0.5)] = 0.1

    def combine(self, updates: DiskBuffer, current: Weights, buffers: frozenset[str]) -> Weights:
        """Compute the trimmed means."""
        most = (len(updates) - 1) // 2  # a trim just below ½ is rounded up as well
        cut = min(int(self.trim * len(updates) + 1e-9), most)  # 0.29 × 100 is 29

        def mean(rows: Tensor, block: slice) -> Tensor:
            return rows.sort(dim=0).values[cut : len(rows) - cut].double().mean(dim=0)

        return updates.map(mean)


@dataclass(frozen=True)
class MultiKrum(Robust):
    """The mean of the m updates that are closest to their K − f − 2 nearest neighbours.

    An update's score is the sum of its squared distances to those neighbours; among equal scores, the lower
    client id is chosen. With m = 1 this is Krum. Distances are computed on trained weights only: BatchNorm's
    running statistics follow the data's scale and would dominate them.

    Attributes:
        byzantine: f, the number of updates that may be wrong; a round needs at least 2f + 3 updates.
        chosen: m, the number of updates in the mean, at most K − f; 0 for K − f.
    """

    name: ClassVar[str] = "multi_krum"
    source: ClassVar[str] = "Blanchard et al. 2017, Sections 4 and 6"
    byzantine: Annotated[int, AtLeast(0)] = 1
    chosen: Annotated[int, AtLeast(0)] = 0

    @property
    def least_updates(self) -> int:
        """Return 2f + 3: with fewer updates, Krum has no guarantee."""
        return 2 * self.byzantine + 3

    def refuse(self, setting: Setting) -> str | None:
        """Refuse cohorts of fewer than 2f + 3 clients, and means of more than K − f."""
        clients = self.cohort_size(setting)
        if clients < self.least_updates:
            return (
                f"'multi_krum' with byzantine = {self.byzantine} needs at least {self.least_updates} updates in a "
                f"round, and there are {clients}; set options.multi_krum.byzantine lower or train.participation "
                "higher"
            )
        if self.chosen > clients - self.byzantine:
            return (
                f"options.multi_krum.chosen is {self.chosen}, and {self.byzantine} of {clients} updates may be "
                "wrong (byzantine); choose fewer, or 0 for all others"
            )
        return None

    def combine(self, updates: DiskBuffer, current: Weights, buffers: frozenset[str]) -> Weights:
        """Compute the mean of the chosen updates."""
        clients = len(updates)
        trained = {name: torch.full_like(tensor, name not in buffers) for name, tensor in current.items()}
        gram = updates.gram(updates.flat(current), updates.flat(trained))
        squares = gram.diagonal()
        distances = (squares[:, None] + squares[None, :] - 2 * gram).clamp_min(0).fill_diagonal_(torch.inf)
        nearest = distances.sort(dim=1).values[:, : clients - self.byzantine - 2]
        best = nearest.sum(dim=1).sort(stable=True).indices
        honest = clients - self.byzantine  # may be fewer than `chosen`, if updates were lost
        kept = best[: min(self.chosen or honest, honest)].sort().values

        return updates.map(lambda rows, block: rows[kept].double().mean(dim=0))
