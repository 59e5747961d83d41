"""FedBN: every client retains its BatchNorm layers (Li et al., ICLR 2021).

    w^(l) ← Σ_k p_k w_k^(l)   for every tensor l outside BatchNorm;   γ, β, μ, σ² of client k are local-only

Layers are identified by their type: the released code searches for "bn" in names, which misses the layers of stems,
shortcuts and projectors. There is no global model: each client ends with a personal model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from atoll.components.base import ClientContext, Merge
from atoll.core.tree import Tree, Weights
from atoll.methods.method import Method
from atoll.models.norms import norm_layers
from atoll.objectives.simclr import SimCLR


def norm_names(networks: nn.Module) -> set[str]:
    """Names of all parameters and statistics of BatchNorm layers, by module type."""
    return {
        f"{prefix}.{name}"
        for prefix, norm in norm_layers(networks, every_name=True).items()
        for name in norm.state_dict()
    }


@dataclass(frozen=True)
class FedBN(Merge):
    """Retain BatchNorm layers at the client."""

    name: ClassVar[str] = "fedbn"
    source: ClassVar[str] = "Li et al. 2021 (FedBN), Algorithm 1"
    keeps: ClassVar[tuple[str, ...]] = ("its BatchNorm layers",)
    personalises: ClassVar[bool] = True
    shares: ClassVar[str] = "the weights of all trained networks outside BatchNorm"

    def refuse_networks(self, networks: nn.ModuleDict) -> str | None:
        """Refuse networks without BatchNorm."""
        if not norm_names(networks):
            return "'fedbn' keeps BatchNorm layers at the clients, and these networks have none; choose 'replace'"
        return None

    def private(self, networks: nn.ModuleDict) -> set[str]:
        """Name all parameters and statistics of BatchNorm layers."""
        return norm_names(networks)

    def join(self, context: ClientContext, downloaded: Weights) -> Weights:
        """Combine the download with the retained BatchNorm layers; the first time, use the initial ones."""
        return {**downloaded, **(context.of(self).retained or {})}

    def keep(self, context: ClientContext) -> Tree:
        """Retain the trained BatchNorm layers."""
        state = context.networks.state_dict()
        return {name: state[name].detach() for name in sorted(norm_names(context.networks))}

    def personal(self, weights: Weights, retained: Tree) -> Weights:
        """Combine the shared weights with the client's BatchNorm layers."""
        return {**weights, **(retained or {})}


METHOD = Method(
    objective=SimCLR(),
    merge=FedBN(),
    title="FedBN",
    paper="Li et al., FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, ICLR 2021",
    family="Personalised and clustered methods",
)
