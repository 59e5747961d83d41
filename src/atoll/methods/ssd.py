"""SSD: soft separation and distillation (Fang et al., ICCV 2025).

    L_k = L_align + β L_uniform + γ L_DSR + δ L_PD                                             (Eq. 10)

The server assigns disjoint dimensions S_k of the embedding space to the clients (Eq. 6). Dimension-scaled
regularisation moves a client's embeddings towards S_k (Eq. 7), so that the clients spread over the sphere;
projector distillation transfers this from the embedding to the representation (Eq. 9). Only weights leave a
client, and FedAvg averages them. Hard separation (Fig. 6b) is the limit in which a client uses S_k only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from atoll.aggregation.fedavg import FedAvg
from atoll.components.base import VIEWS, Batch, ClientContext, Forward, Passes, Setting, Term, Trained
from atoll.core.rng import stream
from atoll.core.schema import AtLeast, Positive
from atoll.core.tree import Tree
from atoll.functional import dimension_scaling, projector_distillation
from atoll.methods.method import Method
from atoll.objectives.align_uniform import AlignUniform


@dataclass(frozen=True)
class Separation(Term):
    """Base class of soft and hard separation: dimensions S_k, |S_k| = ⌊d/K⌋, disjoint over clients (Eq. 6).

    Attributes:
        basis: ``"axes"`` takes S_k from the coordinates (Eq. 6); ``"random"`` takes S_k from the columns of one
            random orthonormal matrix Q that all clients share (the official code).
        draw: Number of the draw of Q; another draw gives other S_k, and changes nothing else.
        index_by: S_k belongs to a ``"client"``, or to a ``"slot"`` of the round's cohort (the official code).
    """

    basis: Literal["axes", "random"] = "axes"
    draw: Annotated[int, AtLeast(0)] = 0
    index_by: Literal["client", "slot"] = "client"

    def refuse(self, setting: Setting) -> str | None:
        """Refuse more clients than dimensions: some clients would have an empty S_k; and slots for lone clients."""
        if self.index_by == "slot" and setting.cohort_size == 1 < setting.num_clients:
            return (
                f"{self.name!r} with index_by = 'slot' gives all clients the same dimensions if one client is in "
                f"a round; set options.{self.name}.index_by = 'client'"
            )
        if setting.num_clients > setting.embedding_dim:
            return (
                f"{self.name!r} gives each client separate embedding dimensions, and {setting.num_clients} clients "
                f"do not fit into {setting.embedding_dim}; lower partition.clients or raise model.projector_dim"
            )
        return None

    def constants(self, setting: Setting, prerequisites: Mapping[str, Trained]) -> Tree:
        """Draw Q, from the QR decomposition of a Gaussian matrix."""
        if self.basis == "axes":
            return None
        d = setting.embedding_dim
        draws = stream(setting.seed, "ssd-basis", *([self.draw] if self.draw else []))
        gaussian = torch.randn(d, d, generator=draws, dtype=torch.float64)
        return torch.linalg.qr(gaussian).Q.float()

    def send(self, state: Tree, client: int, cohort: Sequence[int], round: int) -> Tree:
        """Send the index k of the client's S_k."""
        return client if self.index_by == "client" else cohort.index(client)

    def forwards(self) -> Sequence[Forward]:
        """Pass both views through the local networks."""
        return VIEWS

    def start(self, context: ClientContext) -> None:
        """Build the indicator vector of S_k (Eq. 6), and load the basis Q."""
        scope = context.of(self)
        scope.inside, scope.basis = self.subspace(context)

    def subspace(self, context: ClientContext) -> tuple[Tensor, Tensor | None]:
        """The indicator vector of S_k, (d,), and Q, (d, d); None for the coordinates."""
        scope, d = context.of(self), context.setting.embedding_dim
        size = d // context.setting.num_clients
        inside = torch.zeros(d, device=context.device)
        inside[scope.message * size : (scope.message + 1) * size] = 1
        return inside, None if scope.constants is None else scope.constants.to(context.device)


