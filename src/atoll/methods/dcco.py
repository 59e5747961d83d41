"""DCCO: each client's loss sees the encoding statistics of the whole cohort (Vemulapalli et al. 2022).

    ⟨·⟩_k = means over client k's batch of  f, g, f², g², f gᵀ      f, g: embeddings of the two views
    ⟨·⟩_A = Σ_k (N_k/N) ⟨·⟩_k                                       at the server, of the cohort
    ⟨·⟩_T = ⟨·⟩_k + sg(⟨·⟩_A − ⟨·⟩_k⁰)                              values are the cohort's, gradients the client's
    C_ij  = (⟨f_i g_j⟩_T − ⟨f_i⟩_T ⟨g_j⟩_T) / (σ(f_i) σ(g_j))
    L_k   = Σ_i (1 − C_ii)² + λ Σ_{i≠j} C_ij²

⟨·⟩_k⁰ are the statistics of the same batch by the downloaded networks. In the first of a client's steps ⟨·⟩_k⁰ =
⟨·⟩_k, as in the paper: with one step per round and models averaged by samples, a round is one step on the cohort's
union (BatchNorm aside, whose statistics are each client's own). In later steps ⟨·⟩_T moves with the client's
networks, and with nothing else: a batch is no sample of the cohort, so what distinguishes it must cancel. If ⟨·⟩_T
stayed at ⟨·⟩_A, the gradient would point the same way for a whole round, and embeddings would grow without bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from atoll.components.base import (
    VIEWS,
    Batch,
    ClientContext,
    Forward,
    NumberSpec,
    Optional,
    Passes,
    Setting,
    Spec,
    TensorSpec,
    run_forwards,
)
from atoll.components.declaration import MOST_IMAGES
from atoll.core.tree import Tree, Weights
from atoll.functional import EncodingStatistics, correlation_loss, encoding_statistics
from atoll.methods.cohort_statistics import CohortStatistics
from atoll.methods.method import Method

ROUNDING = 1e-6  # of the means of equal embeddings, whose squares are equal
VIEW_IMAGES = tuple(view.images for view in VIEWS)
FROZEN = tuple(Forward(images, "dcco") for images in VIEW_IMAGES)  # both views through the frozen networks


@dataclass(frozen=True)
class DCCO(CohortStatistics):
    """Barlow Twins' loss, evaluated on the cohort's encoding statistics.

    Attributes:
        lambd: λ, the weight of the off-diagonal entries.
    """

    replays: ClassVar[bool] = True
    name: ClassVar[str] = "dcco"
    source: ClassVar[str] = "Vemulapalli et al. 2022 (DCCO)"
    egress: ClassVar[tuple[str, ...]] = ("means, mean squares and mean products of its embeddings",)
    lambd: float = 0.0051

    def send(self, state: Tree, client: int, cohort: Sequence[int], round: int) -> Tree:
        """Send ⟨·⟩_A if the client trains."""
        return state if self.trains(round) else None

    @property
    def least_loss(self) -> float:
        """Return 0: the loss is a sum of squares, unless λ is negative."""
        return 0.0 if self.lambd >= 0 else -math.inf

    def forwards(self) -> Sequence[Forward]:
        """Pass both views through the local and the downloaded networks."""
        return (*VIEWS, *FROZEN)

    def start(self, context: ClientContext) -> None:
        """Freeze the downloaded networks, with BatchNorm as in training, and load ⟨·⟩_A."""
        context.frozen("dcco", train=True)
        scope = context.of(self)
        scope.cohort = {name: mean.to(context.device) for name, mean in (scope.message or {}).items()}

    def loss(self, context: ClientContext, batch: Batch, passes: Passes) -> Tensor:
        """Evaluate the loss on ⟨·⟩_T; without the cohort's statistics, on the batch's."""
        means = _statistics(passes, VIEWS)
        if cohort := context.of(self).cohort:
            before = _statistics(passes, FROZEN)  # ⟨·⟩_k⁰
            means = {name: mean + (cohort[name] - before[name]) for name, mean in means.items()}
        return correlation_loss(EncodingStatistics(**means), self.lambd)

    def finish(self, context: ClientContext) -> Tree:
        """Compute ⟨·⟩_k over the views of the next round's first epoch, with BatchNorm as in training."""
        if not self.sends(context.round):
            return None
        networks = {"dcco": context.frozen("dcco", train=True)}
        joint = context.setting.train.views_batch == "joint"
        sums = _Sums()
        for batch in context.data.batches(context.round + 1, 1, VIEW_IMAGES):
            passes = run_forwards(FROZEN, networks, batch.images, joint, context.after)
            sums.add(_statistics(passes, FROZEN), len(batch.indices))
        return {"count": sums.weight, **{name: mean.cpu() for name, mean in sums.means().items()}}

    def declares(self, setting: Setting) -> Spec:
        """Declare the five means, and the number of images that they are of; no mean square is negative."""
        d = setting.embedding_dim
        means: dict[str, Spec] = {
            name: TensorSpec(
                (d, d) if name == "product" else (d,),
                torch.float64,
                least=0.0 if name.startswith("square") else -math.inf,
                follows_embeddings=True,
            )
            for name in EncodingStatistics._fields
        }
        return Optional({"count": NumberSpec(int, least=1, most=MOST_IMAGES), **means})

    def refuse_slice(self, piece: Tree, setting: Setting, weights: Weights) -> str | None:
        """Refuse means that no embeddings have: each squared mean or product is bounded by the mean squares."""
        if piece is None:
            return None
        slack = 1.0 + ROUNDING
        square1, square2 = piece["square1"] * slack, piece["square2"] * slack
        possible = (
            (piece["mean1"].square() <= square1).all()
            and (piece["mean2"].square() <= square2).all()
            and (piece["product"].square() <= square1[:, None] * square2[None, :]).all()
        )
        return None if possible else "its slice of 'dcco' contains means that no embeddings have"

    def fold(self, state: Tree, setting: Setting, round: int) -> StatisticsFold | None:
        """Start ⟨·⟩_A."""
        return StatisticsFold(state, setting.sizes) if self.sends(round) else None


