"""VICReg: variance, invariance and covariance of two views' embeddings (Bardes et al. 2022)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from torch import Tensor

from atoll.components.base import VIEWS, Batch, ClientContext, Forward, Objective, Passes
from atoll.core.schema import AtLeast
from atoll.functional import vicreg

Factor = Annotated[float, AtLeast(0)]


@dataclass(frozen=True)
class VICReg(Objective):
    """L = λ s(Z, Z') + μ (v(Z) + v(Z')) + ν (c(Z) + c(Z')) over a batch.

    Attributes:
        invariance: λ, the weight of the views' distance.
        variance: μ, the weight of the hinge on each dimension's standard deviation.
        covariance: ν, the weight of the covariances.
        official: Use the scaling of the released code, to which the weights 25, 25 and 1 belong: it divides s by d
            and v by 2. With the paper's equations, s outweighs the other terms by d.
    """

    replays: ClassVar[bool] = True
    name: ClassVar[str] = "vicreg"
    source: ClassVar[str] = "Bardes et al. 2022, Eqs. 1-6"
    least_loss: ClassVar[float] = 0.0
    invariance: Factor = 25.0
    variance: Factor = 25.0
    covariance: Factor = 1.0
    official: bool = True

    def forwards(self) -> Sequence[Forward]:
        """Pass both views through the local networks."""
        return VIEWS

    def loss(self, context: ClientContext, batch: Batch, passes: Passes) -> Tensor:
        """Invariance, variance and covariance of both views."""
        z1, z2 = (passes[view].z for view in VIEWS)
        return vicreg(z1, z2, self.invariance, self.variance, self.covariance, self.official)
