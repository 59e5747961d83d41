"""Local-only training: each client trains alone, the lower baseline of every comparison.

All clients start with the same weights and exchange nothing afterwards: ``method.merge = "local_only"`` makes the
local-only counterpart of any method. Each client ends with a personal model, and a report shows the mean of their
results.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from atoll.aggregation.fedavg import FedAvg
from atoll.components.base import ClientContext, Merge
from atoll.core.tree import Tree, Weights
from atoll.methods.method import Method
from atoll.objectives.simclr import SimCLR


@dataclass(frozen=True)
class LocalOnly(Merge):
    """w_k ← w_k: a client continues with its retained networks, and sends no weights."""

    name: ClassVar[str] = "local_only"
    source: ClassVar[str] = "the lower baseline of a comparison"
    keeps: ClassVar[tuple[str, ...]] = ("its networks",)
    personalises: ClassVar[bool] = True
    alone: ClassVar[bool] = True
    shares: ClassVar[str] = ""

    def private(self, networks: nn.ModuleDict) -> set[str]:
        """Name all weights."""
        return set(networks.state_dict())

    def join(self, context: ClientContext, downloaded: Weights) -> Weights:
        """Return the retained networks; the first time, the initial networks that all clients share."""
        retained: Weights | None = context.of(self).retained
        return downloaded if retained is None else retained

    def keep(self, context: ClientContext) -> Tree:
        """Retain the trained networks."""
        return {name: value.detach() for name, value in context.networks.state_dict().items()}

    def personal(self, weights: Weights, retained: Tree) -> Weights:
        """Return the client's networks."""
        return weights if retained is None else retained


METHOD = Method(
    objective=SimCLR(),
    merge=LocalOnly(),
    aggregation=FedAvg(weights="uniform"),
    title="Local only",
    paper="Each client alone; the lower baseline",
    family="Personalised and clustered methods",
)
