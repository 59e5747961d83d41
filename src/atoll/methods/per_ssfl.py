"""Per-SSFL: a personal model for each client, near the global one in its representations (He et al., 2021).

    Θ    ← FedAvg of SimSiam:     L(Θ)   = ½ (D(Q₁, sg Z₂) + D(Q₂, sg Z₁))
    θ_k  trained on every batch:  l(θ_k) = ½ (D(q₁, sg z₂) + D(q₂, sg z₁)) + λ/2 (D(q₁, sg Z₁) + D(q₂, sg Z₂))

D = −cos. Capital letters are outputs of the global networks Θ, which the client trains and sends; small letters are
those of its personal networks θ_k, which never leave it. θ_k starts as the first download. We have read the paper's
abstract, and not its text: "regulating the distance between the local and global representations of data" is read
as the second summand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, cast

from torch import Tensor, nn

from atoll.components.base import (
    VIEWS,
    Batch,
    ClientContext,
    Forward,
    Merge,
    Passes,
    Setting,
    Term,
    run_forwards,
)
from atoll.core.schema import AtLeast
from atoll.core.tree import Tree, Weights
from atoll.functional import simsiam
from atoll.methods.method import Method
from atoll.models import build_encoder, build_projector
from atoll.models.heads import build_predictor
from atoll.objectives.simsiam import SimSiam

PERSONAL = "personal"  # name of the head that holds θ_k
PREFIX = f"{PERSONAL}."
ALONE = SimSiam()  # the personal networks' loss without the global ones


@dataclass(frozen=True)
class PersonalNetworks(Merge):
    """θ_k: a second encoder, projector and predictor, which each client trains for itself."""

    name: ClassVar[str] = "personal_networks"
    source: ClassVar[str] = "He et al. 2021 (Per-SSFL)"
    keeps: ClassVar[tuple[str, ...]] = ("its personal networks",)
    personalises: ClassVar[bool] = True
    shares: ClassVar[str] = "the weights of all trained networks but the personal ones"
    local_heads: ClassVar[tuple[str, ...]] = (PERSONAL,)

    def refuse(self, setting: Setting) -> str | None:
        """Refuse frozen weights and adapters, which the personal encoder would not have."""
        if not (setting.model.freeze or setting.model.lora_rank):
            return None
        return (
            "'personal_networks' trains a second encoder as a whole, without model.freeze and model.lora_rank; "
            "remove these, or set method.share for personal weights of one encoder"
        )

    def heads(self, setting: Setting) -> dict[str, nn.Module]:
        """Build the personal networks."""
        model, (channels, size, _) = setting.model, setting.image_shape
        networks = {
            "encoder": build_encoder(model, channels, size),
            "projector": build_projector(model, setting.encoder_dim),
            "predictor": build_predictor(model, setting.embedding_dim),
        }
        return {PERSONAL: nn.ModuleDict(networks)}

    def join(self, context: ClientContext, downloaded: Weights) -> Weights:
        """Start the personal networks as copies of the downloaded ones; retained ones then take their place."""
        return {name: downloaded.get(name.removeprefix(PREFIX), own) for name, own in downloaded.items()}

    def personal(self, weights: Weights, retained: Tree) -> Weights:
        """Return the model with the client's personal networks in place of the global ones."""
        return {name: weights.get(f"{PREFIX}{name}", shared) for name, shared in weights.items()}


@dataclass(frozen=True)
class PerSSFL(Term):
    """l(θ_k), whose gradient reaches the personal networks alone.

    Attributes:
        consensus: λ; with 0, the personal networks never see the global ones after the first download.
    """

    replays: ClassVar[bool] = True
    name: ClassVar[str] = "per_ssfl"
    source: ClassVar[str] = "He et al. 2021 (Per-SSFL)"
    consensus: Annotated[float, AtLeast(0)] = 1.0

    @property
    def least_loss(self) -> float:
        """Every cosine is 1."""
        return -1.0 - self.consensus

    def refuse_networks(self, networks: nn.ModuleDict) -> str | None:
        """Refuse a method without personal networks."""
        if PERSONAL in networks:
            return None
        return "'per_ssfl' trains the networks of a merge; set method.merge = 'personal_networks'"

    def forwards(self) -> Sequence[Forward]:
        """Pass both views through the global networks, which this client trains."""
        return VIEWS

    def loss(self, context: ClientContext, batch: Batch, passes: Passes) -> Tensor:
        """Add the distance to the global embeddings to SimSiam's loss of the personal networks."""
        joint = context.setting.train.views_batch == "joint"
        personal = cast(nn.ModuleDict, context.networks[PERSONAL])
        own = run_forwards(VIEWS, {"local": personal}, batch.images, joint, {})
        alone = ALONE.loss(context, batch, own)
        if not self.consensus:
            return alone
        first, second = (simsiam(own[view].q, passes[view].z) for view in VIEWS)
        return alone + self.consensus * 0.5 * (first + second)


METHOD = Method(
    objective=SimSiam(),
    terms=(PerSSFL(),),
    merge=PersonalNetworks(),
    title="Per-SSFL",
    paper="He et al., SSFL: Tackling Label Deficiency in FL via Personalized Self-Supervision, 2021",
    family="Personalised and clustered methods",
)
