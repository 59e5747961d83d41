"""Aggregation by a sum of terms that clients compute, so that the server need learn only the sum.

    s_k = clip(δ_k w_k − w),  p_k ∈ [0, 1]        at the client; w is the model of the round
    w ← w + Σ_k p_k s_k / Σ_k p_k                 at the server, from the two sums

δ_k = 1 is FedAvg; p_k = exp(−L_k) is the loss-weighted mean; the cosines of L-DAWA (Eqs. 2-6) need only w and w_k,
which the client has. Each term is rounded to whole numbers, and these are added modulo 2³², where random masks
cancel exactly: over Flower (`atoll.engines.flower.masks`), the server receives masked numbers and learns their sum.
A simulation adds the same numbers without masks, and ends with the same weights to the bit.

The server cannot check a term that it cannot see. Two rules replace the update checks: clients clip their steps, to
the norm C and to the largest change of a weight, and the server bounds the sum, because clipped steps of n clients
add up to at most nC.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from atoll.aggregation.fedavg import Weighing, counted
from atoll.components.base import Aggregation, Models, Setting, Trained, Update, UpdateGeometry
from atoll.core.errors import RunError, UserError
from atoll.core.schema import Above, AtMost, Positive
from atoll.core.tree import Tree, Weights
from atoll.data.client_data import num_batches

MODULUS = 2**32
LARGEST_LOSS = 1000.0  # limit of the mean loss, which is added like a weight
ROUNDING = 1e-3  # relative tolerance of the bound on the sum, for the rounding of the terms
NUMBERS = 3  # count of the last numbers of a term: the weight, the loss, and whether there is a loss
LEAST_WEIGHT = 1e3  # of a sum, in units of its rounding; with less weight, the mean step would be noise


@dataclass(frozen=True)
class SecureSum(Aggregation):
    """w ← w + Σ_k p_k s_k / Σ_k p_k with s_k = clip(δ_k w_k − w), from sums of whole numbers modulo 2³².

    Attributes:
        weights: p_k: ``"samples"`` (the client's images over those of the largest client), ``"batches"``,
            ``"uniform"``, or ``"loss"`` (exp(−L_k), see ``least_loss``).
        divergence: δ_k: ``"none"`` (1, FedAvg), ``"layers"`` (the cosine of each tensor to the model's, L-DAWA),
            or ``"model"`` (one cosine, M-DAWA).
        clip: C, the norm to which a client clips its step.
        largest_change: Largest change of a weight in a step; larger ones are clipped. The resolution is this value
            times the number of clients in a round, divided by 2³¹.
        least_loss: With ``weights = "loss"``, p_k = exp(least_loss − L_k); smaller losses count as this one.
        threshold: Share of a round's clients that must stay until its end. That many clients together can also
            open another client's masks.
    """

    name: ClassVar[str] = "secure_sum"
    source: ClassVar[str] = "Bonawitz et al. 2017, with the terms of McMahan et al. 2017 and L-DAWA"
    keeps_updates: ClassVar[bool] = False
    only_weights: ClassVar[bool] = True
    clips: ClassVar[bool] = True
    hides_updates: ClassVar[bool] = True
    masking: ClassVar[str] = (
        "all of these only masked, over Flower: as one term of the sites' sum; beside it, for each other "
        "site, some hundred bytes of public keys, encrypted shares of secrets, and commitments"
    )
    weights: Literal["samples", "batches", "uniform", "loss"] = "samples"
    divergence: Literal["none", "layers", "model"] = "none"
    clip: Positive = 100.0
    largest_change: Positive = 1.0
    least_loss: float = 0.0
    threshold: Annotated[float, Above(0.5), AtMost(1)] = 2 / 3

    @property
    def statistics(self) -> tuple[str, ...]:
        """Name the number from which p_k is computed."""
        return counted(self.weights)

    @property
    def least_updates(self) -> int:
        """A sum of one update would reveal it."""
        return 2

    def refuse(self, setting: Setting) -> str | None:
        """Refuse settings in which the result is not a sum of several bounded terms."""
        if setting.train.bn_buffers == "average":
            return (
                "BatchNorm's running statistics change by more than a bounded step, and its counters are no sum; "
                "set train.bn_buffers = 'local' or 'leave' for secure aggregation"
            )
        if setting.train.max_share < 1 and self.weights != "uniform":
            return (
                "train.max_share caps a client's weight against the others', which a sum does not show; set it to "
                "1, or options.secure_sum.weights = 'uniform'"
            )
        return super().refuse(setting)

    def constants(self, setting: Setting, prerequisites: Mapping[str, Trained]) -> Tree:
        """Return the largest weight; clients divide their weights by it, so that these are at most 1."""
        largest = max(setting.sizes, default=1)
        train = setting.train
        batches = num_batches(largest, train.batch_size, train.drop_last)
        return {"largest": {"samples": largest, "batches": max(batches, 1)}.get(self.weights, 1)}

    def open(self, models: Models, setting: Setting, round: int, scratch: Path | None) -> SumFold:
        """Start a round's sum."""
        return SumFold(models["global"], self, setting)

    def least(self, clients: int) -> int:
        """Number of a round's clients that must stay until its end."""
        return max(self.least_updates, math.ceil(self.threshold * clients))

    def encode(
        self, update: Update, geometry: UpdateGeometry, model: Weights, setting: Setting, largest: float
    ) -> Tensor:
        """Return a client's term as whole numbers in [0, 2³²), of shape (d,), in int64.

        Args:
            update: The client's update.
            geometry: Its geometry.
            model: The model of the round.
            setting: The run's setting.
            largest: The largest weight (see `constants`).

        Raises:
            UserError: The update or its loss is not finite; a single such value would defeat the clipping.
        """
        names = summed(update["weights"], setting)
        factors = self._factors(geometry, names)
        ends = (update["weights"][name].double().cpu() * factors.get(name, 1.0) for name in names)
        step = torch.cat(
            [(end - model[name].double().cpu()).flatten() for name, end in zip(names, ends, strict=True)]
        )
        norm, loss = float(step.norm()), update["losses"].get("loss", 0.0)
        told = float("loss" in update["losses"])  # a client may withhold its losses
        if not all(map(math.isfinite, (norm, loss, update.get("loss", 0.0)))):
            raise UserError("training diverged: the update or its loss is not finite; lower train.lr")
        step *= min(1.0, self.clip / max(norm, 1e-30))
        step.clamp_(-self.largest_change, self.largest_change)
        weight = min(1.0, self._weight(update) / largest)
        numbers = torch.tensor([weight, loss / LARGEST_LOSS, told], dtype=torch.float64)
        term = torch.cat([weight * step / self.largest_change, numbers])
        return torch.round((term.clamp(-1, 1) + 1) / 2 * _levels(setting)).long()

    def decode(
        self, total: Tensor, clients: int, model: Weights, setting: Setting
    ) -> tuple[Models, float | None]:
        """Return the next models and the mean loss from the sum of ``clients`` terms.

        If a client withheld its loss, the mean is None.

        Raises:
            RunError: Clipped terms cannot add up to this sum, or their weights vanish.
        """
        levels = _levels(setting)
        values = total.double() / levels * 2 - clients
        step, (weight, loss, told) = values[:-NUMBERS] * self.largest_change, values[-NUMBERS:].tolist()
        norm = float(step.norm())
        if abs(weight) < LEAST_WEIGHT * clients / levels:
            remedy = (
                "raise options.secure_sum.least_loss to about the smallest loss"
                if self.weights == "loss"
                else "set options.secure_sum.weights = 'uniform'"
            )
            raise RunError(
                f"the weights of {clients} updates add up to {weight:.2g}, which is lost in the rounding of "
                f"secure aggregation; {remedy}"
            )
        if not 0 < weight <= clients * (1 + ROUNDING) or norm > clients * self.clip * (1 + ROUNDING):
            raise RunError(
                f"the sum of {clients} updates has the norm {norm:.4g} and the weight {weight:.4g}, which "
                f"updates clipped to {self.clip:g} cannot give, so a client did not clip its own; the server "
                "cannot see which: run the sites in smaller groups to find out"
            )
        names = summed(model, setting)
        parts = torch.split(step / weight, [model[name].numel() for name in names])
        moved = {
            name: (model[name].double().cpu() + part.reshape(model[name].shape)).to(model[name].dtype)
            for name, part in zip(names, parts, strict=True)
        }
        # A mean over fewer clients would reveal more of a single client's loss.
        mean = loss / clients * LARGEST_LOSS if round(told) == clients else None
        return {"global": {**model, **moved}}, mean

    def _factors(self, geometry: UpdateGeometry, names: list[str]) -> dict[str, float]:
        if self.divergence == "none":
            return {}
        if self.divergence == "model":
            return dict.fromkeys(names, geometry.cosine(names))
        return {name: geometry.cosine([name]) for name in names}

    def _weight(self, update: Update) -> float:
        if self.weights == "loss":
            return math.exp(min(0.0, self.least_loss - update["loss"]))
        return Weighing(self.weights)(update)[0]


class SumFold:
    """The sum of a round's terms."""

    def __init__(self, current: Weights, options: SecureSum, setting: Setting) -> None:
        self._current = current
        self._options = options
        self._setting = setting
        self._largest = options.constants(setting, {})["largest"]
        self._total: Tensor | None = None
        self._clients = 0

    def add(self, client: int, update: Update, geometry: UpdateGeometry) -> None:
        """Add one client's term; only in a simulation, where this process may see it.

        The term is not decoded: rounding may hide a small client's term, but the sum is still right.
        """
        options, setting = self._options, self._setting
        self._add(options.encode(update, geometry, self._current, setting, self._largest), 1)

    def add_total(self, total: Tensor, clients: int) -> float | None:
        """Add the sum of several clients' terms; return their mean loss, or None if a client withheld its own.

        Raises:
            RunError: See `SecureSum.decode`.
        """
        self._add(total, clients)
        return self._options.decode(total, clients, self._current, self._setting)[1]

    def close(self) -> Models:
        """Return the next models; without a term, the model is unchanged."""
        if self._total is None:
            return {"global": self._current}
        return self._options.decode(self._total, self._clients, self._current, self._setting)[0]

    def _add(self, total: Tensor, clients: int) -> None:
        self._total = total if self._total is None else (self._total + total) % MODULUS
        self._clients += clients


def summed(weights: Weights, setting: Setting) -> list[str]:
    """Names of the weights that are summed, in their order."""
    return sorted(
        name
        for name, weight in weights.items()
        if weight.is_floating_point() and name not in setting.local_only
    )


def vector_size(model: Weights, setting: Setting) -> int:
    """Number of whole numbers in a term."""
    return sum(model[name].numel() for name in summed(model, setting)) + NUMBERS


def _levels(setting: Setting) -> int:
    """Number of levels to which numbers are rounded, so that the sum over a round's clients stays below 2³²."""
    return int((MODULUS - 1) // max(setting.train.cohort_size(setting.num_clients), 1))
