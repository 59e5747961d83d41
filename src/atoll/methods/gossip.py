"""Peer-to-peer learning: clients mix their models with those of their neighbours, without a server.

(Wang et al., Dec-SSL, ICLR 2023, Appendix B.5.) Clients are the nodes of a graph. In every round each client trains
its model, and then all clients take one gossip step,

    w_i ← Σ_j W_ij w_j,     W_ij = 1/(1 + max(deg_i, deg_j)) for neighbours j,     W_ii = 1 − Σ_{j≠i} W_ij,

with Metropolis weights: W is symmetric and doubly stochastic, so the mean of all models does not change. On a
connected graph the models converge to each other, faster for a smaller second eigenvalue of W. BatchNorm's
statistics are mixed like weights. The model of a client that takes no part in a round, or is lost, is mixed as it
was.

The paper names the graphs (cycle, binary tree, Erdős–Rényi with p = 0.7) but does not specify the mixing weights,
the number of steps per round or the evaluated model: these weights, one step and the mean of the clients' models
are our choices. The paper's "star" is a federation with a server, which is `FedAvg`; the star here gossips like
the other graphs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from atoll.aggregation.running_mean import RunningMean
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
from atoll.core.schema import AtLeast, Below, Share
from atoll.core.tree import Weights
from atoll.functional import consensus_distance, metropolis_weights, spectral_gap
from atoll.methods.method import Method
from atoll.objectives.simclr import SimCLR

DRAWS = 1000  # maximum draws of a random graph, until one is connected


@dataclass(frozen=True)
class Gossip(Aggregation):
    """One gossip step over a graph.

    Attributes:
        topology: The graph: ``"tree"`` is binary (the parent of client i is client ⌊(i−1)/2⌋), ``"random"`` is
            Erdős–Rényi, redrawn until it is connected, and ``"star"`` has client 0 at its centre.
        edge_probability: Edge probability p of the random graph.
        redraw: Draw the random graph again in every round; a round's graph need not be connected then.
        drop: Probability with which a link fails in a round, in both directions; the weights are those of the
            remaining graph.
        deploys: The models that the run returns and evaluates: the ``"mean"`` of the clients' models, or ``"each"``
            client's model.
    """

    name: ClassVar[str] = "gossip"
    source: ClassVar[str] = "Wang et al. 2023 (Dec-SSL), Appendix B.5"
    only_weights: ClassVar[bool] = True  # there is no server to fold other data
    serverless: ClassVar[bool] = True
    topology: Literal["cycle", "tree", "random", "star", "complete"] = "cycle"
    edge_probability: Share = 0.7
    redraw: bool = False
    drop: Annotated[float, AtLeast(0), Below(1)] = 0.0
    deploys: Literal["mean", "each"] = "mean"

    def refuse(self, setting: Setting) -> str | None:
        """Refuse a graph that is not connected, and the mean of models with local-only weights."""
        if setting.personal and self.deploys == "mean":
            return (
                "clients retain local-only weights, so the mean of their models is not a model of any client; set "
                f"options.{self.name}.deploys = 'each'"
            )
        if self.redraw and self.topology != "random":
            return f"options.{self.name}.redraw needs a random graph; set options.{self.name}.topology = 'random'"
        return None if self.redraw or _connected(self.graph(setting)) else (
            f"{DRAWS:,} random graphs of {setting.num_clients} clients with edges of probability "
            f"{self.edge_probability} were not connected; raise options.{self.name}.edge_probability"
        )  # fmt: skip

    def graph(self, setting: Setting, round: int = 1) -> Tensor:
        """Build a round's adjacency matrix with all links, bool (K, K); it is the same in all rounds by default."""
        if self.topology != "random":
            return GRAPHS[self.topology](setting.num_clients)
        draws = stream(setting.seed, "topology", *([round] if self.redraw else []))
        for _ in range(DRAWS):
            edges = _both_ways(_uniform(setting, draws) < self.edge_probability)
            if self.redraw or _connected(edges):
                break
        return edges

    def links(self, setting: Setting, round: int) -> Tensor:
        """Build the adjacency matrix of the links that do not fail in a round, bool (K, K)."""
        edges = self.graph(setting, round)
        if not self.drop:
            return edges
        return edges & _both_ways(_uniform(setting, stream(setting.seed, "links", round)) >= self.drop)

    def neighbourhoods(self, setting: Setting, round: int) -> list[list[int]]:
        """Return each client with those to which its links do not fail."""
        edges = self.links(setting, round) | torch.eye(setting.num_clients, dtype=torch.bool)
        return [row.nonzero().flatten().tolist() for row in edges]

    def measure(self, models: Models, setting: Setting, round: int) -> dict[str, float]:
        """Return the models' distance from consensus, and the spectral gap of the round's mixing weights."""
        names = [name for name, weight in models[_name(0)].items() if weight.is_floating_point()]
        squares = 0.0
        for name in names:
            if name not in setting.running_statistics:
                rows = torch.stack([model[name].double().flatten() for model in models.values()])
                squares += float(consensus_distance(rows)) ** 2
        gap = spectral_gap(metropolis_weights(self.links(setting, round).double()))
        return {"distance": math.sqrt(squares), "gap": float(gap)}

    # There is one model per client. In a simulation, the server's state holds all of them.

    def models(self, start: Weights, setting: Setting) -> Models:
        """Initialise all clients with the same weights."""
        return {_name(client): start for client in range(setting.num_clients)}

    def sent(self, models: Models, client: int) -> Models:
        """Send a client its model after its last gossip step."""
        return {"own": models[_name(client)]}

    def choose(self, context: ClientContext, models: Models) -> Weights:
        """Choose the client's model."""
        return models["own"]

    def reference(self, models: Models, update: Update) -> Weights:
        """Return the client's model."""
        return models["own"]

    def open(self, models: Models, setting: Setting, round: int, scratch: Path | None) -> GossipFold:
        """Start to collect the trained models."""
        return GossipFold(models, metropolis_weights(self.links(setting, round).double()))

    def deploy(self, models: Models, state: ServerState) -> Deployment:
        """Return the mean of all models, or each client's model."""
        if self.deploys == "each":
            return Deployment(dict(models), dict(enumerate(models)))
        return Deployment({"mean": _mean(models)})


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
        """Replace a client's model with its trained model."""
        self._models[_name(client)] = {**self._models[_name(client)], **update["weights"]}

    def close(self) -> Models:
        """Return every client's next model: the weighted mean of its neighbourhood."""
        models = list(self._models.values())
        mixed = {}
        for name, row in zip(self._models, self._weights.tolist(), strict=True):
            mean = RunningMean()
            for model, weight in zip(models, row, strict=True):
                if weight:
                    mean.add(model, weight)
            mixed[name] = mean.mean
        return mixed


def _mean(models: Models) -> Weights:
    mean = RunningMean()
    for weights in models.values():
        mean.add(weights, 1.0)
    return mean.mean


def _uniform(setting: Setting, draws: torch.Generator) -> Tensor:
    return torch.rand(setting.num_clients, setting.num_clients, generator=draws)


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

_PAPER = "Wang et al., Does Learning from Decentralized Non-IID Unlabeled Data Benefit from Self Supervision?, 2023"

METHOD = Method(
    objective=SimCLR(),
    aggregation=Gossip(),
    title="Peer-to-peer SimCLR",
    paper=_PAPER,
    family="Peer-to-peer methods",
)
