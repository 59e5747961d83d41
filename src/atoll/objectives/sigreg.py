"""LeJEPA: agreement of views, and embeddings that are Gaussian on random slices (Balestriero and LeCun 2025)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from atoll.components.base import VIEWS, Batch, ClientContext, Forward, Objective, Passes
from atoll.core.schema import AtLeast, Count, Positive, Share
from atoll.functional import sigreg


@dataclass(frozen=True)
class SIGReg(Objective):
    """L = (1 − λ) · mean_v (1/d)‖z_v − z̄‖² + λ · mean_v SIGReg(z_v), z̄ the mean embedding of an image's views.

    Every step draws new slices; both views are compared on the same ones. The N in front of the statistic is the
    size of the client's batch.

    Attributes:
        weight: λ, the share of SIGReg.
        slices: M, the number of random directions of a step.
        limit: Largest t of the characteristic functions; the paper integrates over [−5, 5], its code over [−3, 3].
        points: Number of points t in [0, limit]; 9 make the paper's 17 in [−5, 5], its code has 17 in [0, 3].
    """

    replays: ClassVar[bool] = True
    name: ClassVar[str] = "sigreg"
    source: ClassVar[str] = "Balestriero and LeCun 2025 (LeJEPA)"
    least_loss: ClassVar[float] = 0.0
    weight: Share = 0.05
    slices: Count = 256
    limit: Positive = 5.0
    points: Annotated[int, AtLeast(2)] = 9

    def forwards(self) -> Sequence[Forward]:
        """Pass both views through the local networks."""
        return VIEWS

    def start(self, context: ClientContext) -> None:
        """Open the random stream of the slices."""
        context.of(self).draws = context.stream("sigreg")

    def loss(self, context: ClientContext, batch: Batch, passes: Passes) -> Tensor:
        """Agreement of the views, and distance of each from a Gaussian."""
        z1, z2 = (passes[view].z for view in VIEWS)
        shape, draws = (self.slices, z1.shape[1]), context.of(self).draws
        slices = context.from_host(lambda: normalize(torch.randn(shape, generator=draws)))
        gaussian = (
            sigreg(z1, slices, self.limit, self.points) + sigreg(z2, slices, self.limit, self.points)
        ) / 2
        # mean over both views of (z_v − z̄)², z̄ = (z₁ + z₂) / 2
        agreement = (z1.float() - z2.float()).square().mean() / 4
        return (1 - self.weight) * agreement + self.weight * gaussian