@dataclass(frozen=True)
class DSR(Separation):
    """Dimension-scaled regularisation: move ẑ towards its copy scaled by α along S_k (Eqs. 6 and 7).

    Attributes:
        weight: γ.
        scale: α.
        reduction: ``"fro_over_n"``: ‖Ẑ − T‖_F / N, from the released code, which produced the paper's tables;
            ``"mean_sq"``: Eq. 7.
        renormalise: Normalise the target again (the released code). False, with ``"mean_sq"``, is Eq. 7 literally,
            on embeddings that are not normalised; that loss has no fixed point, and ‖z‖ grows without bound.
    """

    replays: ClassVar[bool] = True
    name: ClassVar[str] = "dsr"
    source: ClassVar[str] = "SSD Eqs. 6-7"
    least_loss: ClassVar[float] = 0.0
    scale: float = 10.0
    reduction: Literal["fro_over_n", "mean_sq"] = "fro_over_n"
    renormalise: bool = True

    def loss(self, context: ClientContext, batch: Batch, passes: Passes) -> Tensor:
        """Mean over both views of the distance to their scaled copies (Eq. 7)."""
        scope = context.of(self)
        d_k = 1 + (self.scale - 1) * scope.inside  # Eq. 6
        losses = [
            dimension_scaling(passes[view].z, d_k, scope.basis, self.reduction, self.renormalise)
            for view in VIEWS
        ]
        return torch.stack(losses).mean()


@dataclass(frozen=True)
class HSD(Separation):
    """Hard separation: a client uses S_k only (Fig. 6b; the paper gives no equation).

    Attributes:
        kind: ``"target"`` moves ẑ towards its projection on S_k, the limit α → ∞ of DSR; ``"mask"`` sets the
            embedding to 0 outside S_k before any loss reads it.
        reduction: As for ``dsr``, if ``kind`` is ``"target"``.
    """

    replays: ClassVar[bool] = True
    name: ClassVar[str] = "hsd"
    source: ClassVar[str] = "SSD Fig. 6b (our reading)"
    least_loss: ClassVar[float] = 0.0
    kind: Literal["target", "mask"] = "target"
    reduction: Literal["fro_over_n", "mean_sq"] = "fro_over_n"

    def after_heads(self, context: ClientContext) -> dict[str, Callable[[Tensor], Tensor]]:
        """For ``"mask"``, project the outputs of all projectors: the trained one and those of frozen copies."""
        if self.kind != "mask":
            return {}
        inside, basis = self.subspace(context)
        q = torch.eye(len(inside), device=context.device) if basis is None else basis
        projection = (q * inside) @ q.T
        return {"projector": lambda z: z @ projection.to(z.dtype)}

    def loss(self, context: ClientContext, batch: Batch, passes: Passes) -> Tensor:
        """Mean over both views of the distance to their projections (0 for ``"mask"``, which projects exactly)."""
        scope = context.of(self)
        if self.kind == "mask":
            return passes[VIEWS[0]].z.new_zeros(())
        losses = [
            dimension_scaling(passes[view].z, scope.inside, scope.basis, self.reduction) for view in VIEWS
        ]
        return torch.stack(losses).mean()


@dataclass(frozen=True)
class PD(Term):
    """Projector distillation between the representation h and the embedding z (Eq. 9).

    Attributes:
        weight: δ.
        kind: ``"kl"``: the divergence; ``"mse"``: the mean of (h − z)² over all entries.
        direction: ``"zh"``: KL(σ(z/τ) ‖ σ(h/τ)), the official code; ``"hz"``: KL(σ(h/τ) ‖ σ(z/τ)), Eq. 9.
        temperature: τ; the paper has no temperature (τ = 1), the code has 0.5.
    """

    replays: ClassVar[bool] = True
    name: ClassVar[str] = "pd"
    source: ClassVar[str] = "SSD Eq. 9"
    least_loss: ClassVar[float] = 0.0
    weight: float = 0.1
    kind: Literal["kl", "mse"] = "kl"
    direction: Literal["zh", "hz"] = "zh"
    temperature: Positive = 0.5

    def refuse(self, setting: Setting) -> str | None:
        """Refuse representations and embeddings of different sizes."""
        if setting.encoder_dim != setting.embedding_dim:
            return (
                f"'pd' compares representations ({setting.encoder_dim} wide) with embeddings "
                f"({setting.embedding_dim} wide); set model.projector_dim = {setting.encoder_dim}"
            )
        return None

    def forwards(self) -> Sequence[Forward]:
        """Pass both views through the local networks."""
        return VIEWS

    def loss(self, context: ClientContext, batch: Batch, passes: Passes) -> Tensor:
        """Mean over both views of the distillation loss (Eq. 9)."""
        losses = [
            projector_distillation(
                passes[view].h, passes[view].z, self.kind, self.direction, self.temperature
            )
            for view in VIEWS
        ]
        return torch.stack(losses).mean()


METHOD = Method(
    objective=AlignUniform(),
    terms=(DSR(weight=1.0, scale=10.0), PD(weight=0.1)),  # γ, α and δ of Eq. 10
    aggregation=FedAvg(),
    title="SSD",
    paper="Fang et al., Soft Separation and Distillation, ICCV 2025",
    family="Federated self-supervised methods",
)