def _statistics(passes: Passes, views: Sequence[Forward]) -> dict[str, Tensor]:
    """Compute ⟨·⟩_k of a batch."""
    return encoding_statistics(*(passes[view].z for view in views))._asdict()


class _Sums:
    """Weighted means of statistics, by name."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self.weight = 0

    def add(self, means: dict[str, Tensor], weight: int) -> None:
        self.weight += weight
        self._sums = {name: self._sums.get(name, 0.0) + weight * mean for name, mean in means.items()}

    def means(self) -> dict[str, Tensor]:
        return {name: total / self.weight for name, total in self._sums.items()}


class StatisticsFold:
    """⟨·⟩_A: the mean of the clients' statistics, weighted by their images."""

    def __init__(self, state: Tree, sizes: Sequence[int]) -> None:
        self._state = state
        self._sizes = sizes
        self._sums = _Sums()

    def add(self, client: int, piece: Tree) -> None:
        """Add a client's statistics; its weight is no more than the images that it is known to have."""
        if piece is not None:
            most = self._sizes[client] if self._sizes else MOST_IMAGES
            self._sums.add(
                {name: piece[name] for name in EncodingStatistics._fields}, min(piece["count"], most)
            )

    def close(self) -> Tree:
        """Return ⟨·⟩_A; without statistics, the last ones."""
        return self._sums.means() or self._state


METHOD = Method(
    objective=DCCO(),
    title="DCCO",
    paper="Vemulapalli et al., Federated Training of Dual Encoding Models on Small Non-IID Client Datasets, 2022",
    family="Federated self-supervised methods",
)
