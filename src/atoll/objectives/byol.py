"""BYOL: predict a momentum target network's embedding of the other view (Grill et al. 2020)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor, nn

from atoll.components.base import VIEWS, Batch, ClientContext, Forward, Objective, Passes, Setting
from atoll.core.schema import Momentum
from atoll.core.tree import Tree
from atoll.functional import byol
from atoll.models.heads import build_predictor
from atoll.objectives.momentum import encoding_weights, follow, start_target

TARGETS = (Forward("view1", "byol_target"), Forward("view2", "byol_target"))


@dataclass(frozen=True)
class BYOL(Objective):
    """L = (2 − 2cos(q₁, sg z'₂)) + (2 − 2cos(q₂, sg z'₁)), and ξ ← mξ + (1 − m)θ after each step.

    The online network consists of encoder, projector and predictor; the target network of the first two.

    Attributes:
        momentum: m, constant as in the released federated code.
        target: The target network at the start of a round: the one that the client retained from its last round
            (``"kept"``: FedU, FedEMA), or a copy of the online network at the start of this round (``"reset"``).
    """

    name: ClassVar[str] = "byol"
    source: ClassVar[str] = "Grill et al. 2020, Eqs. 1-2"
    replays: ClassVar[bool] = True
    least_loss: ClassVar[float] = 0.0
    momentum: Momentum = 0.99
    target: Literal["kept", "reset"] = "kept"

    @property
    def keeps(self) -> tuple[str, ...]:
        """Name the retained client state: the target network, unless each round resets it."""
        return ("its target network",) if self.target == "kept" else ()

    def heads(self, setting: Setting) -> dict[str, nn.Module]:
        """Build the predictor."""
        return {"predictor": build_predictor(setting.model, setting.embedding_dim)}

    def forwards(self) -> Sequence[Forward]:
        """Pass both views through the online and the target network."""
        return (*VIEWS, *TARGETS)

    def start(self, context: ClientContext) -> None:
        """Restore the target network, or copy it from the online network."""
        scope = context.of(self)
        scope.target = start_target(context, "byol_target", context.retained(self))

    def loss(self, context: ClientContext, batch: Batch, passes: Passes) -> Tensor:
        """Sum of both directions."""
        q1, q2 = (passes[view].q for view in VIEWS)
        z1, z2 = (passes[view].z for view in TARGETS)
        return byol(q1, z2) + byol(q2, z1)

    def after_step(self, context: ClientContext) -> None:
        """Move the target towards the online network."""
        follow(context.of(self).target, context.networks, self.momentum)

    def keep(self, context: ClientContext) -> Tree:
        """Return the target's weights as client state, unless each round resets it."""
        return encoding_weights(context, context.of(self).target) if self.target == "kept" else None
