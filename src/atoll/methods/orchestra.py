"""Orchestra: globally consistent clustering (Lubana et al., ICML 2022).

Two levels of centroids make the clients' clusterings consistent. A client trains on

    L_k = −mean_i Σ_j P'_ij log P_ij + CE(rotation of a third view, predicted from its embedding)
    P' = softmax(ẑ'₁Cᵀ / T),   P = softmax(ẑ₂Cᵀ / T),

where z' is the embedding of a momentum target network, and C are the server's G centroids, constant during a round.
The client retains a memory of its newest target embeddings. After training, it clusters the memory, with balanced
assignments, into L local centroids, and sends them. The server fits C to all local centroids Z by

    min_C −cos(Sinkhorn(ZCᵀ), softmax(ẐCᵀ / T)),   ‖c_j‖ = 1.

Round 1 has no training: it only computes the first local centroids. The rotation term prevents collapse of the
embeddings. The paper does not specify the target's state between rounds; here it is reset to the downloaded network
at the start of each round, unless ``target`` is ``"kept"``.
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
from atoll.core.optimizers import SGD
from atoll.core.rng import stream
from atoll.core.schema import Count, Momentum, Positive, Whole
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
    """Compute a client's local centroids: k-means on the sphere with balanced cluster sizes.

    Assignments are the largest entries of balanced soft assignments. The initial centroids are random rows, and a
    random row replaces a centroid without rows.

    Args:
        z: Embeddings.
        count: Number of centroids.
        generator: Source of the random draws, on the CPU.
        lam: λ of the Sinkhorn assignments.
        iterations: Number of k-means iterations.

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
    """Fit global centroids, so that soft assignments of the local centroids agree with balanced assignments.

    SGD with momentum 0.9 and weight decay 1e-4, as released; each step projects the centroids back to the sphere.

    Args:
        c: Global centroids at the start.
        z: Local centroids of all clients.
        temperature: T.
        steps: Number of SGD steps.
        lr: Learning rate.
        lam: λ of the Sinkhorn assignments.

    Shape:
        c: (G, d). z: (n, d). Output: (G, d), rows of length 1.
    """
    c = c.detach().clone().requires_grad_()
    optimizer = SGD([c], lr=lr, momentum=0.9, weight_decay=1e-4)
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
        momentum: Momentum μ of the target network.
        target: The target network at the start of a round: a copy of the downloaded network (``"reset"``), or the
            one that the client retained from its last round (``"kept"``).
        global_clusters: G, the number of global centroids.
        local_clusters: L, the maximum number of local centroids; a client has at most one per embedding.
        memory: m, the number of target embeddings that a client retains.
        server_steps: Steps of SGD on C after each round.
    """

    replays: ClassVar[bool] = True
    name: ClassVar[str] = "orchestra"
    source: ClassVar[str] = "Lubana et al. 2022 (Orchestra), Algorithm 1"
    least_loss: ClassVar[float] = 0.0
    egress: ClassVar[tuple[str, ...]] = ("centroids of the embeddings of its images",)
    temperature: Positive = 0.1
    momentum: Momentum = 0.996
    target: Literal["reset", "kept"] = "reset"
    global_clusters: Count = 128
    local_clusters: Count = 16
    memory: Count = 128
    server_steps: Whole = 500

    @property
    def keeps(self) -> tuple[str, ...]:
        """Name the retained client state: the memory, and the target network unless each round resets it."""
        return ("a memory of embeddings", *(("its target network",) if self.target == "kept" else ()))

    def epochs(self, setting: Setting, client: int, cohort: Sequence[int], round: int) -> int | None:
        """Skip the training in round 1, which only computes centroids."""
        return 0 if round == 1 else None

    def init(self, setting: Setting) -> Tree:
        """Initialise C with random directions."""
        shape = (self.global_clusters, setting.embedding_dim)
        return normalize(torch.randn(shape, generator=stream(setting.seed, "orchestra-centroids")))

    def send(self, state: Tree, client: int, cohort: Sequence[int], round: int) -> Tree:
        """Send C."""
        return state

    def forwards(self) -> Sequence[Forward]:
        """Pass one view through the target network, the other through the online network."""
        return TARGET, ONLINE

    def start(self, context: ClientContext) -> None:
        """Load C, the target and the memory; without a retained memory, fill it with embeddings of the images."""
        scope = context.of(self)
        retained = context.retained(self)
        kept: Weights | None = retained["target"] if retained and self.target == "kept" else None
        scope.target = start_target(context, "orchestra_target", kept)
        scope.centroids = scope.message.to(context.device)
        scope.newest = []
        if retained is None:
            (z,) = context.outputs(scope.target, "z")
            chosen = torch.randperm(len(z), generator=context.stream("orchestra-memory"))[: self.memory]
            scope.memory = normalize(z[chosen.to(z.device)])
        else:
            scope.memory = retained["memory"].to(context.device, copy=True)

    def loss(self, context: ClientContext, batch: Batch, passes: Passes) -> Tensor:
        """Cross-entropy between the assignments of the two networks."""
        scope = context.of(self)
        target = normalize(passes[TARGET].z.detach().float())
        scope.newest.append(target)
        return assignment_loss(target, passes[ONLINE].z, scope.centroids, self.temperature)

    def after_step(self, context: ClientContext) -> None:
        """Append the newest embeddings to the memory, and move the target towards the online network."""
        scope = context.of(self)
        scope.memory.copy_(enqueue(scope.memory, *scope.newest))
        scope.newest = []
        follow(scope.target, context.networks, self.momentum)

    def finish(self, context: ClientContext) -> Tree:
        """Compute the local centroids of the memory."""
        memory = context.of(self).memory.cpu()  # on a GPU, each of many small decisions would synchronise
        count = min(self.local_clusters, len(memory))
        return balanced_centroids(memory, count, context.stream("orchestra-centroids"))

    def keep(self, context: ClientContext) -> Tree:
        """Retain the memory, and the target network unless each round resets it."""
        scope = context.of(self)
        target = {"target": encoding_weights(context, scope.target)} if self.target == "kept" else {}
        return {"memory": scope.memory, **target}

    def declares(self, setting: Setting) -> Spec:
        """Declare at most L normalised centroids."""
        return TensorSpec((UpTo(self.local_clusters), setting.embedding_dim), unit_rows=True)

    def fold(self, state: Tree, setting: Setting, round: int) -> CentroidFold:
        """Start to collect local centroids."""
        return CentroidFold(self, state)


class CentroidFold:
    """Collection of all clients' local centroids, to which the global centroids are fitted."""

    def __init__(self, component: Orchestra, c: Tensor) -> None:
        self._options = component
        self._c = c
        self._local: list[Tensor] = []

    def add(self, client: int, piece: Tree) -> None:
        """Append a client's centroids."""
        self._local.append(piece.clone())

    def close(self) -> Tree:
        """Fit the next C."""
        options = self._options
        return fit_centroids(self._c, torch.cat(self._local), options.temperature, options.server_steps)


METHOD = Method(
    objective=Orchestra(),
    terms=(RotationTerm(every=False, images_of="view3", on="z"),),
    title="Orchestra",
    paper="Lubana et al., Orchestra: Unsupervised Federated Learning via Globally Consistent Clustering, ICML 2022",
    family="Federated self-supervised methods",
)
