"""FedAvg: the weighted mean of client models (McMahan et al. 2017, Algorithm 1)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import Tensor

from atoll.parts import Aggregation, Setting
from atoll.tree import Tree, Weights


class RunningMean:
    """A weighted mean that takes one model at a time and holds one.

    The k-th model moves the mean by its share of the weight so far, m ← m + (w_k / Σ_{j≤k} w_j)(x_k − m). Unlike a
    sum that is divided at the end, this needs no total, cannot overflow, and gives equal models back to the bit.
    Integer tensors (BatchNorm's counters) keep their type and take the maximum.
    """

    def __init__(self) -> None:
        self.total = 0.0
        self.mean: Weights = {}

    def add(self, weights: Weights, weight: float) -> None:
        """Fold in a model; tensors it lacks are averaged over the models that have them."""
        if not self.mean:
            self.mean = {name: tensor.detach().clone() for name, tensor in weights.items()}
            self.total = weight
            return
        self.total += weight
        share = weight / self.total if self.total else 0.0
        floats = [name for name, tensor in weights.items() if tensor.is_floating_point()]
        torch._foreach_lerp_([self.mean[name] for name in floats], [weights[name] for name in floats], share)
        for name, tensor in weights.items():
            if not tensor.is_floating_point():
                torch.maximum(self.mean[name], tensor, out=self.mean[name])


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
        """What p_k is made from."""
        return () if self.weights == "uniform" else (self.weights,)

    def open(self, models: Tree, setting: Setting, round: int, scratch: Path | None) -> FedAvgFold:
        """Begin a round's mean."""
        return FedAvgFold(models["global"], self.weights)


class FedAvgFold:
    """The running mean of a round."""

    def __init__(self, current: Weights, weights: str) -> None:
        self._current = current
        self._weights = weights
        self._mean = RunningMean()

    def add(self, client: int, update: Tree) -> None:
        """Fold in one client's model."""
        weight = 1.0 if self._weights == "uniform" else float(update[self._weights])
        self._mean.add(update["weights"], weight)

    def close(self) -> Tree:
        """The mean; tensors that no client sent stay as they were."""
        return {"global": {**self._current, **self._mean.mean}}


def float_names(weights: Weights) -> list[str]:
    """Names of the floating-point tensors."""
    return [name for name, tensor in weights.items() if tensor.is_floating_point()]


def flat(weights: Weights) -> Tensor:
    """All floating-point tensors as one vector."""
    return torch.cat([weights[name].reshape(-1) for name in float_names(weights)])
