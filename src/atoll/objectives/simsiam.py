"""SimSiam: predict the other view's embedding, with a stop-gradient on that embedding (Chen and He 2021)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from atoll.components.base import VIEWS, Batch, ClientContext, Forward, Objective, Passes, Setting
from atoll.functional import simsiam
from atoll.models.heads import build_predictor


@dataclass(frozen=True)
class SimSiam(Objective):
    """L = ½ (D(q₁, sg z₂) + D(q₂, sg z₁)) with D = −cos."""

    replays: ClassVar[bool] = True
    name: ClassVar[str] = "simsiam"
    source: ClassVar[str] = "Chen and He 2021, Eqs. 1-4"
    least_loss: ClassVar[float] = -1.0

    def heads(self, setting: Setting) -> dict[str, nn.Module]:
        """Build the predictor."""
        return {"predictor": build_predictor(setting.model, setting.embedding_dim)}

    def forwards(self) -> Sequence[Forward]:
        """Pass both views through the local networks."""
        return VIEWS

    def loss(self, context: ClientContext, batch: Batch, passes: Passes) -> Tensor:
        """Mean of both directions."""
        one, two = (passes[view] for view in VIEWS)
        return 0.5 * (simsiam(one.q, two.z) + simsiam(two.q, one.z))
