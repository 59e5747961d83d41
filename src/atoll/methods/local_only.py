"""Local-only training: each client alone, the lower line of every comparison.

All clients begin with the same weights, and from then on nothing passes between them:
``method.merge = "local_only"`` makes the local-only counterpart of any method. Each client ends with a model of
its own, and a report shows their mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from atoll.aggregation.fedavg import FedAvg
from atoll.methods.method import Method
from atoll.objectives.simclr import SimCLR
from atoll.parts import Local, Merge
from atoll.tree import Tree, Weights


@dataclass(frozen=True)
class LocalOnly(Merge):
    """w_k ← w_k: a client goes on with its own networks, and sends no weights."""

    name: ClassVar[str] = "local_only"
    source: ClassVar[str] = "the lower line of a comparison"
    keeps: ClassVar[tuple[str, ...]] = ("its networks",)
    personalises: ClassVar[bool] = True
    alone: ClassVar[bool] = True
    shares: ClassVar[str] = ""

    def private(self, networks: nn.ModuleDict) -> set[str]:
        """Everything."""
        return set(networks.state_dict())

    def join(self, local: Local, downloaded: Weights) -> Weights:
        """The client's own networks; at its first time, those that all begin with."""
        own: Weights | None = local.of(self).own
        return downloaded if own is None else own

    def keep(self, local: Local) -> Tree:
        """The networks as trained."""
        return {name: value.detach() for name, value in local.networks.state_dict().items()}

    def personal(self, weights: Weights, own: Tree) -> Weights:
        """The client's networks."""
        return weights if own is None else own


METHOD = Method(
    objective=SimCLR(),
    merge=LocalOnly(),
    aggregation=FedAvg(weights="uniform"),
    title="Local only",
    paper="Each client alone; the lower line",
    family="Personalised and clustered methods",
)
