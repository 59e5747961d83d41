"""Lagoon: small groups of clients take turns, and the model that is kept is a mean over their turns.

    a sweep:  the K clients, in an order drawn anew, in G groups; a round for each group
    round r:  w_r = Σ_k p_k w_k over the round's group, each client trained from w_{r−1}
    kept:     w̄_r = w̄_{r−1} + α (w_r − w̄_{r−1}),   α = max(1/r, 1/(A G))

A sweep sends each client the model once, as one round of FedAvg does: the same images and bytes, and G times the
steps in a row. A sweep of one group, with A = 1, is FedAvg.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from atoll.aggregation.fedavg import FedAvg
from atoll.components.base import Deployment, Fold, Models, ServerState, Setting, Update, UpdateGeometry
from atoll.core.rng import stream
from atoll.core.schema import Count
from atoll.core.tree import Weights
from atoll.methods.method import Method
from atoll.objectives.align_uniform import AlignUniform

TRAINED, KEPT = "global", "kept"


@dataclass(frozen=True)
class Relay(FedAvg):
    """FedAvg over groups of clients that take turns.

    Attributes:
        weights: p_k within a group.
        groups: G, the groups of a sweep.
        sweeps: A, the sweeps over which the kept model is a mean; 0 keeps the last model.
    """

    name: ClassVar[str] = "relay"
    source: ClassVar[str] = "Atoll"
    groups: Count = 5
    sweeps: float = 0.0

    def refuse(self, setting: Setting) -> str | None:
        """Refuse more groups than clients."""
        if self.groups > setting.num_clients:
            return f"'relay' has {self.groups} groups for {setting.num_clients} clients; set options.relay.groups"
        return None

    def cohort(self, setting: Setting, round: int) -> list[int]:
        """Return the round's group: every client is in one group of a sweep."""
        sweep, turn = divmod(round - 1, self.groups)
        order = torch.randperm(setting.num_clients, generator=stream(setting.seed, "relay", sweep))
        return order[turn :: self.groups].tolist()

    def models(self, start: Weights, setting: Setting) -> Models:
        """Return w_0 and w̄_0."""
        return {TRAINED: start, KEPT: start} if self.sweeps else {TRAINED: start}

    def sent(self, models: Models, client: int) -> Models:
        """Send w."""
        return {TRAINED: models[TRAINED]}

    def open(self, models: Models, setting: Setting, round: int, scratch: Path | None) -> Fold:
        """Start a group's mean."""
        mean = super().open(models, setting, round, scratch)
        if not self.sweeps:
            return mean
        return KeptFold(mean, models[KEPT], max(1 / round, 1 / (self.sweeps * self.groups)))

    def deploy(self, models: Models, state: ServerState) -> Deployment:
        """Return w̄."""
        return Deployment({TRAINED: models.get(KEPT, models[TRAINED])})


class KeptFold:
    """The group's mean, and w̄."""

    def __init__(self, mean: Fold, kept: Weights, share: float) -> None:
        self._mean, self._kept, self._share = mean, kept, share

    def add(self, client: int, update: Update, geometry: UpdateGeometry) -> None:
        """Fold in a client's model."""
        self._mean.add(client, update, geometry)

    def close(self) -> Models:
        """Return the next w and w̄."""
        trained = self._mean.close()["global"]
        kept = {
            name: torch.lerp(self._kept[name], w, self._share) if w.is_floating_point() else w
            for name, w in trained.items()
        }
        return {TRAINED: trained, KEPT: kept}


METHOD = Method(
    objective=AlignUniform(),
    aggregation=Relay(sweeps=2.0),
    title="Lagoon",
    paper="Atoll",
    family="Federated self-supervised methods",
)
