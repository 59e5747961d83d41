"""Server steps: the update from the model w at the start of a round and the folded model w̄ to the next model.

    direct:  w ← w̄
    FedAvgM: v ← β v + Δ,  w ← w + η v
    FedAdam: m ← β₁ m + (1 − β₁) Δ,  v ← β₂ v + (1 − β₂) Δ²,  w ← w + η m / (√v + τ)

with Δ = w̄ − w, the negative pseudo-gradient. Only trained weights take these steps; BatchNorm's running
statistics, for which momentum has no meaning, take their folded values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch

from atoll.components.base import ServerStep, Setting
from atoll.core.schema import AtLeast, Below, Positive
from atoll.core.tree import Tree, Weights

Decay = Annotated[float, AtLeast(0), Below(1)]


@dataclass(frozen=True)
class Direct(ServerStep):
    """w ← w̄."""

    name: ClassVar[str] = "direct"
    source: ClassVar[str] = "McMahan et al. 2017, Algorithm 1"


def pseudo_gradient(current: Weights, folded: Weights, setting: Setting) -> Weights:
    """Compute Δ = w̄ − w for the trained weights."""
    trained = [name for name, w in current.items() if w.is_floating_point() and name not in setting.buffers]
    return {name: folded[name] - current[name] for name in trained}


@dataclass(frozen=True)
class FedAvgM(ServerStep):
    """Server momentum. With ``momentum`` 0 and ``server_lr`` 1 this is FedAvg.

    Attributes:
        server_lr: η.
        momentum: β.
    """

    name: ClassVar[str] = "fedavgm"
    source: ClassVar[str] = "Hsu et al. 2019, Section 4.3"
    needs_steps: ClassVar[bool] = True
    server_lr: Positive = 1.0
    momentum: Decay = 0.9

    def step(self, state: Tree, current: Weights, folded: Weights, setting: Setting) -> tuple[Tree, Weights]:
        """Return the velocity v and the next w."""
        velocity = pseudo_gradient(current, folded, setting)
        if state:
            for name, delta in velocity.items():
                delta.add_(state["velocity"][name], alpha=self.momentum)
        moved = {name: torch.add(current[name], v, alpha=self.server_lr) for name, v in velocity.items()}
        return {"velocity": velocity}, {**folded, **moved}


@dataclass(frozen=True)
class FedAdam(ServerStep):
    """Adam at the server, without bias correction; v starts at τ², as in the paper.

    Attributes:
        server_lr: η.
        beta1: β₁.
        beta2: β₂.
        adaptivity: τ.
    """

    name: ClassVar[str] = "fedadam"
    source: ClassVar[str] = "Reddi et al. 2021, Algorithm 2"
    needs_steps: ClassVar[bool] = True
    server_lr: Positive = 0.01
    beta1: Decay = 0.9
    beta2: Decay = 0.99
    adaptivity: Positive = 1e-3

    def step(self, state: Tree, current: Weights, folded: Weights, setting: Setting) -> tuple[Tree, Weights]:
        """Return the moments m and v, and the next w."""
        deltas = pseudo_gradient(current, folded, setting)
        if not state:
            state = {
                "m": {name: torch.zeros_like(delta) for name, delta in deltas.items()},
                "v": {name: torch.full_like(delta, self.adaptivity**2) for name, delta in deltas.items()},
            }
        first = {name: torch.lerp(state["m"][name], delta, 1 - self.beta1) for name, delta in deltas.items()}
        second = {
            name: torch.lerp(state["v"][name], delta.square(), 1 - self.beta2)
            for name, delta in deltas.items()
        }
        moved = {
            name: torch.addcdiv(current[name], m, second[name].sqrt() + self.adaptivity, value=self.server_lr)
            for name, m in first.items()
        }
        return {"m": first, "v": second}, {**folded, **moved}
