"""Lagoon: clients take turns, so that the steps of a sweep follow one another.

    a sweep:     the K clients in an order drawn anew, split into G groups; a round for each group
    round r:     w_r = w_{r−1} + α_s (Σ_k p_k w_k − w_{r−1}) over the round's group, clients trained from w_{r−1}
    sweep s:     α_s falls from 1 to α_S by half a cosine

A sweep sends the model to each client once, as a round of FedAvg does: as many images and bytes, and G times the
steps in a row. G = K is a turn for every client alone, G = 1 is FedAvg.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from atoll.aggregation.fedavg import FedAvg, MeanFold
from atoll.components.base import Fold, Models, Setting
from atoll.core.rng import stream
from atoll.core.schema import Share, Whole
from atoll.core.tree import Weights
from atoll.methods.method import Method
from atoll.objectives.align_uniform import AlignUniform


class PartialStep(MeanFold):
    """The running mean of a round, and a step towards it.

    Args:
        current: The model at the start of the round.
        weights: How p_k is computed.
        max_share: Largest p_k.
        step: α.
    """

    def __init__(self, current: Weights, weights: str, max_share: float, step: float) -> None:
        super().__init__(current, weights, max_share)
        self._step = step

    def close(self) -> Models:
        """Return the model that is the share α of the way to the mean."""
        mean = super().close()
        if self._step == 1:
            return mean
        moved = {
            name: torch.lerp(w, mean["global"][name], self._step)
            if w.is_floating_point()
            else mean["global"][name]
            for name, w in self._current.items()
        }
        return {"global": moved}


@dataclass(frozen=True)
class Relay(FedAvg):
    """FedAvg over groups of clients that take turns.

    Attributes:
        weights: p_k within a group: ``"samples"``, ``"batches"`` or ``"uniform"``.
        last_step: α_S, the server's step in the last sweep, 1 for whole steps in all of them.
        groups: G, the groups of a sweep, of ⌊K/G⌋ or ⌈K/G⌉ clients; 0, or more than K: every client alone.
    """

    name: ClassVar[str] = "relay"
    source: ClassVar[str] = "docs/methods/lagoon.md"
    groups: Whole = 0
    last_step: Share = 1.0

    def refuse(self, setting: Setting) -> str | None:
        """Refuse a share of the clients, because turns say who takes part in a round."""
        if setting.train.participation == 1:
            return None
        return (
            "'relay' gives every client a turn; leave train.participation at 1.0 and set options.relay.groups"
        )

    def turns(self, setting: Setting) -> int:
        """Return the rounds of a sweep."""
        return min(self.groups or setting.num_clients, setting.num_clients)

    def cohort(self, setting: Setting, round: int) -> list[int]:
        """Return the clients of a round's group; a sweep is G rounds, and every client is in one of its groups."""
        groups = self.turns(setting)
        sweep, turn = divmod(round - 1, groups)
        order = torch.randperm(setting.num_clients, generator=stream(setting.seed, "relay", sweep))
        return order[turn::groups].tolist()

    def step(self, setting: Setting, round: int) -> float:
        """Return α of a round's sweep."""
        groups = self.turns(setting)
        progress = (round - 1) // groups / max((setting.train.rounds - 1) // groups, 1)
        return self.last_step + (1 - self.last_step) * 0.5 * (1 + math.cos(math.pi * progress))

    def open(self, models: Models, setting: Setting, round: int, scratch: Path | None) -> Fold:
        """Start a round's mean, towards which the server goes by α."""
        step = self.step(setting, round)
        return PartialStep(models["global"], self.weights, setting.train.max_share, step)

    def cohort_size(self, setting: Setting) -> int:
        """Return the size of the smallest group."""
        return setting.num_clients // self.turns(setting)


METHOD = Method(
    objective=AlignUniform(),
    aggregation=Relay(),
    title="Lagoon",
    paper="Atoll, 2026: FedAlignUniform whose clients take turns",
    family="Federated self-supervised methods",
)
