"""FedAvg: the weighted mean of client models (McMahan et al. 2017, Algorithm 1)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from atoll.aggregation.running_mean import CappedMean
from atoll.components.base import Aggregation, Fold, Models, Setting, Update, UpdateGeometry
from atoll.core.tree import Weights


@dataclass
class Weighing:
    """The weight of an update, up to a factor that all updates share.

    Attributes:
        by: ``"uniform"``, the name of a number in the updates (``"samples"``, ``"batches"``), or ``"loss"``:
            exp(−L_k).
    """

    by: str
    _top: float = field(default=-math.inf, init=False)

    def __call__(self, update: Update) -> tuple[float, float]:
        """Return the update's weight, and the factor by which all earlier weights must be multiplied first.

        exp(−L_k) is computed relative to the largest value so far, to avoid overflow.
        """
        if self.by == "uniform":
            return 1.0, 1.0
        if self.by != "loss":
            number: float = update["samples"] if self.by == "samples" else update["batches"]
            return float(number), 1.0
        before, self._top = self._top, max(self._top, -update["loss"])
        return math.exp(-update["loss"] - self._top), math.exp(before - self._top)


def counted(weights: str) -> tuple[str, ...]:
    """Name the number of an update from which p_k is computed (see `Weighing`); none if all p_k are equal."""
    return () if weights == "uniform" else (weights,)


@dataclass(frozen=True)
class FedAvg(Aggregation):
    """w ← Σ_k p_k w_k over the cohort, with p_k by ``weights``.

    Attributes:
        weights: ``"samples"`` (p_k ∝ n_k), ``"batches"`` (the number of mini-batches in an epoch, as in SSD's and
            FedU²'s code) or ``"uniform"`` (Dec-SSL).
    """

    name: ClassVar[str] = "fedavg"
    source: ClassVar[str] = "McMahan et al. 2017, Algorithm 1"
    keeps_updates: ClassVar[bool] = False
    weights: Literal["samples", "batches", "uniform"] = "samples"

    @property
    def statistics(self) -> tuple[str, ...]:
        """Name the number from which p_k is computed."""
        return counted(self.weights)

    def open(self, models: Models, setting: Setting, round: int, scratch: Path | None) -> Fold:
        """Start a round's mean."""
        return MeanFold(models["global"], self.weights, setting.train.max_share)


class MeanFold:
    """The running mean of a round, Σ_k p_k w_k.

    Args:
        current: The model at the start of the round.
        weights: How p_k is computed (see `Weighing`).
        max_share: Maximum p_k (see `CappedMean`).
    """

    def __init__(self, current: Weights, weights: str, max_share: float = 1.0) -> None:
        self._current = current
        self._weigh = Weighing(weights)
        self._mean = CappedMean(max_share)

    def add(self, client: int, update: Update, geometry: UpdateGeometry | None = None) -> None:
        """Fold in one client's model; a mean does not need its geometry."""
        weight, earlier = self._weigh(update)
        if earlier != 1:
            self._mean.rescale(earlier)
        self._mean.add(update["weights"], weight)

    def close(self) -> Models:
        """Return the mean. Tensors that no client sent are unchanged; so is the whole model without any update."""
        mean = self._mean.close().mean
        return {"global": {**self._current, **mean} if mean else self._current}
