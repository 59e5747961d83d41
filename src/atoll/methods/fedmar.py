"""FedMAR and DecMAR: a masked autoencoder aligned with the other clients' embeddings (Chen et al., ICLR 2026).

    L_MAR = ‖f_d(f_e(x₁)) − x₂‖² + γ_k · A-MMD(z, z̄)               x₁, x₂: visible and masked patches   (Eq. 5)
    z     = f_e(x₁), one row for each image of the batch
    A-MMD = mean_{a≠b} k(z_a, z_b) + mean_{a≠b} k(z̄_a, z̄_b) − 2 mean_{a,b} k(z_a, z̄_b)                  (Eq. 6)
    k     = exp(−‖z − z'‖²/2σ²),   σ = mean_{a≠b} ‖z_a − z_b‖
    γ_k   = γ_min + (γ_max − γ_min)(1 + cos(π ω_k/Ω))/2,   ω_k: earlier rounds of client k              (Eq. 7)
    z̄     = mean over the last round's clients of z_k, row by row          (Algorithm 1; 2: over the neighbourhood)

In round 1 there is no z̄, and the loss is the reconstruction's. The text does not say of which batch z_k is: as in
the released code, it is the mean over the batches of the round, row by row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from atoll.components.base import Batch, ClientContext, Optional, Passes, Setting, Spec, TensorSpec, UpTo
from atoll.core.schema import AtLeast
from atoll.core.tree import Tree
from atoll.functional import adaptive_mmd
from atoll.methods.gossip import Gossip
from atoll.methods.method import Method
from atoll.models.vit import visible_patches
from atoll.objectives.mae import MAE, meta_encoder


class RowMeans:
    """The mean of matrices, row by row; a matrix with fewer rows than others counts in its own rows only."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._counts: list[int] = []

    def add(self, matrix: Tensor) -> None:
        """Add a matrix (N, d)."""
        missing = len(matrix) - len(self._counts)
        if missing > 0:
            self._counts += [0] * missing
            more = matrix.new_zeros(missing, matrix.shape[1])
            self._sum = more if self._sum is None else torch.cat([self._sum, more])
        assert self._sum is not None  # noqa: S101
        self._sum[: len(matrix)] += matrix
        self._counts[: len(matrix)] = [count + 1 for count in self._counts[: len(matrix)]]

    def mean(self) -> Tensor | None:
        """Return the mean, (N, d) on the CPU; None without matrices."""
        return None if self._sum is None else self._sum.cpu() / torch.tensor(self._counts)[:, None]


@dataclass(frozen=True)
class MAR(MAE):
    """Reconstruction of masked patches, and alignment of the visible patches' embeddings with other clients'.

    Attributes:
        first_weight: γ_max, the weight of the alignment in a client's first rounds.
        last_weight: γ_min, its weight after Ω rounds.
        horizon: Ω, the rounds of a client over which the weight falls; 0 for the expected number of its rounds.
    """

    name: ClassVar[str] = "mar"
    source: ClassVar[str] = "Chen et al. 2026 (FedMAR), Eq. 5 to 7"
    egress: ClassVar[tuple[str, ...]] = ("embeddings of its masked images, averaged over its batches",)
    between_neighbours: ClassVar[bool] = True
    first_weight: Annotated[float, AtLeast(0)] = 0.1
    last_weight: Annotated[float, AtLeast(0)] = 0.001
    horizon: Annotated[int, AtLeast(0)] = 0

    @property
    def least_loss(self) -> float:
        """Return −2 γ_max: no mean of the kernel exceeds 1."""
        return -2.0 * max(self.first_weight, self.last_weight)

    @property
    def follows_rounds(self) -> bool:
        """Whether γ_k falls over all rounds of the run."""
        return not self.horizon and self.first_weight != self.last_weight

    def gamma(self, taken: int, setting: Setting) -> float:
        """Return γ_k of a client that took part in ``taken`` rounds before."""
        share = setting.cohort_size / setting.num_clients
        horizon = self.horizon or max(1.0, setting.train.rounds * share)
        fall = 0.5 * (1.0 + math.cos(math.pi * min(taken / horizon, 1.0)))
        return self.last_weight + (self.first_weight - self.last_weight) * fall

    def send(self, state: Tree, client: int, cohort: Sequence[int], round: int) -> Tree:
        """Send z̄ and ω_k, if there is a z̄."""
        if state is None:
            return None
        return {"embeddings": state["embeddings"], "taken": state["taken"].get(str(client), 0)}

    def start(self, context: ClientContext) -> None:
        """Load z̄ and γ_k."""
        super().start(context)
        scope = context.of(self)
        scope.own = RowMeans()
        scope.others = None if scope.message is None else scope.message["embeddings"].to(context.device)
        scope.gamma = (
            self.gamma(scope.message["taken"], context.setting) if scope.message is not None else 0.0
        )

    def loss(self, context: ClientContext, batch: Batch, passes: Passes) -> Tensor:
        """Return L_MAR; without z̄, or with a single row on either side, the reconstruction's error alone."""
        scope = context.of(self)
        error, tokens = self.reconstruct(context, batch)
        z = tokens.flatten(1)
        scope.own.add(z.detach().float())
        if scope.others is None or min(len(z), len(scope.others)) < 2:
            return error
        gamma: float = scope.gamma
        return error + gamma * adaptive_mmd(z, scope.others)

    def finish(self, context: ClientContext) -> Tree:
        """Return z_k."""
        return context.of(self).own.mean()

    def declares(self, setting: Setting) -> Spec:
        """Declare one row for each image of a batch: the class token and the tokens of the visible patches."""
        encoder = meta_encoder(setting)
        visible = visible_patches(encoder.patches, self.mask_ratio)
        return Optional(TensorSpec((UpTo(setting.train.batch_size), (1 + visible) * encoder.dim)))

    def fold(self, state: Tree, setting: Setting, round: int) -> EmbeddingFold:
        """Start z̄."""
        return EmbeddingFold(state)


class EmbeddingFold:
    """z̄, and the number of rounds in which each client took part."""

    def __init__(self, state: Tree) -> None:
        self._state = state
        self._means = RowMeans()
        self._taken: dict[str, int] = dict(state["taken"]) if state is not None else {}

    def add(self, client: int, piece: Tree) -> None:
        """Add a client's embeddings."""
        if piece is not None:
            self._means.add(piece)
            self._taken[str(client)] = self._taken.get(str(client), 0) + 1

    def close(self) -> Tree:
        """Return z̄ and the numbers of rounds; without embeddings, what there was."""
        mean = self._means.mean()
        return self._state if mean is None else {"embeddings": mean, "taken": self._taken}


_PAPER = (
    "Chen et al., Understanding the Robustness of Distributed Self-Supervised Learning Frameworks, ICLR 2026"
)

FED_MAR = Method(objective=MAR(), title="FedMAR", paper=_PAPER, family="Federated self-supervised methods")

DEC_MAR = Method(
    objective=MAR(),
    aggregation=Gossip(),
    title="DecMAR",
    paper=_PAPER,
    family="Peer-to-peer methods",
)
