"""Update checks: every update is checked before it is folded (promise 4 in docs/promises.md)."""

from __future__ import annotations

import math
import reprlib
import statistics
from dataclasses import dataclass, field
from typing import TypeGuard, cast

import torch

from atoll.aggregation.update_geometry import Reference, UpdateGeometry
from atoll.components.base import Setting
from atoll.components.declaration import LARGEST, LEAF_BYTES, MOST_IMAGES, NAME_BYTES, PerWeight, max_bytes
from atoll.components.messages import Models, Slices, Update
from atoll.core.tree import Weights, leaves
from atoll.methods.method import Method, sends_undeclared

REASON_BYTES = 2**16  # size of an answer with the reason why there is no update
HISTORY = 1000  # number of the latest accepted distances from which the median is computed
DTYPES = {
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
}  # that a client may send; PyTorch cannot compute with all others


@dataclass
class UpdateChecks:
    """Checks updates and records the distances of accepted ones.

    Attributes:
        method: The method, which defines the form of an update.
        setting: The run's setting.
        names: Names of exactly the weights that an update must contain.
        buffers: Names of BatchNorm's running statistics among them. They follow the scale of the data, so the first
            round may change them by thousands; they must be finite but do not count in the distance.
        norms: Accepted distances of earlier rounds.
        distances: Accepted distances of this round.
    """

    method: Method
    setting: Setting
    names: frozenset[str]
    buffers: frozenset[str]
    norms: list[float] = field(default_factory=list)
    distances: list[float] = field(default_factory=list)
    _references: dict[int, Reference] = field(default_factory=dict)

    def bound(self) -> tuple[float, str]:
        """Return the largest accepted distance of an update from its model, and the option that sets it."""
        train = self.setting.train
        # If updates are clipped, the updates of other clients must not decide whether a client's is accepted.
        if self.norms and not self.method.aggregation.clips:
            return train.norm_factor * statistics.median(self.norms), "train.norm_factor"
        return train.first_norm, "train.first_norm"

    def open_round(self) -> None:
        """Clear what a failed round may have left."""
        self.distances = []
        self._references = {}

    def examine(self, answer: object, models: Models) -> UpdateGeometry | str:
        """Check an answer; return its update geometry, or the reason for refusal as a sentence.

        Args:
            answer: The answer of a client, of any form.
            models: The models that the client was sent.
        """
        reason = self._form(answer)
        if reason:
            return reason
        update = cast(Update, answer)  # its form has been checked; names, shapes and values follow
        try:
            reference = self.method.aggregation.reference(models, update)
        except (KeyError, TypeError, ValueError):
            return "it does not name a model that it was sent"
        reason = self._tensors(update["weights"], reference) or _bad_tensors(update["parts"])
        if reason:
            return reason
        try:
            reason = self.method.refuse_update(update, self.setting)
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            reason = f"its slices cannot be read ({error!r})"
        return reason or self._distance(update["weights"], reference)

    def close_round(self) -> None:
        """Add the accepted distances of this round to those that bound the next rounds."""
        self.norms = (self.norms + self.distances)[-HISTORY:]
        self.open_round()

    def _form(self, update: object) -> str | None:
        if not isinstance(update, dict) or not isinstance(update.get("weights"), dict):
            return "it is not an update"
        if not isinstance(update.get("parts"), dict):
            return "it lacks its components' slices"
        unknown = update["parts"].keys() - {component.name for component in self.method.components}
        if unknown:
            return (
                f"it contains a slice of {min(unknown, key=str)!r}, which is not a component of this method"
            )
        for name in self.method.aggregation.statistics:
            value = update.get(name)
            if not (is_number(value) if name == "loss" else is_count(value)):
                return f"its {name!r} is {reprlib.repr(value)}"
        losses = update.get("losses")
        if not isinstance(losses, dict) or not all(map(is_number, losses.values())):
            return "its losses are not finite numbers"
        return None

    def _tensors(self, weights: Weights, reference: Weights) -> str | None:
        missing, extra = self.names - weights.keys(), weights.keys() - self.names
        if missing:
            return f"it lacks {min(missing)!r} ({len(missing)} names missing)"
        if extra:
            return f"it contains {min(extra, key=str)!r}, which was not requested ({len(extra)} such names)"
        for name, tensor in weights.items():
            model = reference[name]
            if not isinstance(tensor, torch.Tensor) or tensor.shape != model.shape:
                return f"{name!r} has shape {tuple(getattr(tensor, 'shape', ()))}, not {tuple(model.shape)}"
            if tensor.dtype != model.dtype:
                return f"{name!r} is {tensor.dtype}, not {model.dtype}"
        return None

    def _distance(self, weights: Weights, reference: Weights) -> UpdateGeometry | str:
        if id(reference) not in self._references:
            # A reference holds its model, so that the model's id remains unique.
            self._references[id(reference)] = Reference(reference)
        geometry = self._references[id(reference)].measure(weights)
        for name, moved in geometry.moved.items():
            if not math.isfinite(moved):
                return f"{name!r} contains values that are not finite, or that overflow"
        distance = geometry.distance(self.buffers)
        bound, option = self.bound()
        if distance > bound:
            return (
                f"its distance from the model that it received is {distance:.4g}, beyond the bound of {bound:.4g} "
                f"({option})"
            )
        if distance > 0:  # a client that took no step gives no information about usual distances
            self.distances.append(distance)
        return geometry


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a number that is small enough to compute with."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


def is_count(value: object, least: int = 1) -> TypeGuard[int]:
    """Whether a value is a plausible number of images or batches at one client."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= MOST_IMAGES


def max_update_bytes(method: Method, setting: Setting, weights: Weights) -> int | None:
    """Largest size of a serialised update in bytes; None if a component does not declare its slice.

    Args:
        method: The method.
        setting: The run's setting.
        weights: The weights in an update; their values do not matter.
    """
    if any(map(sends_undeclared, method.components)):
        return None
    numbers = ["loss", *method.aggregation.statistics, *(component.name for component in method.components)]
    declared = [component.declares(setting) for component in method.components]
    return (
        max_bytes(PerWeight(), weights)
        + sum(max_bytes(spec, weights) for spec in declared if spec is not None)
        + sum(LEAF_BYTES + NAME_BYTES * len(name) for name in numbers)
        + REASON_BYTES
    )


def _bad_tensors(components: Slices) -> str | None:
    for component, piece in components.items():
        for tensor in leaves(piece):
            if tensor.dtype not in DTYPES:
                return f"its slice of {component!r} contains {tensor.dtype}, which is not supported"
            if tensor.is_floating_point() and not torch.isfinite(tensor.sum()):
                return f"its slice of {component!r} contains values that are not finite"
    return None
