"""FedU: divergence-aware predictor update (Zhuang et al., ICCV 2021).

A client downloads the aggregated online network and joins it with its own state:

    encoder and projector   ← the downloaded ones
    predictor               ← the downloaded one if d_k < μ, else the client's own
    target                  ← the client's own (see `BYOL`)

    d_k = mean over the encoder's weights l of ‖w^(l) − w_k^(l)‖₂, w as downloaded and w_k as trained

d_k is of the client's own last training, so nothing more is sent than with FedAvg. At a client's first time all
is taken from the server. The paper writes of the divergence between local and global model; its code measures
this drift. For objectives without a predictor the paper gives no rule: the projector stands in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from atoll.components.base import ClientContext, Merge
from atoll.core.tree import Tree, Weights
from atoll.methods.method import Method
from atoll.objectives.byol import BYOL


def drift(context: ClientContext, skip: tuple[str, ...] = ()) -> float:
    """d_k: how far the encoder's kernels and matrices moved from the downloaded ones; their mean L2 distance."""
    moved = [
        torch.linalg.vector_norm(weight.detach() - context.received[f"encoder.{name}"].to(weight.device))
        for name, weight in context.networks["encoder"].named_parameters()
        if weight.ndim >= 2 and not any(component in name for component in skip)
    ]
    return float(torch.stack(moved).mean())


def last_head(networks: nn.ModuleDict) -> str:
    """The predictor, or the projector where there is none."""
    return "predictor" if "predictor" in networks else "projector"


@dataclass(frozen=True)
class FedU(Merge):
    """The divergence-aware predictor update.

    Attributes:
        threshold: μ.
        skip: Weights whose names hold one of these do not count in d_k. The released code leaves out the
            shortcuts (``["downsample"]``).
    """

    name: ClassVar[str] = "fedu"
    source: ClassVar[str] = "Zhuang et al. 2021 (FedU), Section 4.2"
    keeps: ClassVar[tuple[str, ...]] = ("its predictor", "how far its encoder moved")
    threshold: float = 0.4
    skip: tuple[str, ...] = ()

    def refuse_networks(self, networks: nn.ModuleDict) -> str | None:
        """Without a head there is nothing to decide on."""
        head = last_head(networks)
        if head not in networks or not networks[head].state_dict():
            return (
                "'fedu' decides whether a client keeps its predictor or projector, and this method trains none; "
                "choose an objective with a predictor, such as 'byol', or another merge"
            )
        return None

    def join(self, context: ClientContext, downloaded: Weights) -> Weights:
        """The downloaded networks, with the client's own predictor where it had moved far."""
        retained = context.of(self).retained
        if retained is None or retained["divergence"] < self.threshold:
            return downloaded
        return {**downloaded, **retained["predictor"]}

    def keep(self, context: ClientContext) -> Tree:
        """The predictor as trained, and d_k."""
        head = last_head(context.networks) + "."
        state = context.networks.state_dict()
        predictor = {name: state[name].detach() for name in state if name.startswith(head)}
        return {"predictor": predictor, "divergence": drift(context, self.skip)}


METHOD = Method(
    objective=BYOL(),
    merge=FedU(),
    title="FedU",
    paper="Zhuang et al., Collaborative Unsupervised Visual Representation Learning, ICCV 2021",
    family="Federated self-supervised methods",
)
