"""Orchestra: globally consistent clustering (Lubana et al., ICML 2022).

Two levels of centroids make clients cluster their samples alike. A client trains on

    L = −mean_i Σ_j P'_ij log P_ij + CE(rotation of a third view, predicted from its embedding)
    P' = softmax(ẑ'₁Cᵀ / T),   P = softmax(ẑ₂Cᵀ / T),

where z' is the embedding of a target network that follows the online one, and C the server's G centroids,
constant during a round. The client keeps a memory of its newest target embeddings and afterwards clusters it,
with balanced assignments, into L local centroids, which it sends. The server fits C to all local centroids Z by

    min_C −cos(Sinkhorn(ZCᵀ), softmax(ẐCᵀ / T)),   ‖c_j‖ = 1.

Round 1 trains nothing: it is there for the first local centroids. The rotation term keeps embeddings from
collapsing. The paper does not say what becomes of the target between rounds; here it begins each round as a copy
of the downloaded network, unless ``target`` is ``"kept"``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from atoll.components.base import (
    Batch,
    ClientContext,
    Forward,
    Objective,
    Passes,
    Setting,
    Spec,
    TensorSpec,
    UpTo,
)
from atoll.core.rng import stream
from atoll.core.schema import Count, Positive
from atoll.core.tree import Tree, Weights
from atoll.functional import assignment_loss, sinkhorn_assignments
from atoll.methods.method import Method
from atoll.objectives.momentum import encoding_weights, enqueue, follow, start_target
from atoll.objectives.rotation import RotationTerm

TARGET, ONLINE = Forward("view1", "orchestra_target"), Forward("view2")


@torch.no_grad()
def balanced_centroids(
    z: Tensor, count: int, generator: torch.Generator, lam: float = 25.0, iterations: int = 5
) -> Tensor:
    """k-means on the sphere in which every centroid gets about as many rows: a client's local centroids.

    Assignments are the largest entries of balanced soft ones. The first centroids are rows drawn at random, and
    so is one that takes the place of a centroid without rows.

    Shape:
        z: (m, d), rows of length 1. Output: (count, d), rows of length 1.
    """
    first = torch.randperm(len(z), generator=generator)[torch.arange(count) % len(z)]
    centroids = z[first.to(z.device)]
    for _ in range(iterations):
        nearest = sinkhorn_assignments(z @ centroids.T, lam, iterations=10).argmax(dim=1)  # as released
        spare = torch.randint(len(z), (count,), generator=generator).to(z.device)
        means = [z[nearest == j].mean(dim=0) if (nearest == j).any() else z[spare[j]] for j in range(count)]
        centroids = normalize(torch.stack(means))
    return centroids


def fit_centroids(
    c: Tensor, z: Tensor, temperature: float, steps: int, lr: float = 0.01, lam: float = 25.0
) -> Tensor:
    """Global centroids whose soft assignments of the local ones agree with balanced assignments.

    Plain SGD with momentum 0.9 and weight decay 1e-4, as released; the centroids return to the sphere each step.

    Shape:
        c: (G, d). z: (n, d), all clients' local centroids. Output: (G, d), rows of length 1.
    """
    c = c.detach().clone().requires_grad_()
    optimizer = torch.optim.SGD([c], lr=lr, momentum=0.9, weight_decay=1e-4)
    for _ in range(steps):
        scores = z @ c.T
        balanced = sinkhorn_assignments(scores, lam)
        soft = (normalize(z) @ c.T / temperature).softmax(dim=1)
        optimizer.zero_grad()
        torch.autograd.backward(-cosine_similarity(balanced, soft).mean())
        optimizer.step()
        with torch.no_grad():
            c.copy_(normalize(c))
    return c.detach()


@dataclass(frozen=True)
class Orchestra(Objective):
    """Clustering by the server's centroids.

    Attributes:
        temperature: T.
        momentum: m, with which the target follows.
        target: What the target is at the start of a round: a copy of the downloaded network (``"reset"``), or
            the client's own of its last round (``"kept"``).
        global_clusters: G.
        local_clusters: L; all a client's rows where it has fewer.
        memory: m, the number of target embeddings that a client keeps.
        server_steps: Steps of SGD on C after each round.
    """

    name: ClassVar[str] = "orchestra"
    source: ClassVar[str] = "Lubana et al. 2022 (Orchestra), Algorithm 1"
    egress: ClassVar[tuple[str, ...]] = ("centroids of the embeddings of its images",)
    temperature: Positive = 0.1
    momentum: float = 0.996
    target: Literal["reset", "kept"] = "reset"
    global_clusters: Count = 128
    local_clusters: Count = 16
    memory: Count = 128
    server_steps: int = 500

    @property
    def keeps(self) -> tuple[str, ...]:
        """The memory, and the target where it does not start anew."""
        return ("a memory of embeddings", *(("its target network",) if self.target == "kept" else ()))

    def epochs(self, setting: Setting, client: int, cohort: Sequence[int], round: int) -> int | None:
        """Round 1 makes centroids only."""
        return 0 if round == 1 else None

    def init(self, setting: Setting) -> Tree:
        """Random directions for C."""
        shape = (self.global_clusters, setting.embedding_dim)
        return normalize(torch.randn(shape, generator=stream(setting.seed, "orchestra-centroids")))

    def send(self, state: Tree, client: int, cohort: Sequence[int], round: int) -> Tree:
        """C."""
        return state

    def forwards(self) -> Sequence[Forward]:
        """One view through the target, the other through the online network."""
        return TARGET, ONLINE

    def start(self, context: ClientContext) -> None:
        """Take up C, target and memory; a client without one fills it with embeddings of its images."""
        scope = context.of(self)
        retained = None if context.reset else scope.retained
        kept: Weights | None = retained["target"] if retained and self.target == "kept" else None
        scope.target = start_target(context, "orchestra_target", kept)
        scope.centroids = scope.message.to(context.device)
        if retained is None:
            (z,) = context.outputs(scope.target, "z")
            chosen = torch.randperm(len(z), generator=context.stream("orchestra-memory"))[: self.memory]
            scope.memory = normalize(z[chosen.to(z.device)])
        else:
            scope.memory = retained["memory"].to(context.device)

    def loss(self, context: ClientContext, batch: Batch, passes: Passes) -> Tensor:
        """Cross-entropy between the two networks' assignments."""
        scope = context.of(self)
        scope.newest = normalize(passes[TARGET].z.detach().float())
        return assignment_loss(scope.newest, passes[ONLINE].z, scope.centroids, self.temperature)

    def after_step(self, context: ClientContext) -> None:
        """Remember the newest embeddings; let the target follow."""
        scope = context.of(self)
        scope.memory = enqueue(scope.memory, scope.newest)
        follow(scope.target, context.networks, self.momentum)

    def finish(self, context: ClientContext) -> Tree:
        """Local centroids of the memory."""
        memory = context.of(self).memory.cpu()  # a GPU would be waited for at each of many small decisions
        count = min(self.local_clusters, len(memory))
        return balanced_centroids(memory, count, context.stream("orchestra-centroids"))

    def keep(self, context: ClientContext) -> Tree:
        """The memory, and the target where it is kept."""
        scope = context.of(self)
        target = {"target": encoding_weights(scope.target)} if self.target == "kept" else {}
        return {"memory": scope.memory, **target}

    def declares(self, setting: Setting) -> Spec:
        """Normalised centroids: L, or fewer."""
        return TensorSpec((UpTo(self.local_clusters), setting.embedding_dim), unit_rows=True)

    def fold(self, state: Tree, setting: Setting, round: int) -> CentroidFold:
        """Begin to collect local centroids."""
        return CentroidFold(self, state)


class CentroidFold:
    """All clients' local centroids, and the global ones that fit them."""

    def __init__(self, component: Orchestra, c: Tensor) -> None:
        self._options = component
        self._c = c
        self._local: list[Tensor] = []

    def add(self, client: int, piece: Tree) -> None:
        """Take a client's centroids."""
        self._local.append(piece.clone())

    def close(self) -> Tree:
        """The next C."""
        options = self._options
        return fit_centroids(self._c, torch.cat(self._local), options.temperature, options.server_steps)


METHOD = Method(
    objective=Orchestra(),
    terms=(RotationTerm(every=False, images_of="view3", on="z"),),
    title="Orchestra",
    paper="Lubana et al., Orchestra: Unsupervised Federated Learning via Globally Consistent Clustering, ICML 2022",
    family="Federated self-supervised methods",
)
