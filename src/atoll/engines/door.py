"""The door: every update is checked before it is folded (promise 4 of the design)."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field

import torch

from atoll.methods.method import Method
from atoll.parts import Setting
from atoll.tree import Tree, Weights, leaves

HISTORY = 1000  # accepted distances that the median looks back on


@dataclass
class Door:
    """Checks updates and remembers how far accepted ones went.

    Attributes:
        method: which update forms are right.
        setting: of the run.
        names: the weights that an update must hold, no more and no less.
        norms: accepted distances of earlier rounds.
        fresh: accepted distances of this round.
    """

    method: Method
    setting: Setting
    names: frozenset[str]
    norms: list[float] = field(default_factory=list)
    fresh: list[float] = field(default_factory=list)

    def bound(self) -> float:
        """The distance from its model beyond which an update is refused."""
        train = self.setting.train
        return train.norm_factor * statistics.median(self.norms) if self.norms else train.first_norm

    def refuse(self, update: Tree, models: Tree) -> str | None:
        """Why an update must not be folded, in a sentence; None if it may."""
        reason = self._form(update)
        if reason:
            return reason
        try:
            reference = self.method.aggregation.reference(models, update)
        except (KeyError, TypeError, ValueError):
            return "it names no model that it was sent"
        return (
            self._tensors(update["weights"], reference)
            or self._rest(update)
            or self.method.refuse_update(update, self.setting)
            or self._distance(update["weights"], reference)
        )

    def close_round(self) -> None:
        """Let this round's accepted distances count from the next round on."""
        self.norms = (self.norms + self.fresh)[-HISTORY:]
        self.fresh = []

    def _form(self, update: Tree) -> str | None:
        if not isinstance(update, dict) or not isinstance(update.get("weights"), dict):
            return "it is not an update"
        if not isinstance(update.get("parts"), dict):
            return "it lacks its parts' slices"
        for name in self.method.aggregation.statistics:
            value = update.get(name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                return f"its {name!r} is {value!r}"
            if name != "loss" and value <= 0:
                return f"its {name!r} is {value!r}"
        return None

    def _tensors(self, weights: Weights, reference: Weights) -> str | None:
        missing, extra = self.names - weights.keys(), weights.keys() - self.names
        if missing:
            return f"it lacks {min(missing)!r} ({len(missing)} names missing)"
        if extra:
            return f"it holds {min(extra)!r}, which was not asked for ({len(extra)} such names)"
        for name, tensor in weights.items():
            model = reference[name]
            if not isinstance(tensor, torch.Tensor) or tensor.shape != model.shape:
                return f"{name!r} has shape {tuple(getattr(tensor, 'shape', ()))}, not {tuple(model.shape)}"
            if tensor.dtype != model.dtype:
                return f"{name!r} is {tensor.dtype}, not {model.dtype}"
        return None

    def _rest(self, update: Tree) -> str | None:
        for part, piece in update["parts"].items():
            for tensor in leaves(piece):
                if tensor.is_floating_point() and not torch.isfinite(tensor.sum()):
                    return f"its slice of {part!r} holds values that are not finite"
        return None

    def _distance(self, weights: Weights, reference: Weights) -> str | None:
        names = [name for name, tensor in weights.items() if tensor.is_floating_point()]
        if not names:
            return None
        moved = torch._foreach_sub([weights[name] for name in names], [reference[name] for name in names])
        norms = torch.stack(torch._foreach_norm(moved)).double()
        for name, norm in zip(names, norms.tolist(), strict=True):
            if not math.isfinite(norm):
                return f"{name!r} holds values that are not finite"
        distance = float(norms.square().sum().sqrt())
        if distance > self.bound():
            return (
                f"it lies {distance:.4g} from the model that it got, beyond the bound of {self.bound():.4g}"
            )
        self.fresh.append(distance)
        return None
