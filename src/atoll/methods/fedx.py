"""FedX: distillation between views, and from the global into the local model (Han et al., ECCV 2022).

With p = g(f(x)), q = the prediction of p, two views 1 and 2, other images r of the client, and G for outputs of the
downloaded model (frozen, in evaluation mode):

    L = NT-Xent(p₁, p₂) + J(p₁, p₂; p_r)            local: contrast and relation
      + NT-Xent(q₁, p₂ᴳ) + J(q₁, q₂; p_rᴳ)          global: contrast and relation

J compares the relations of two views to the other images (see `atoll.functional.relational`). The local contrast is
the objective, `SimCLR` with τ = 0.1; the other three losses are the term `FedX`, which works with any objective.
Clients send the same data as with FedAvg.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from atoll.components.base import VIEWS, Batch, ClientContext, Forward, Passes, Setting, Term
from atoll.core.errors import UserError
from atoll.core.schema import Positive
from atoll.functional import nt_xent, relational
from atoll.methods.method import Method
from atoll.models import build_predictor
from atoll.objectives.simclr import SimCLR

OTHER = Forward("other")
GLOBAL_VIEW, GLOBAL_OTHER = Forward("view2", "global"), Forward("other", "global")


@dataclass(frozen=True)
class FedX(Term):
    """FedX's distillation; each of its three losses can be disabled.

    Attributes:
        weight: Weight of the sum of the three losses.
        local_relation: J(p₁, p₂; p_r).
        global_contrast: NT-Xent(q₁, p₂ᴳ).
        global_relation: J(q₁, q₂; p_rᴳ).
        temperature: τ of all three losses.
        target_temperature: τ' of the targets of the relations.
    """

    replays: ClassVar[bool] = True
    name: ClassVar[str] = "fedx"
    source: ClassVar[str] = "Han et al. 2022 (FedX), Section 3"
    local_relation: bool = True
    global_contrast: bool = True
    global_relation: bool = True
    temperature: Positive = 0.1
    target_temperature: Positive = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.local_relation or self.global_contrast or self.global_relation):
            raise UserError(
                "all of fedx's losses are disabled; enable one or remove 'fedx' from method.terms"
            )

    def heads(self, setting: Setting) -> dict[str, nn.Module]:
        """Build the predictor, which only the global losses read."""
        if not (self.global_contrast or self.global_relation):
            return {}
        return {"predictor": build_predictor(setting.model, setting.embedding_dim)}

    def forwards(self) -> Sequence[Forward]:
        """Pass both views, other images for the relations, and images through the global model for its losses."""
        wanted = {
            OTHER: self.local_relation,
            GLOBAL_VIEW: self.global_contrast,
            GLOBAL_OTHER: self.global_relation,
        }
        return (*VIEWS, *(forward for forward, needed in wanted.items() if needed))

    def start(self, context: ClientContext) -> None:
        """Load the downloaded model as a frozen copy, for the global losses."""
        if self.global_contrast or self.global_relation:
            context.frozen("global", context.received)

    def loss(self, context: ClientContext, batch: Batch, passes: Passes) -> Tensor:
        """Sum of the enabled losses."""
        one, two = (passes[view] for view in VIEWS)
        temperatures = (self.temperature, self.target_temperature)
        losses = []
        if self.local_relation:
            losses.append(relational(one.z, two.z, passes[OTHER].z, *temperatures))
        if self.global_contrast:
            losses.append(nt_xent(one.q, passes[GLOBAL_VIEW].z, self.temperature))
        if self.global_relation:
            losses.append(relational(one.q, two.q, passes[GLOBAL_OTHER].z, *temperatures))
        return torch.stack(losses).sum()


METHOD = Method(
    objective=SimCLR(temperature=0.1),
    terms=(FedX(),),
    title="FedX",
    paper="Han et al., FedX: Unsupervised Federated Learning with Cross Knowledge Distillation, ECCV 2022",
    family="Federated self-supervised methods",
)
