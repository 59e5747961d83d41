"""MoCo: contrast with a queue of keys from a momentum encoder (He et al. 2020; Chen et al. 2020)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import normalize

from atoll.functional import queue_contrast
from atoll.objectives.align_uniform import VIEWS
from atoll.objectives.momentum import enqueue, follow, start_target
from atoll.parts import Batch, Forward, Local, Objective, Passes, require_positive
from atoll.tree import Tree

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

    def start(self, local: Local) -> None:
        """Copy the key encoder; take up the queue, or fill it with random directions."""
        mine = local.of(self)
        mine.key = start_target(local, "moco_key", None)
        if local.fresh or mine.own is None:
            shape = (self.queue, local.setting.embedding_dim)
            mine.queue = normalize(torch.randn(shape, generator=local.stream("moco-queue")))
        else:
            mine.queue = mine.own
        mine.queue = mine.queue.to(local.device)

    def loss(self, local: Local, batch: Batch, passes: Passes) -> Tensor:
        """One direction, or the sum of both."""
        mine = local.of(self)
        pairs = [(VIEWS[0], KEYS[1]), (VIEWS[1], KEYS[0])] if self.symmetric else [(VIEWS[0], KEYS[1])]
        mine.keys = [normalize(passes[key].z.float()) for _, key in pairs]
        losses = [
            queue_contrast(passes[query].z, k, mine.queue, self.temperature)
            for (query, _), k in zip(pairs, mine.keys, strict=True)
        ]
        return torch.stack(losses).sum()

    def after_step(self, local: Local) -> None:
        """Let the key encoder follow, and queue this step's keys."""
        mine = local.of(self)
        follow(mine.key, local.networks, self.momentum)
        mine.queue = enqueue(mine.queue, *mine.keys)

    def keep(self, local: Local) -> Tree:
        """The queue."""
        return local.of(self).queue
