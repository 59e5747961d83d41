"""EUC: layers that change little are exchanged less often. This is our reading; the papers do not define EUC.

L-DAWA compares with "EUC [19]" and says only that it updates clients' layers "partially or entirely" by a
Euclidean distance, over FedAvg; neither its code nor its text defines more. [19] is FedLAMA (Lee et al., AAAI
2023), which this module implements, with a base interval of one round:

    d_l = (1/K) Σ_k ‖w̄^(l) − w_k^(l)‖² / (τ_l dim_l)

Layers are sorted by d_l. Let δ_l and λ_l be the shares of Σ d dim and of Σ dim in the layers up to l. The layers
up to and including the first with 1 − λ_l < δ_l are downloaded only every φ-th round; in between, a client
retains its own values. A layer is a kernel or matrix; biases, norms and buffers are exchanged every round. A
client that was absent when a layer was due downloads it in its next round: it retains only layers that it has
downloaded since then.

Each client computes ‖w̄ − w_k‖² when it downloads w̄, because only then does it have both, and sends one number for
each layer. The server may therefore use any aggregation; its model is the fold of all layers in every round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch

from atoll.components.base import ClientContext, Merge, NumberSpec, Optional, PerWeight, Setting, Spec
from atoll.core.schema import AtLeast
from atoll.core.tree import Tree, Weights
from atoll.methods.method import Method
from atoll.models.norms import named_weights
from atoll.objectives.simclr import SimCLR


@dataclass(frozen=True)
class EUC(Merge):
    """Keep the client's values of layers that are not due.

    Attributes:
        interval: φ, the number of rounds between two exchanges of a layer that changes little.
    """

    name: ClassVar[str] = "euc"
    source: ClassVar[str] = "L-DAWA Table 2; Lee et al. 2023 (FedLAMA), Algorithm 2 (our reading)"
    egress: ClassVar[tuple[str, ...]] = ("the distance of each layer from the server's",)
    keeps: ClassVar[tuple[str, ...]] = (
        "its kernels and matrices of the last round, and the round in which it downloaded each",
    )
    consecutive_rounds: ClassVar[bool] = True
    needs_steps: ClassVar[bool] = True
    interval: Annotated[int, AtLeast(2)] = 2

    def init(self, setting: Setting) -> Tree:
        """Start with no slow layers: all layers are due in every round."""
        return {"slow": []}

    def send(self, state: Tree, client: int, cohort: Sequence[int], round: int) -> Tree:
        """Send the slow layers, and the last round in which they were due."""
        return {"slow": state["slow"], "due": round - (round - 1) % self.interval}

    def join(self, context: ClientContext, downloaded: Weights) -> Weights:
        """Combine the download with the retained slow layers that the client downloaded when last due, or later."""
        scope = context.of(self)
        scope.distances, scope.since = {}, {}
        if not scope.retained:
            return downloaded
        kept: Weights = scope.retained["layers"]
        taken: dict[str, int] = scope.retained["taken"]
        due = scope.message["due"]
        if due == context.round:
            for name, w in kept.items():
                if name in downloaded:
                    distance = float(torch.linalg.vector_norm(downloaded[name] - w)) ** 2
                    scope.distances[name] = [distance / (context.round - taken[name]), w.numel()]
        scope.since = {name: taken[name] for name in scope.message["slow"] if taken.get(name, 0) >= due}
        return {**downloaded, **{name: kept[name] for name in scope.since}}

    def finish(self, context: ClientContext) -> Tree:
        """Return [‖w̄ − w_k‖² / τ, dim] of each layer, in the rounds in which all layers are due."""
        return context.of(self).distances or None

    def keep(self, context: ClientContext) -> Tree:
        """Return the layers that are exchanged, as trained, and the round in which each was downloaded."""
        weights = named_weights(context.networks).items()
        layers = {name: w.detach() for name, w in weights if w.ndim >= 2 and name in context.shared}
        since = context.of(self).since
        return {"layers": layers, "taken": {name: since.get(name, context.round) for name in layers}}

    def declares(self, setting: Setting) -> Spec:
        """Declare a distance and a size for each layer, in the rounds in which all layers are due."""
        distance_and_size = NumberSpec(float, least=0), NumberSpec(int, least=1)
        return Optional(PerWeight(distance_and_size, min_dims=2, some=True))

    def refuse_slice(self, piece: Tree, setting: Setting, weights: Weights) -> str | None:
        """Refuse sizes that differ from those of the layers."""
        for name, (_, size) in (piece or {}).items():
            if size != weights[name].numel():
                return (
                    f"its slice of 'euc' says that {name!r} has {size} values; it has {weights[name].numel()}"
                )
        return None

    def fold(self, state: Tree, setting: Setting, round: int) -> EUCFold:
        """Start to sum the distances."""
        return EUCFold(state)


class EUCFold:
    """Sums of the clients' distances."""

    def __init__(self, state: Tree) -> None:
        self._state = state
        self._sums: dict[str, tuple[float, int, int]] = {}

    def add(self, client: int, piece: Tree) -> None:
        """Add one client's distances, if it sent any."""
        for name, (distance, size) in (piece or {}).items():
            total, clients, _ = self._sums.get(name, (0.0, 0, 0))
            self._sums[name] = (total + distance, clients + 1, size)

    def close(self) -> Tree:
        """Return the layers that are exchanged less often from now on."""
        if not self._sums:
            return self._state
        means = {name: (total / clients, size) for name, (total, clients, size) in self._sums.items()}
        return {"slow": sorted(slow_layers(means))}


def slow_layers(distances: dict[str, tuple[float, int]]) -> set[str]:
    """Select the layers with a small distance relative to their share of the model (FedLAMA, Algorithm 2).

    Args:
        distances: d_l dim_l (the mean squared distance over τ_l) and dim_l of each layer.
    """
    ordered = sorted(distances, key=lambda name: (distances[name][0] / distances[name][1], name))
    all_distance = sum(distance for distance, _ in distances.values())
    all_size = sum(size for _, size in distances.values())
    if all_distance == 0:
        return set()
    distance, size = 0.0, 0
    for count, name in enumerate(ordered, 1):
        distance, size = distance + distances[name][0], size + distances[name][1]
        if 1 - size / all_size < distance / all_distance:
            return set(ordered[:count])
    return set(ordered)


METHOD = Method(
    objective=SimCLR(),
    merge=EUC(),
    title="EUC (our reading: FedLAMA)",
    paper="Lee et al., Layer-wise Adaptive Model Aggregation, AAAI 2023, as compared with in L-DAWA",
    family="Aggregation",
)
