"""Peer-to-peer learning: clients mix their models with their neighbours', and no server averages them.

(Wang et al., Dec-SSL, ICLR 2023, Appendix B.5.) Clients are the nodes of a graph. In every round each trains its
own model, and then all take one gossip step,

    w_i ← Σ_j W_ij w_j,     W_ij = 1/(1 + max(deg_i, deg_j)) for neighbours j,     W_ii = 1 − Σ_{j≠i} W_ij,

with Metropolis' weights: symmetric and doubly stochastic, so that the mean of all models stays what it was, and on
a connected graph the models draw together, faster where W's second eigenvalue is smaller. BatchNorm's statistics
are mixed with the rest. A client that takes no part in a round, or is lost, is mixed in with the model that it had.

The paper names the graphs (cycle, binary tree, Erdős–Rényi with p = 0.7) and leaves open the mixing weights, the
steps a round and which model it measures: these weights, one step and the mean of the clients' models are ours. Its
"star" is the federation with a server, which is `FedAvg`; the star here gossips like the other graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import Tensor

from atoll.aggregation.fedavg import RunningMean
from atoll.components.base import (
    Aggregation,
    ClientContext,
    Deployment,
    Models,
    ServerState,
    Setting,
    Update,
    UpdateGeometry,
)
from atoll.core.rng import stream
from atoll.core.schema import Share
from atoll.core.tree import Weights
from atoll.functional import metropolis_weights
from atoll.methods.method import Method
from atoll.objectives.simclr import SimCLR

DRAWS = 1000  # of a random graph, until it is connected


@dataclass(frozen=True)
class Gossip(Aggregation):
    """One gossip step over a fixed graph.

    Attributes:
        topology: Who talks to whom: ``"tree"`` is binary (client i hangs from client ⌊(i−1)/2⌋), ``"random"``
            Erdős–Rényi, drawn again until it is connected, and ``"star"`` has client 0 in its middle.
        edge_probability: p of the random graph.
        deploys: What the run ends with and what is measured: the ``"mean"`` of the clients' models, or ``"each"``
            client's own.
    """

    name: ClassVar[str] = "gossip"
    source: ClassVar[str] = "Wang et al. 2023 (Dec-SSL), Appendix B.5"
    only_weights: ClassVar[bool] = True  # nobody is there to fold anything else
    serverless: ClassVar[bool] = True
    topology: Literal["cycle", "tree", "random", "star", "complete"] = "cycle"
    edge_probability: Share = 0.7
    deploys: Literal["mean", "each"] = "mean"

    def refuse(self, setting: Setting) -> str | None:
        """Models reach everyone over a connected graph alone, and nobody has the mean of models that differ."""
        if setting.personal and self.deploys == "mean":
            return (
                "clients keep weights of their own, so the mean of their models is nobody's; set "
                f"options.{self.name}.deploys = 'each'"
            )
        return None if _connected(self.graph(setting)) else (
            f"{DRAWS:,} random graphs of {setting.num_clients} clients with edges of probability "
            f"{self.edge_probability} were not connected; raise options.{self.name}.edge_probability"
        )  # fmt: skip

    def graph(self, setting: Setting) -> Tensor:
        """Who talks to whom: bool (K, K), the same in all rounds."""
        if self.topology != "random":
            return GRAPHS[self.topology](setting.num_clients)
        draws = stream(setting.seed, "topology")
        for _ in range(DRAWS):
            uniform = torch.rand(setting.num_clients, setting.num_clients, generator=draws)
            edges = _both_ways(uniform < self.edge_probability)
            if _connected(edges):
                break
        return edges

    # The models: one a client. In a simulation one place holds them all, and hands each client its own.

    def models(self, start: Weights, setting: Setting) -> Models:
        """All clients begin with the same weights."""
        return {_name(client): start for client in range(setting.num_clients)}

    def sent(self, models: Models, client: int) -> Models:
        """A client gets its own, as its last gossip step left it."""
        return {"own": models[_name(client)]}

    def choose(self, context: ClientContext, models: Models) -> Weights:
        """Its own."""
        return models["own"]

    def reference(self, models: Models, update: Update) -> Weights:
        """Its own."""
        return models["own"]

    def open(self, models: Models, setting: Setting, round: int, scratch: Path | None) -> GossipFold:
        """Wait for the trained models."""
        return GossipFold(models, metropolis_weights(self.graph(setting).double()))

    def deploy(self, models: Models, state: ServerState) -> Deployment:
        """The mean of all models, or each client's own."""
        if self.deploys == "each":
            return Deployment(dict(models), dict(enumerate(models)))
        mean = RunningMean()
        for weights in models.values():
            mean.add(weights, 1.0)
        return Deployment({"mean": mean.mean})


class GossipFold:
    """A gossip step.

    Args:
        models: The clients' models, in order.
        weights: W, (K, K).
    """

    def __init__(self, models: Models, weights: Tensor) -> None:
        self._models = dict(models)
        self._weights = weights

    def add(self, client: int, update: Update, geometry: UpdateGeometry) -> None:
        """A client's trained model takes its old one's place."""
        trained = {name: tensor.clone() for name, tensor in update["weights"].items()}
        self._models[_name(client)] = {**self._models[_name(client)], **trained}

    def close(self) -> Models:
        """Every client's next model: the mean of its neighbourhood."""
        models = list(self._models.values())
        mixed = {}
        for name, row in zip(self._models, self._weights.tolist(), strict=True):
            mean = RunningMean()
            for model, weight in zip(models, row, strict=True):
                if weight:
                    mean.add(model, weight)
            mixed[name] = mean.mean
        return mixed


def _name(client: int) -> str:
    return f"client-{client}"


def _both_ways(edges: Tensor) -> Tensor:
    above = edges.triu(1)
    return above | above.T


def _connected(edges: Tensor) -> bool:
    reached = torch.arange(len(edges)) == 0
    for _ in range(len(edges)):
        reached = reached | edges[reached].any(dim=0)
    return bool(reached.all())


def _graph(pairs: Callable[[int], list[tuple[int, int]]]) -> Callable[[int], Tensor]:
    def make(clients: int) -> Tensor:
        edges = torch.zeros(clients, clients, dtype=torch.bool)
        for i, j in pairs(clients):
            edges[i, j] = edges[j, i] = i != j
        return edges

    return make


GRAPHS: dict[str, Callable[[int], Tensor]] = {
    "cycle": _graph(lambda clients: [(i, (i + 1) % clients) for i in range(clients)]),
    "tree": _graph(lambda clients: [(i, (i - 1) // 2) for i in range(1, clients)]),
    "star": _graph(lambda clients: [(0, i) for i in range(1, clients)]),
    "complete": lambda clients: ~torch.eye(clients, dtype=torch.bool),
}

_PAPER = "Wang et al., Does Decentralized Learning with Non-IID Unlabeled Data Benefit from Self Supervision?, 2023"

METHOD = Method(
    objective=SimCLR(),
    aggregation=Gossip(),
    title="Peer-to-peer SimCLR",
    paper=_PAPER,
    family="Peer-to-peer methods",
)
