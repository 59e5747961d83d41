"""MoCo: contrast with a queue of keys from a momentum encoder (He et al. 2020; Chen et al. 2020)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from atoll.components.base import Batch, ClientContext, Forward, Objective, Passes, require_positive
from atoll.core.tree import Tree
from atoll.functional import queue_contrast
from atoll.objectives.align_uniform import VIEWS
from atoll.objectives.momentum import enqueue, follow, start_target

KEYS = (Forward("view1", "moco_key"), Forward("view2", "moco_key"))


@dataclass(frozen=True)
class MoCo(Objective):
    """L = CE([q̂·k̂, q̂Qᵀ]/τ, 0), with queries of one view and keys of the other.

    The key encoder begins each round as a copy of the query encoder and follows it after each step; the queue
    stays with the client. v1 has τ = 0.07 and a linear projector, v2 τ = 0.2 and a hidden layer
    (``model.projector_hidden``). The defaults are those of the released federated code.

    Attributes:
        temperature: τ.
        momentum: m of the key encoder.
        queue: M, the keys that a client holds; random directions at first.
        symmetric: the sum of both directions, each view's keys enqueued; else queries of the first view only.
    """

    name: ClassVar[str] = "moco"
    source: ClassVar[str] = "He et al. 2020, Eqs. 1-2; Chen et al. 2020 (v2)"
    keeps: ClassVar[tuple[str, ...]] = ("a queue of normalised embeddings",)
    temperature: float = 0.2
    momentum: float = 0.99
    queue: int = 4096
    symmetric: bool = True

    def __post_init__(self) -> None:
        require_positive(self, "temperature", "queue")

    def forwards(self) -> Sequence[Forward]:
        """Queries and keys."""
        return (*VIEWS, *KEYS) if self.symmetric else (VIEWS[0], KEYS[1])

    def start(self, context: ClientContext) -> None:
        """Copy the key encoder; take up the queue, or fill it with random directions."""
        scope = context.of(self)
        scope.key = start_target(context, "moco_key", None)
        if context.fresh or scope.retained is None:
            shape = (self.queue, context.setting.embedding_dim)
            scope.queue = normalize(torch.randn(shape, generator=context.stream("moco-queue")))
        else:
            scope.queue = scope.retained
        scope.queue = scope.queue.to(context.device)

    def loss(self, context: ClientContext, batch: Batch, passes: Passes) -> Tensor:
        """One direction, or the sum of both."""
        scope = context.of(self)
        pairs = [(VIEWS[0], KEYS[1]), (VIEWS[1], KEYS[0])] if self.symmetric else [(VIEWS[0], KEYS[1])]
        scope.keys = [normalize(passes[key].z.float()) for _, key in pairs]
        losses = [
            queue_contrast(passes[query].z, k, scope.queue, self.temperature)
            for (query, _), k in zip(pairs, scope.keys, strict=True)
        ]
        return torch.stack(losses).sum()

    def after_step(self, context: ClientContext) -> None:
        """Let the key encoder follow, and queue this step's keys."""
        scope = context.of(self)
        follow(scope.key, context.networks, self.momentum)
        scope.queue = enqueue(scope.queue, *scope.keys)

    def keep(self, context: ClientContext) -> Tree:
        """The queue."""
        return context.of(self).queue
