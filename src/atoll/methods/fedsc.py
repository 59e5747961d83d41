"""FedSC: clients contrast their images with everyone else's through a correlation matrix (Jing et al., ICML 2024).

    R   = (1/2N) Σ z zᵀ over both views,   ‖z‖ clipped to √μ
    C_k = R over the client's whole data, by the downloaded model in evaluation mode, plus noise
    C̄_k = mean of C_j over the other clients j ≠ k
    L_k = −(2/N) Σ_i z_i·z_i⁺ + a tr(R²) + 2(1 − a) tr(R C̄_k)

a falls linearly over the rounds, from the spectral contrastive loss (a = 1) on. The server must keep one matrix for
each client, K·d² numbers, because clients that sit a round out count with their last matrix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from atoll.components.base import (
    VIEWS,
    Batch,
    ClientContext,
    Forward,
    Optional,
    Passes,
    Setting,
    Spec,
    TensorSpec,
)
from atoll.core.schema import AtLeast, AtMost, Count, Positive
from atoll.core.tree import Tree, Weights
from atoll.functional import clipped_correlation, spectral_contrast
from atoll.methods.cohort_statistics import CohortStatistics
from atoll.methods.method import Method

ROUNDING = 1e-4  # relative to μ


@dataclass(frozen=True)
class FedSC(CohortStatistics):
    """The spectral contrastive loss with other clients' correlation matrix.

    Attributes:
        mu: μ, the largest squared norm of an embedding; longer ones are clipped. Released code: 4 in its
            configuration, 5 as a default, 2 in one script.
        first_share: Weight a of the client's own negatives in the first round.
        last_share: Weight a after the last round.
        passes: Augmented views of each image in C_k; the released code has five pairs.
        noise: Standard deviation of the Gaussian noise on each entry of C_k. It is drawn from the run's seed, which
            the server knows.
    """

    replays: ClassVar[bool] = True
    name: ClassVar[str] = "fedsc"
    source: ClassVar[str] = "Jing et al. 2024 (FedSC)"
    egress: ClassVar[tuple[str, ...]] = ("the noisy correlation matrix of its embeddings",)
    mu: Positive = 4.0
    first_share: Annotated[float, AtLeast(0), AtMost(1)] = 1.0
    last_share: Annotated[float, AtLeast(0), AtMost(1)] = 0.2
    passes: Count = 10
    noise: Annotated[float, AtLeast(0)] = 0.00104

    @property
    def follows_rounds(self) -> bool:
        """Whether a falls over all rounds of the run."""
        return self.first_share != self.last_share

    def share(self, round: int, rounds: int) -> float:
        """Return a in a round that trains."""
        first = 2 if self.gather == "rounds" else 1
        return self.first_share - (self.first_share - self.last_share) * (round - first) / rounds

    def send(self, state: Tree, client: int, cohort: Sequence[int], round: int) -> Tree:
        """Send C̄_k, the mean of the others' matrices, if there is one and the client trains."""
        if state is None or not self.trains(round):
            return None
        others = [matrix for owner, matrix in state.items() if owner != str(client)]
        return torch.stack(others).mean(dim=0) if others else None

    def forwards(self) -> Sequence[Forward]:
        """Pass both views through the local networks."""
        return VIEWS

    def start(self, context: ClientContext) -> None:
        """Load C̄_k and a."""
        scope = context.of(self)
        scope.others = None if scope.message is None else scope.message.to(context.device)
        scope.share = self.share(context.round, context.setting.train.rounds)

    def loss(self, context: ClientContext, batch: Batch, passes: Passes) -> Tensor:
        """Contrast with the batch and with the other clients."""
        scope = context.of(self)
        z1, z2 = (passes[view].z for view in VIEWS)
        return spectral_contrast(z1, z2, self.mu, scope.others, scope.share)

    def finish(self, context: ClientContext) -> Tree:
        """Compute C_k over augmented views of all images, and add noise."""
        if not self.sends(context.round):
            return None
        views, noise = context.stream("fedsc-views"), context.stream("fedsc-noise")
        matrices = [
            clipped_correlation(context.outputs(context.networks, "z", augment=views)[0], self.mu)
            for _ in range(self.passes)
        ]
        matrix = torch.stack(matrices).mean(dim=0).cpu()
        return matrix + self.noise * torch.randn(matrix.shape, generator=noise)

    def declares(self, setting: Setting) -> Spec:
        """Declare a matrix whose entries are at most μ, plus noise."""
        most = self.mu + 10.0 * self.noise
        shape = (setting.embedding_dim, setting.embedding_dim)
        return Optional(TensorSpec(shape, least=-most, most=most))

    def refuse_slice(self, piece: Tree, setting: Setting, weights: Weights) -> str | None:
        """Refuse matrices that are no mean of z zᵀ with ‖z‖² ≤ μ, beyond what the noise explains."""
        if piece is None:
            return None
        matrix, slack = piece.double(), ROUNDING * self.mu
        noise = 10.0 * self.noise  # of an entry; a norm of the whole noise is at most √d times that
        spread = noise * math.sqrt(len(matrix))
        if float((matrix - matrix.T).abs().max()) > 2 * noise + slack:
            return "its slice of 'fedsc' is not symmetric"
        if float(matrix.trace()) > self.mu + spread + slack:
            return f"its slice of 'fedsc' has the trace {float(matrix.trace()):.4g}, above μ = {self.mu:g}"
        least = float(torch.linalg.eigvalsh((matrix + matrix.T) / 2)[0])
        if least < -spread - slack:
            return f"its slice of 'fedsc' has the eigenvalue {least:.4g}, which no mean of z zᵀ has"
        return None

    def fold(self, state: Tree, setting: Setting, round: int) -> MatrixFold | None:
        """Start to replace the matrices of the clients that take part."""
        return MatrixFold(state) if self.sends(round) else None


class MatrixFold:
    """The last matrix of each client, by its id."""

    def __init__(self, state: Tree) -> None:
        self._matrices: dict[str, Tensor] = dict(state or {})

    def add(self, client: int, piece: Tree) -> None:
        """Replace a client's matrix."""
        if piece is not None:
            self._matrices[str(client)] = piece.clone()

    def close(self) -> Tree:
        """Return all matrices in the order of client ids, in which `FedSC.send` adds them."""
        return {name: self._matrices[name] for name in sorted(self._matrices, key=int)}


METHOD = Method(
    objective=FedSC(),
    title="FedSC",
    paper="Jing et al., FedSC: Provable Federated Self-supervised Learning, ICML 2024",
    family="Federated self-supervised methods",
)
