"""FedProx: penalise the distance from the global model (Li et al., MLSys 2020).

    L_k = L + (μ/2) ‖w − w_g‖²                                                                 (Eq. 2)

over the trained parameters w; w_g is the downloaded model. Clients send the same data as with FedAvg.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from atoll.components.base import Batch, ClientContext, Passes, Term
from atoll.methods.method import Method
from atoll.objectives.simclr import SimCLR


@dataclass(frozen=True)
class FedProx(Term):
    """½ ‖w − w_g‖²; ``weight`` is μ. Dec-SSL states no value; values from 0.001 to 1 are common.

    Attributes:
        weight: μ.
    """

    replays: ClassVar[bool] = True
    name: ClassVar[str] = "fedprox"
    source: ClassVar[str] = "Li et al. 2020 (FedProx), Eq. 2"
    least_loss: ClassVar[float] = 0.0
    weight: float = 0.01

    def embeds(self) -> bool:
        """Return False: the loss reads only weights."""
        return False

    def start(self, context: ClientContext) -> None:
        """Copy w_g to the device."""
        scope = context.of(self)
        trained = {name: w for name, w in context.networks.named_parameters() if w.requires_grad}
        scope.weights = list(trained.values())
        # For weights that were not downloaded (BatchNorm with FedBN, all weights with local-only training),
        # w_g is w.
        start = {name: context.received.get(name, w).detach() for name, w in trained.items()}
        scope.downloaded = [w_g.to(context.device, copy=True) for w_g in start.values()]

    def loss(self, context: ClientContext, batch: Batch, passes: Passes) -> Tensor:
        """Half the squared distance (Eq. 2)."""
        scope = context.of(self)
        squares = [(w - w_g).square().sum() for w, w_g in zip(scope.weights, scope.downloaded, strict=True)]
        return 0.5 * torch.stack(squares).sum()


METHOD = Method(
    objective=SimCLR(),
    terms=(FedProx(),),
    title="FedProx",
    paper="Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020; on SimCLR as in Dec-SSL",
    family="Federated self-supervised methods",
)
