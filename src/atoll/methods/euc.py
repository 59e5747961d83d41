"""EUC: layers that change little are exchanged less often. Our reading, for the papers give none.

L-DAWA compares with "EUC [19]" and says only that it updates clients' layers "partially or entirely" by a
Euclidean distance, over FedAvg; neither its code nor its text defines more. [19] is FedLAMA (Lee et al., AAAI
2023), and that is what stands here, with a base interval of one round:

    d_l = (1/K) Σ_k ‖w̄^(l) − w_k^(l)‖² / (τ_l dim_l)

Layers are sorted by d_l. With δ_l and λ_l the shares of Σ d dim and of Σ dim in the layers up to l, those up to and
including the first with 1 − λ_l < δ_l are taken from the server only every φ-th round, and stay a client's own in
between. A layer is a kernel or matrix; biases, norms and buffers are exchanged every round. A client that was away
when a layer was due takes it when it comes back: only what it has taken since then is its own.

Each client measures ‖w̄ − w_k‖² when it downloads w̄, which is when it has both, and sends one number for each
layer. So the server may fold by any rule; its model is the fold of all layers in every round.
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
from atoll.objectives.simclr import SimCLR


@dataclass(frozen=True)
class EUC(Merge):
    """Layers that are not due stay the client's own.

    Attributes:
        interval: φ, rounds between two exchanges of a layer that changes little.
    """

    name: ClassVar[str] = "euc"
    source: ClassVar[str] = "L-DAWA Table 2; Lee et al. 2023 (FedLAMA), Algorithm 2 (our reading)"
    egress: ClassVar[tuple[str, ...]] = ("the distance of each layer from the server's",)
    keeps: ClassVar[tuple[str, ...]] = (
        "its kernels and matrices of the last round, and when it took each from the server",
    )
    interval: Annotated[int, AtLeast(2)] = 2

    def init(self, setting: Setting) -> Tree:
        """All layers are due at first."""
        return {"slow": []}

    def send(self, state: Tree, client: int, cohort: Sequence[int], round: int) -> Tree:
        """The layers that are exchanged less often, and the last round in which they were due."""
        return {"slow": state["slow"], "due": round - (round - 1) % self.interval}

    def join(self, context: ClientContext, downloaded: Weights) -> Weights:
        """The download; slow layers that the client took when they were last due, or later, are its own."""
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
        """[‖w̄ − w_k‖² / τ, dim] of each layer, in the rounds in which all are due."""
        return context.of(self).distances or None

    def keep(self, context: ClientContext) -> Tree:
        """The layers as trained, and the round in which each was taken from the server."""
        layers = {name: w.detach() for name, w in context.networks.named_parameters() if w.ndim >= 2}
        since = context.of(self).since
        return {"layers": layers, "taken": {name: since.get(name, context.round) for name in layers}}

    def declares(self, setting: Setting) -> Spec:
        """A distance and a size for each layer, in the rounds in which all are due."""
        distance_and_size = NumberSpec(float, least=0), NumberSpec(int, least=1)
        return Optional(PerWeight(distance_and_size, min_dims=2, some=True))

    def refuse_slice(self, piece: Tree, setting: Setting, weights: Weights) -> str | None:
        """The sizes are those of the layers."""
        for name, (_, size) in (piece or {}).items():
            if size != weights[name].numel():
                return (
                    f"its slice of 'euc' says that {name!r} has {size} values; it has {weights[name].numel()}"
                )
        return None

    def fold(self, state: Tree, setting: Setting, round: int) -> EUCFold:
        """Collect the distances."""
        return EUCFold(state)


class EUCFold:
    """The sums of the clients' distances."""

    def __init__(self, state: Tree) -> None:
        self._state = state
        self._sums: dict[str, tuple[float, int, int]] = {}

    def add(self, client: int, piece: Tree) -> None:
        """One client's distances, if it measured any."""
        for name, (distance, size) in (piece or {}).items():
            total, clients, _ = self._sums.get(name, (0.0, 0, 0))
            self._sums[name] = (total + distance, clients + 1, size)

    def close(self) -> Tree:
        """The layers that are exchanged less often from now on."""
        if not self._sums:
            return self._state
        means = {name: (total / clients, size) for name, (total, clients, size) in self._sums.items()}
        return {"slow": sorted(slow_layers(means))}


def slow_layers(distances: dict[str, tuple[float, int]]) -> set[str]:
    """The layers whose distance is small for the share of the model that they are.

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
