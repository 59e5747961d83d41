"""MoCo: contrastive loss with a queue of keys from a momentum encoder (He et al. 2020; Chen et al. 2020)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from atoll.components.base import VIEWS, Batch, ClientContext, Forward, Objective, Passes
from atoll.core.schema import Count, Momentum, Positive
from atoll.core.tree import Tree
from atoll.functional import queue_contrast
from atoll.objectives.momentum import enqueue, follow, start_target

KEYS = (Forward("view1", "moco_key"), Forward("view2", "moco_key"))


@dataclass(frozen=True)
class MoCo(Objective):
    """L = CE([q̂·k̂, q̂Qᵀ]/τ, 0), with queries of one view and keys of the other.

    At the start of each round the key encoder is a copy of the query encoder, and after each step it follows the
    query encoder with momentum. The queue is client state and never leaves the client. v1 has τ = 0.07 and a linear
    projector, v2 has τ = 0.2 and a hidden layer (``model.projector_hidden``). The defaults are those of the
    released federated code.

    Attributes:
        temperature: τ.
        momentum: m of the key encoder.
        queue: M, the number of keys that a client holds; initially they are random directions.
        symmetric: Sum both directions and enqueue the keys of both views; if False, only the first view has
            queries.
    """

    replays: ClassVar[bool] = True
    name: ClassVar[str] = "moco"
    source: ClassVar[str] = "He et al. 2020, Eqs. 1-2; Chen et al. 2020 (v2)"
    least_loss: ClassVar[float] = 0.0
    keeps: ClassVar[tuple[str, ...]] = ("a queue of normalised embeddings",)
    temperature: Positive = 0.2
    momentum: Momentum = 0.99
    queue: Count = 4096
    symmetric: bool = True

    def forwards(self) -> Sequence[Forward]:
        """Pass the queries through the local networks and the keys through the key encoder."""
        return (*VIEWS, *KEYS) if self.symmetric else (VIEWS[0], KEYS[1])

    def start(self, context: ClientContext) -> None:
        """Copy the key encoder, and restore the queue or fill it with random directions."""
        scope = context.of(self)
        scope.key = start_target(context, "moco_key", None)
        kept = context.retained(self)
        if kept is None:
            shape = (self.queue, context.setting.embedding_dim)
            scope.queue = normalize(torch.randn(shape, generator=context.stream("moco-queue")))
        else:
            scope.queue = kept
        scope.queue = scope.queue.to(context.device, copy=True)
        scope.keys = []

    def loss(self, context: ClientContext, batch: Batch, passes: Passes) -> Tensor:
        """Loss of one direction, or the sum of both."""
        scope = context.of(self)
        pairs = [(VIEWS[0], KEYS[1]), (VIEWS[1], KEYS[0])] if self.symmetric else [(VIEWS[0], KEYS[1])]
        keys = [normalize(passes[key].z.float()) for _, key in pairs]
        scope.keys += keys
        losses = [
            queue_contrast(passes[query].z, k, scope.queue, self.temperature)
            for (query, _), k in zip(pairs, keys, strict=True)
        ]
        return torch.stack(losses).sum()

    def after_step(self, context: ClientContext) -> None:
        """Move the key encoder towards the query encoder, and enqueue this step's keys."""
        scope = context.of(self)
        follow(scope.key, context.networks, self.momentum)
        scope.queue.copy_(enqueue(scope.queue, *scope.keys))
        scope.keys = []

    def keep(self, context: ClientContext) -> Tree:
        """Return the queue as client state."""
        return context.of(self).queue
