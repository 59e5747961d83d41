"""FedAvg: the weighted mean of client models (McMahan et al. 2017, Algorithm 1)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

import torch

from atoll.components.base import Aggregation, Fold, Models, Setting, Update, UpdateGeometry
from atoll.core.tree import Weights


class RunningMean:
    """A weighted mean that processes one model at a time and stores one.

    The k-th model moves the mean by its share of the weight so far, m ← m + (w_k / Σ_{j≤k} w_j)(x_k − m). Unlike a
    sum that is divided at the end, this needs no total, cannot overflow, and reproduces equal models bit for bit.
    For integer tensors (BatchNorm's counters), the mean has their type and takes their maximum.

    Attributes:
        mean: The mean of the models so far.
        totals: Σ_j |w_j| for each floating-point tensor.
    """

    def __init__(self) -> None:
        self.mean: Weights = {}
        self.totals: dict[str, float] = {}

    @torch.no_grad()
    def add(self, weights: Weights, weight: float, factors: Mapping[str, float] | None = None) -> None:
        """Fold in a model; each tensor is averaged over the models that contain it.

        Args:
            weights: The model; the caller may overwrite it afterwards.
            weight: w_k.
            factors: Factors of w_k by tensor. A negative factor changes the sign of the tensor, so that
                ``mean × totals`` is always the weighted sum.
        """
        for name, tensor in weights.items():
            if not tensor.is_floating_point():
                known = self.mean.get(name)
                self.mean[name] = tensor.clone() if known is None else torch.maximum(known, tensor)
                continue
            signed = weight * (factors[name] if factors is not None else 1.0)
            self.totals[name] = self.totals.get(name, 0.0) + abs(signed)
            end = tensor if signed >= 0 else -tensor
            if name not in self.mean:
                self.mean[name] = end.clone()
            elif signed:
                self.mean[name].lerp_(end, abs(signed) / self.totals[name])

    def rescale(self, factor: float) -> None:
        """Multiply all weights so far by a factor."""
        self.totals = {name: total * factor for name, total in self.totals.items()}


@dataclass
class Weighing:
    """The weight of an update, up to a factor that all updates share.

    Attributes:
        by: ``"uniform"``, a number that updates contain (``"samples"``, ``"batches"``), or ``"loss"``: exp(−L_k).
    """

    by: str
    _top: float = field(default=-math.inf, init=False)

    def __call__(self, update: Update) -> tuple[float, float]:
        """Return the update's weight, and the factor by which all earlier weights must first be multiplied.

        exp(−L_k) is computed relative to the largest value so far, to avoid overflow.
        """
        if self.by == "uniform":
            return 1.0, 1.0
        if self.by != "loss":
            number: float = update["samples"] if self.by == "samples" else update["batches"]
            return float(number), 1.0
        before, self._top = self._top, max(self._top, -update["loss"])
        return math.exp(-update["loss"] - self._top), math.exp(before - self._top)


@dataclass(frozen=True)
class FedAvg(Aggregation):
    """w ← Σ_k p_k w_k over the cohort, with p_k by ``weights``.

    Attributes:
        weights: ``"samples"`` (p_k ∝ n_k), ``"batches"`` (the mini-batches of an epoch, as SSD's and FedU²'s code
            does) or ``"uniform"`` (Dec-SSL).
    """

    name: ClassVar[str] = "fedavg"
    source: ClassVar[str] = "McMahan et al. 2017, Algorithm 1"
    weights: Literal["samples", "batches", "uniform"] = "samples"

    @property
    def statistics(self) -> tuple[str, ...]:
        """Name the number from which p_k is computed."""
        return () if self.weights == "uniform" else (self.weights,)

    def open(self, models: Models, setting: Setting, round: int, scratch: Path | None) -> Fold:
        """Start a round's mean."""
        return MeanFold(models["global"], self.weights)


class MeanFold:
    """The running mean of a round, Σ_k p_k w_k.

    Args:
        current: The model at the start of the round.
        weights: How p_k is computed (see `Weighing`).
    """

    def __init__(self, current: Weights, weights: str) -> None:
        self._current = current
        self._weigh = Weighing(weights)
        self._mean = RunningMean()

    def add(self, client: int, update: Update, geometry: UpdateGeometry | None = None) -> None:
        """Fold in one client's model; a mean does not need its geometry."""
        weight, earlier = self._weigh(update)
        if earlier != 1:
            self._mean.rescale(earlier)
        self._mean.add(update["weights"], weight)

    def close(self) -> Models:
        """Return the mean; tensors that no client sent are unchanged, and so is the model if no client sent one."""
        mean = self._mean.mean
        return {"global": {**self._current, **mean} if mean else self._current}
