"""Running means of models: with memory for one model, and with a bound on each model's share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

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


@dataclass(eq=False)
class _Held:
    """A model that is not in the mean yet, because its weight may be capped."""

    weights: Weights
    weight: float
    factors: Mapping[str, float] | None


class CappedMean:
    """A weighted mean in which each weight is at most a share s of the sum of all weights.

    The weights are min(w_k, c) with c = s Σ_j min(w_j, c). With fewer than 1/s models there is no such c, and all
    weights are equal. c is known only after the last model; at most the ⌊1/s⌋ heaviest models can exceed it, and
    they are kept until then.

    Args:
        max_share: s; 1 for a plain running mean.

    Attributes:
        total: Σ_k min(w_k, c) of the models in the mean; after `close`, of all.
    """

    def __init__(self, max_share: float = 1.0) -> None:
        self.total = 0.0
        self._share = max_share
        self._mean = RunningMean()
        self._room = 0 if max_share >= 1 else math.floor(1 / max_share + 1e-9)
        self._held: list[_Held] = []

    def add(self, weights: Weights, weight: float, factors: Mapping[str, float] | None = None) -> None:
        """Fold in a model; see `RunningMean.add`."""
        if self._room:
            lightest = min(self._held, key=lambda held: held.weight, default=None)
            if lightest is None or len(self._held) < self._room or weight > lightest.weight:
                copy = {name: tensor.clone() for name, tensor in weights.items()}
                self._held.append(_Held(copy, weight, factors))
                if lightest is None or len(self._held) <= self._room:
                    return
                self._held.remove(lightest)
                weights, weight, factors = lightest.weights, lightest.weight, lightest.factors
        self._fold(weights, weight, factors)

    def rescale(self, factor: float) -> None:
        """Multiply all weights so far by a factor."""
        self.total *= factor
        self._mean.rescale(factor)
        for held in self._held:
            held.weight *= factor

    def close(self) -> RunningMean:
        """Fold in the kept models with their capped weights, and return the mean."""
        capped = capped_weights([held.weight for held in self._held], self.total, self._share)
        for held, weight in zip(self._held, capped, strict=True):
            self._fold(held.weights, weight, held.factors)
        self._held = []
        return self._mean

    def _fold(self, weights: Weights, weight: float, factors: Mapping[str, float] | None) -> None:
        self.total += weight
        self._mean.add(weights, weight, factors)


def capped_weights(weights: Sequence[float], rest: float, share: float) -> list[float]:
    """Compute min(w_k, c) with c = s (Σ_k min(w_k, c) + r); all 1 if there is no such c above 0.

    Args:
        weights: w_k of the models that c may cap.
        rest: r, the weight of all others.
        share: s.

    Example:
        >>> from atoll.aggregation.running_mean import capped_weights
        >>> capped_weights([90.0, 5.0, 5.0], 0.0, 0.5)
        [10.0, 5.0, 5.0]
    """
    ordered, cap = sorted(weights, reverse=True), math.inf
    for capped, weight in enumerate(ordered):
        if weight * (1 - share * capped) <= share * (rest + math.fsum(ordered[capped:])):
            break
        left = 1 - share * (capped + 1)
        cap = share * (rest + math.fsum(ordered[capped + 1 :])) / left if left > 1e-9 else 0.0
    return [min(weight, cap) for weight in weights] if cap > 0 else [1.0] * len(weights)
