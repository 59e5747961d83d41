"""Lagoon: small groups of clients take turns, and the model that is kept is a mean over their turns.

    a sweep:  the K clients, in an order drawn anew, in G groups; a round for each group
    round r:  w_r = Σ_k p_k w_k over the round's group, each client trained from w_{r−1}
    kept:     w̄_r = w̄_{r−1} + α (w_r − w̄_{r−1}),   α = max(1/r, 1/(A G))

A sweep sends each client the model once, as one round of FedAvg does: the same images and bytes, and G times the
steps in a row. A sweep of one group, with A = 1, is FedAvg.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from atoll.aggregation.fedavg import FedAvg
from atoll.components.base import (
    VIEWS,
    Batch,
    ClientContext,
    Deployment,
    Fold,
    Models,
    Passes,
    ServerState,
    Setting,
    SliceFold,
    Spec,
    TensorSpec,
    Update,
    UpdateGeometry,
)
from atoll.core.rng import stream
from atoll.core.schema import Above, AtMost, Count
from atoll.core.tree import Tree, Weights
from atoll.functional import alignment, uniformity
from atoll.methods.method import Method
from atoll.objectives.align_uniform import AlignUniform

TRAINED, KEPT = "global", "kept"
Share = Annotated[float, Above(0), AtMost(1)]


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


@dataclass(frozen=True)
class SharedUniformity(AlignUniform):
    """AlignUniform whose potential is also that of the embeddings of all clients.

    Attributes:
        own: ρ, the share of the batch in the potential.
    """

    name: ClassVar[str] = "shared_uniformity"
    source: ClassVar[str] = "Atoll"
    egress: ClassVar[tuple[str, ...]] = ("the means of its embeddings and of their outer products",)
    own: Share = 0.5

    def send(self, state: Tree, client: int, cohort: Sequence[int], round: int) -> Tree:
        """Send m and M."""
        return None if state is None else {name: state[name] for name in ("m", "M")}

    def start(self, context: ClientContext) -> None:
        """Load m and M, and start the client's own."""
        scope, d = context.of(self), context.setting.embedding_dim
        sent = scope.message
        scope.all = None if sent is None else {name: value.to(context.device) for name, value in sent.items()}
        scope.count = 0
        scope.sums = {
            "m": torch.zeros(d, device=context.device),
            "M": torch.zeros(d, d, device=context.device),
        }

    def loss(self, context: ClientContext, batch: Batch, passes: Passes) -> Tensor:
        """Sum of alignment and the logarithm of the potential."""
        scope, unit = context.of(self), [normalize(passes[view].z.float()) for view in VIEWS]
        with torch.no_grad():
            for z in unit:
                scope.sums["m"] += z.sum(dim=0)
                scope.sums["M"] += z.T @ z
                scope.count += len(z)
        potential = 0.5 * (uniformity(unit[0], self.t) + uniformity(unit[1], self.t))
        if scope.all is not None and self.own < 1:
            others = torch.stack([self._potential(z, **scope.all) for z in unit]).mean().log()
            potential = torch.logaddexp(potential + math.log(self.own), others + math.log(1 - self.own))
        return alignment(*unit) + self.beta * potential

    def _potential(self, z: Tensor, m: Tensor, M: Tensor) -> Tensor:
        """Mean of exp(−t‖z − z'‖²) over all clients' z', to second order in z·z'."""
        a = 2 * self.t
        return math.exp(-a) * (1 + a * (z @ m) + 0.5 * a**2 * ((z @ M) * z).sum(dim=1)).mean()

    def finish(self, context: ClientContext) -> Tree:
        """Return the client's own m_k and M_k, over the views of the round."""
        scope = context.of(self)
        return {name: (value / max(scope.count, 1)).cpu() for name, value in scope.sums.items()}

    def declares(self, setting: Setting) -> Spec:
        """Declare the means."""
        d = setting.embedding_dim
        return {
            name: TensorSpec(shape, least=-1.01, most=1.01) for name, shape in (("m", (d,)), ("M", (d, d)))
        }

    def fold(self, state: Tree, setting: Setting, round: int) -> SliceFold:
        """Start to mix the round's means into those of all clients."""
        return MomentFold(state, setting)


class MomentFold:
    """m and M as running means over clients, weighted by their images; a whole sweep replaces them."""

    def __init__(self, state: Tree, setting: Setting) -> None:
        self._state = state
        self._sizes = setting.sizes
        self._sum: dict[str, Tensor] = {}
        self._weight = 0.0

    def add(self, client: int, piece: Tree) -> None:
        """Add a client's means."""
        weight = self._sizes[client] / sum(self._sizes)
        self._weight += weight
        self._sum = {name: self._sum.get(name, 0.0) + weight * value for name, value in piece.items()}

    def close(self) -> Tree:
        """Return the next means, and the weight of the clients in them."""
        if not self._sum:
            return self._state
        known = 0.0 if self._state is None else float(self._state["known"])
        share = self._weight / min(1.0, known + self._weight)
        mean = {name: value / self._weight for name, value in self._sum.items()}
        if self._state is not None:
            mean = {name: torch.lerp(self._state[name], value, share) for name, value in mean.items()}
        return {**mean, "known": min(1.0, known + self._weight)}


METHOD = Method(
    objective=AlignUniform(),
    aggregation=Relay(sweeps=2.0),
    title="Lagoon",
    paper="Atoll",
    family="Federated self-supervised methods",
)

SHARED = Method(
    objective=SharedUniformity(),
    aggregation=Relay(sweeps=2.0),
    title="Lagoon",
    paper="Atoll",
    family="Federated self-supervised methods",
)
