"""FedU: divergence-aware predictor update (Zhuang et al., ICCV 2021).

A client downloads the aggregated online network and combines it with its retained state:

    encoder and projector   ← downloaded
    predictor               ← downloaded if d_k < μ, else retained
    target                  ← retained (see `BYOL`)

    d_k = mean over the encoder's weights l of ‖w^(l) − w_k^(l)‖₂, with w before and w_k after local training

d_k refers to the client's last training, so clients send the same data as with FedAvg. In its first round, a client
downloads all networks. The paper describes the divergence between the local and the global model; its code computes
this drift. The paper has no rule for objectives without a predictor; here the projector takes its place.
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


def drift(encoder: nn.Module, before: Weights, skip: tuple[str, ...] = ()) -> float:
    """Compute d_k, the mean L2 distance by which local training moved an encoder's kernels and matrices.

    Args:
        encoder: The trained encoder.
        before: Weights with which training began, as ``"encoder.NAME"``; the distance is over these.
        skip: Weights with names that contain one of these strings are excluded.
    """
    moved = [
        torch.linalg.vector_norm(weight.detach() - before[f"encoder.{name}"].to(weight.device))
        for name, weight in encoder.named_parameters()
        if weight.ndim >= 2
        and f"encoder.{name}" in before
        and not any(component in name for component in skip)
    ]
    return float(torch.stack(moved).mean()) if moved else 0.0


def last_head(networks: nn.ModuleDict) -> str:
    """Return the name of the predictor, or of the projector if there is no predictor."""
    return "predictor" if "predictor" in networks else "projector"


@dataclass(frozen=True)
class FedU(Merge):
    """The divergence-aware predictor update.

    Attributes:
        threshold: μ.
        skip: Weights with names that contain one of these strings are excluded from d_k. The released code excludes
            the shortcuts (``["downsample"]``).
    """

    name: ClassVar[str] = "fedu"
    source: ClassVar[str] = "Zhuang et al. 2021 (FedU), Section 4.2"
    needs_steps: ClassVar[bool] = True
    keeps: ClassVar[tuple[str, ...]] = ("its predictor", "how far its encoder moved")
    threshold: float = 0.4
    skip: tuple[str, ...] = ()

    def refuse_networks(self, networks: nn.ModuleDict) -> str | None:
        """Refuse networks without a predictor or a projector."""
        head = last_head(networks)
        if head not in networks or not networks[head].state_dict():
            return (
                "'fedu' decides whether a client retains its predictor or projector, and this method trains none; "
                "choose an objective with a predictor, such as 'byol', or another merge"
            )
        return None

    def join(self, context: ClientContext, downloaded: Weights) -> Weights:
        """Combine the download with the retained predictor if the encoder drifted by the threshold or more."""
        retained = context.of(self).retained
        if retained is None or retained["divergence"] < self.threshold:
            return downloaded
        return {**downloaded, **retained["predictor"]}

    def keep(self, context: ClientContext) -> Tree:
        """Retain the trained predictor, and d_k."""
        head = last_head(context.networks) + "."
        state = context.networks.state_dict()
        predictor = {name: state[name].detach() for name in state if name.startswith(head)}
        moved = drift(context.networks["encoder"], context.received, self.skip)
        return {"predictor": predictor, "divergence": moved}


METHOD = Method(
    objective=BYOL(),
    merge=FedU(),
    title="FedU",
    paper="Zhuang et al., Collaborative Unsupervised Visual Representation Learning, ICCV 2021",
    family="Federated self-supervised methods",
)
