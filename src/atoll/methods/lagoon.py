"""Lagoon: clients take turns, so that the steps of a sweep follow one another.

    a sweep:     the K clients in a new random order, split into G groups; a round for each group
    round r:     w_r = Σ_k p_k w_k over the round's group, each client trained from w_{r−1}

A sweep sends the model to each client once, as a round of FedAvg does. It costs as many images and bytes as that
round, and takes G times as many consecutive steps. With G = K every client has a turn of its own; G = 1 is FedAvg.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from atoll.aggregation.fedavg import FedAvg
from atoll.components.base import Setting
from atoll.core.rng import stream
from atoll.core.schema import Whole
from atoll.methods.method import Method
from atoll.objectives.align_uniform import AlignUniform


@dataclass(frozen=True)
class Relay(FedAvg):
    """FedAvg over groups of clients that take turns.

    Attributes:
        weights: p_k within a group: ``"samples"``, ``"batches"`` or ``"uniform"``.
        groups: G, the number of groups of a sweep, each of ⌊K/G⌋ or ⌈K/G⌉ clients; with 0, or more than K, every
            client is a group.
    """

    name: ClassVar[str] = "relay"
    source: ClassVar[str] = "docs/methods/lagoon.md"
    groups: Whole = 0

    def refuse(self, setting: Setting) -> str | None:
        """Refuse a share of the clients, because turns determine who takes part in a round."""
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
