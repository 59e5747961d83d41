"""Lagoon: clients take turns, so that the steps of a sweep follow one another.

    a sweep:     the K clients in an order drawn anew, split into G groups; a round for each group
    round r:     w_r = Σ_k p_k w_k over the round's group, each client trained from w_{r−1}

A sweep sends the model to each client once, as a round of FedAvg does: as many images and bytes, and G times the
steps in a row. G = K is a turn for every client alone, G = 1 is FedAvg.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from atoll.aggregation.fedavg import FedAvg
from atoll.components.base import VIEWS, Batch, ClientContext, Forward, Passes, Setting, Term
from atoll.core.devices import upload
from atoll.core.rng import stream
from atoll.core.schema import Positive, Whole
from atoll.methods.method import Method
from atoll.objectives.align_uniform import AlignUniform


@dataclass(frozen=True)
class Relay(FedAvg):
    """FedAvg over groups of clients that take turns.

    Attributes:
        weights: p_k within a group: ``"samples"``, ``"batches"`` or ``"uniform"``.
        groups: G, the groups of a sweep, of ⌊K/G⌋ or ⌈K/G⌉ clients; 0, or more than K: every client alone.
    """

    name: ClassVar[str] = "relay"
    source: ClassVar[str] = "docs/methods/lagoon.md"
    groups: Whole = 0

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

    def cohort_size(self, setting: Setting) -> int:
        """Return the size of the smallest group."""
        return setting.num_clients // self.turns(setting)


@dataclass(frozen=True)
class Relations(Term):
    """Keeps the relations that the received model sees between a client's images, as a turn goes on.

    Attributes:
        temperature: τ of the softmax over the other images of the batch.
    """

    name: ClassVar[str] = "relations"
    source: ClassVar[str] = "docs/methods/lagoon.md"
    temperature: Positive = 0.25

    def forwards(self) -> Sequence[Forward]:
        """Pass both views through the local networks."""
        return VIEWS

    def start(self, context: ClientContext) -> None:
        """Compute the received model's embeddings of the images."""
        received = context.frozen("global", context.received)
        (context.of(self).anchors,) = context.outputs(received, "z")

    def loss(self, context: ClientContext, batch: Batch, passes: Passes) -> Tensor:
        """Mean KL(received ‖ local) of the similarities of an image to the others."""
        anchors = context.of(self).anchors
        a, one, two = (
            torch.nn.functional.normalize(rows, dim=1)
            for rows in (anchors[upload(batch.indices, anchors.device)], *(passes[view].z for view in VIEWS))
        )
        others = ~torch.eye(len(a), dtype=torch.bool, device=a.device)
        target, local = (
            (similar[others].view(len(a), -1) / self.temperature).log_softmax(dim=1)
            for similar in (a @ a.T, one @ two.T)
        )
        return torch.nn.functional.kl_div(local, target, log_target=True, reduction="batchmean")


METHOD = Method(
    objective=AlignUniform(),
    aggregation=Relay(),
    title="Lagoon",
    paper="Atoll, 2026: FedAlignUniform whose clients take turns",
    family="Federated self-supervised methods",
)
RELATED = replace(METHOD, terms=(Relations(),))
