"""Calibre: self-supervised learning with prototypes of each client's clusters (Chen et al., ICDCS 2024).

    L = L_SSL + α (l_p + l_n)
    clusters: k-means of the representations of both views of a batch, K clusters
    l_p: NT-Xent between the two views' prototypes, the means of a cluster's embeddings
    l_n: the second view's representations classified by their distance to the first view's prototypes
    d_k = mean over clusters of the mean distance of client k's representations to their prototype, after training
    w   = Σ_k p_k w_k,   p_k ∝ n_k / d_k

Clients with clear clusters count more. We have read the released code and a summary of the paper: this is our
reading.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from atoll.aggregation.fedavg import FedAvg, MeanFold
from atoll.components.base import (
    VIEWS,
    Batch,
    ClientContext,
    Forward,
    Models,
    NumberSpec,
    Passes,
    Setting,
    Spec,
    Term,
    Update,
    UpdateGeometry,
)
from atoll.components.declaration import LARGEST
from atoll.core.schema import Count, Positive
from atoll.functional import k_means, prototype_classification, prototype_contrast, prototype_divergence
from atoll.methods.method import Method
from atoll.objectives.simclr import SimCLR


@dataclass(frozen=True)
class Prototypes(Term):
    """l_p + l_n of the clusters of a batch; ``weight`` is α.

    Attributes:
        weight: α.
        clusters: K, the number of clusters in a batch.
        temperature: τ of l_p.
        iterations: Iterations of k-means; the released code iterates to convergence, at most 200 times.
    """

    replays: ClassVar[bool] = True
    name: ClassVar[str] = "prototypes"
    source: ClassVar[str] = "Chen et al. 2024 (Calibre), released code"
    weight: float = 0.3
    clusters: Count = 10
    temperature: Positive = 0.5
    iterations: Count = 20

    def forwards(self) -> Sequence[Forward]:
        """Pass both views through the local networks."""
        return VIEWS

    def start(self, context: ClientContext) -> None:
        """Open the random stream of the seeds."""
        context.of(self).seeds = context.stream("prototype-seeds")

    def loss(self, context: ClientContext, batch: Batch, passes: Passes) -> Tensor:
        """Cluster the representations of both views, and compare views with prototypes."""
        h1, h2 = (passes[view].h for view in VIEWS)
        z1, z2 = (passes[view].z for view in VIEWS)
        seeds = context.of(self).seeds
        draws = context.from_host(lambda: torch.rand(self.clusters, generator=seeds))
        labels = k_means(torch.cat([h1, h2]).detach(), draws, self.iterations)
        first, second = labels[: len(h1)], labels[len(h1) :]
        contrast = prototype_contrast(z1, z2, first, second, self.clusters, self.temperature)
        return contrast + prototype_classification(h1, h2, first, second, self.clusters)


@dataclass(frozen=True)
class PrototypeDivergence(FedAvg):
    """w ← Σ_k p_k w_k with p_k ∝ n_k / d_k; d_k is the divergence of the client's clusters.

    Attributes:
        weights: In place of n_k: ``"samples"``, ``"batches"`` or ``"uniform"``.
        clusters: Number of clusters of a client's representations.
        iterations: Iterations of k-means.
        normalise: Normalise the representations, as the prototypes are; the released code does not.
        least: Lower bound of d_k; a client with few images has clusters of one image each, and d_k = 0.
    """

    name: ClassVar[str] = "prototype_divergence"
    source: ClassVar[str] = "Chen et al. 2024 (Calibre), released code"
    keeps_updates: ClassVar[bool] = False
    egress: ClassVar[tuple[str, ...]] = ("the divergence of the clusters of its images' representations",)
    clusters: Count = 10
    iterations: Count = 20
    normalise: bool = True
    least: Positive = 0.05

    def finish(self, context: ClientContext) -> float:
        """Compute d_k of the trained networks, over images without augmentation."""
        (h,) = context.outputs(context.networks, "h")
        draws = torch.rand(self.clusters, generator=context.stream("prototype-divergence"))
        labels = k_means(h, draws.to(h.device), self.iterations)
        return float(prototype_divergence(h, labels, self.clusters, self.normalise))

    def declares(self, setting: Setting) -> Spec:
        """Declare a distance: between points of a sphere, at most its diameter, up to rounding."""
        return NumberSpec(float, least=0, most=2.001 if self.normalise else LARGEST)

    def open(self, models: Models, setting: Setting, round: int, scratch: Path | None) -> DivergenceFold:
        """Start a round's mean."""
        return DivergenceFold(self, models["global"], setting.train.max_share)


class DivergenceFold(MeanFold):
    """The running mean of a round, with weights that fall with d_k."""

    def __init__(self, component: PrototypeDivergence, current: dict[str, Tensor], max_share: float) -> None:
        super().__init__(current, component.weights, max_share)
        self._options = component

    def add(self, client: int, update: Update, geometry: UpdateGeometry | None = None) -> None:
        """Fold in one client's model."""
        weight, _ = self._weigh(update)
        divergence: float = update["parts"][self._options.name]
        self._mean.add(update["weights"], weight / max(divergence, self._options.least))


METHOD = Method(
    objective=SimCLR(temperature=0.2),
    terms=(Prototypes(),),
    aggregation=PrototypeDivergence(),
    title="Calibre",
    paper="Chen et al., Calibre: Towards Fair and Accurate Personalized Federated Learning, ICDCS 2024",
    family="Federated self-supervised methods",
)
