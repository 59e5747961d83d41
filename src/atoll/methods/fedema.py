"""FedEMA: divergence-aware exponential moving average (Zhuang et al., ICLR 2022).

A client mixes what it downloads with its own networks of the last round,

    θ_k ← μ_k θ_k + (1 − μ_k) θ,    μ_k = min(λ_k d_k, 1),    λ_k = τ / d_k at its first measurement,

for encoder, projector and predictor (Eqs. 1-3). d_k is the distance by which its last training moved its
encoder's shared weights from the mixture (see `atoll.methods.fedu.drift`), and λ_k, the autoscaler, is constant.
Parameters are mixed; BatchNorm's statistics are downloaded. The client retains its target network (see `BYOL`). A
client that did not take part in the previous round resets the online and the target network to the download.
Clients send the same data as with FedAvg.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch

from atoll.components.base import ClientContext, Merge
from atoll.core.schema import AtLeast
from atoll.core.tree import Tree, Weights
from atoll.methods.fedu import drift
from atoll.methods.method import Method
from atoll.models.norms import named_weights
from atoll.objectives.byol import BYOL


@dataclass(frozen=True)
class FedEMA(Merge):
    """The divergence-aware moving average with the autoscaler.

    Attributes:
        tau: τ, the value of μ_k in the client's second round.
        skip: Weights with names that contain one of these strings are excluded from d_k. The released code excludes
            the shortcuts: ``["downsample"]``.
    """

    name: ClassVar[str] = "fedema"
    source: ClassVar[str] = "Zhuang et al. 2022 (FedEMA), Eqs. 1-3"
    keeps: ClassVar[tuple[str, ...]] = ("its networks", "how far its encoder moved, and λ_k")
    consecutive_rounds: ClassVar[bool] = True
    needs_steps: ClassVar[bool] = True
    tau: Annotated[float, AtLeast(0)] = 0.7
    skip: tuple[str, ...] = ()

    def join(self, context: ClientContext, downloaded: Weights) -> Weights:
        """Mix: μ_k θ_k + (1 − μ_k) θ; a client that missed a round is reset to the download."""
        start = self._start(context, downloaded)
        # With `method.share`, the client's own weights replace the others before it trains.
        context.of(self).before = {name: start[name] for name in context.shared}
        return start

    def _start(self, context: ClientContext, downloaded: Weights) -> Weights:
        retained = context.of(self).retained
        if retained is None or retained["round"] != context.round - 1:
            context.reset = True
            return downloaded
        mu = min(retained["scaler"] * retained["divergence"], 1.0)
        mixed = {name: torch.lerp(downloaded[name], own, mu) for name, own in retained["parameters"].items()}
        return {**downloaded, **mixed}

    def keep(self, context: ClientContext) -> Tree:
        """Retain the trained parameters, d_k, and λ_k = τ / d_k of the first measurement."""
        scope = context.of(self)
        retained, divergence = scope.retained, drift(context.networks["encoder"], scope.before, self.skip)
        scaler = retained["scaler"] if retained else 0.0
        weights = named_weights(context.networks).items()
        return {
            "round": context.round,
            "parameters": {name: p.detach() for name, p in weights if name not in context.fixed},
            "divergence": divergence,
            "scaler": scaler or (self.tau / divergence if divergence else 0.0),
        }


METHOD = Method(
    objective=BYOL(),
    merge=FedEMA(),
    title="FedEMA",
    paper="Zhuang et al., Divergence-aware Federated Self-Supervised Learning, ICLR 2022",
    family="Federated self-supervised methods",
)
