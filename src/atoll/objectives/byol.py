"""BYOL: predict the embedding that a slowly following target gives to the other view (Grill et al. 2020)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor, nn

from atoll.functional import byol
from atoll.models.heads import build_predictor
from atoll.objectives.align_uniform import VIEWS
from atoll.objectives.momentum import encoding_weights, follow, start_target
from atoll.parts import Batch, Forward, Local, Objective, Passes, Setting
from atoll.tree import Tree

TARGETS = (Forward("view1", "byol_target"), Forward("view2", "byol_target"))


@dataclass(frozen=True)
class BYOL(Objective):
    """L = (2 − 2cos(q₁, sg z'₂)) + (2 − 2cos(q₂, sg z'₁)), and ξ ← mξ + (1 − m)θ after each step.

    Online are encoder, projector and predictor; the target has the first two.

    Attributes:
        momentum: m; constant, as in the released federated code.
        target: at the start of a round the target is the client's own of its last round (``"kept"``: FedU,
            FedEMA) or a copy of the online network that it begins with (``"reset"``).
    """

    name: ClassVar[str] = "byol"
    source: ClassVar[str] = "Grill et al. 2020, Eqs. 1-2"
    momentum: float = 0.99
    target: Literal["kept", "reset"] = "kept"

    @property
    def keeps(self) -> tuple[str, ...]:
        """The target, unless it starts anew each round."""
        return ("its target network",) if self.target == "kept" else ()

    def heads(self, setting: Setting) -> dict[str, nn.Module]:
        """The predictor."""
        return {"predictor": build_predictor(setting.model, setting.embedding_dim)}

    def forwards(self) -> Sequence[Forward]:
        """Both views, through both networks."""
        return (*VIEWS, *TARGETS)

    def start(self, local: Local) -> None:
        """Take up the target."""
        mine = local.of(self)
        mine.target = start_target(local, "byol_target", None if local.fresh else mine.own)

    def loss(self, local: Local, batch: Batch, passes: Passes) -> Tensor:
        """Both directions' sum."""
        q1, q2 = (passes[view].q for view in VIEWS)
        z1, z2 = (passes[view].z for view in TARGETS)
        return byol(q1, z2) + byol(q2, z1)

    def after_step(self, local: Local) -> None:
        """Let the target follow."""
        follow(local.of(self).target, local.networks, self.momentum)

    def keep(self, local: Local) -> Tree:
        """The target."""
        return encoding_weights(local.of(self).target) if self.target == "kept" else None
