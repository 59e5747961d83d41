"""Barlow Twins: make the cross-correlation of two views' embeddings the identity (Zbontar et al. 2021)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from atoll.components.base import VIEWS, Batch, ClientContext, Forward, Objective, Passes
from atoll.functional import barlow_twins


@dataclass(frozen=True)
class BarlowTwins(Objective):
    """L = Σ_j (1 − C_jj)² + λ Σ_{i≠j} C_ij², C the correlation of two views' embeddings over a batch.

    Attributes:
        lambd: λ, the weight of the off-diagonal entries.
        unbiased: Standardise with N − 1, as L-DAWA's code does (with λ = 0.005); C_jj is then at most (N − 1)/N.
    """

    name: ClassVar[str] = "barlow_twins"
    source: ClassVar[str] = "Zbontar et al. 2021, Eqs. 1-2"
    replays: ClassVar[bool] = True
    lambd: float = 0.0051
    unbiased: bool = False

    @property
    def least_loss(self) -> float:
        """Return 0: the loss is a sum of squares, unless λ is negative."""
        return 0.0 if self.lambd >= 0 else -math.inf

    def forwards(self) -> Sequence[Forward]:
        """Pass both views through the local networks."""
        return VIEWS

    def loss(self, context: ClientContext, batch: Batch, passes: Passes) -> Tensor:
        """Distance of C from the identity."""
        z1, z2 = (passes[view].z for view in VIEWS)
        return barlow_twins(z1, z2, self.lambd, self.unbiased)
