"""How a client trains: the recipe's ``[train]`` section, its optimiser and its learning rate by round."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import nn

from atoll.core.config import Options
from atoll.core.schema import Above, AtLeast, Below, Infinite, Positive, Share

Whole = Annotated[int, AtLeast(0)]
Bound = Annotated[float, Above(0), Infinite()]


@dataclass(frozen=True)
class TrainOptions(Options, section="train"):
    """The recipe's ``[train]`` section.

    Attributes:
        rounds: communication rounds R.
        epochs: local epochs E of a selected client in one round.
        batch_size: images in a local batch.
        drop_last: leave out a client's last, smaller batch (never its only one).
        participation: share of the clients that train in a round, drawn without replacement.
        optimizer: ``"sgd"``, ``"adam"`` or ``"adamw"``; rebuilt each round unless ``keep_optimizer``.
        lr: learning rate of the first round.
        momentum: of SGD; also Adam's first beta.
        weight_decay: L2 penalty (decoupled for AdamW).
        schedule: ``"constant"``, ``"cosine"`` to 0 over all rounds, or ``"step"``.
        milestones: shares of the rounds after which ``"step"`` multiplies the rate by ``decay``.
        decay: see ``milestones``.
        keep_optimizer: a client keeps its optimiser's state across rounds (centralised runs).
        views_batch: whether two views pass the networks as ``"separate"`` batches or one ``"joint"`` batch,
            which BatchNorm can tell apart.
        bn_buffers: BatchNorm's running statistics are averaged like weights (``"average"``), stay with each
            client (``"local"``), or are left at the server's first values (``"leave"``).
        amp: mixed precision on a GPU: networks and their gradients in bfloat16, weights and losses in float32.
            On a CPU it changes nothing: PyTorch's bfloat16 convolutions gave wrong gradients on small maps there.
        norm_factor: an update farther from the model that the client got than this times the running median
            of accepted distances is refused.
        first_norm: the bound on that distance in the first round.
        min_accepted: the least share of a cohort's updates with which a round may end.
        start: warm start: a run's folder or a file of weights that the first model takes over.
    """

    rounds: Whole = 100
    epochs: Whole = 5
    batch_size: Annotated[int, AtLeast(2)] = 128
    drop_last: bool = False
    participation: Share = 1.0
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    lr: Positive = 0.1
    momentum: Annotated[float, AtLeast(0), Below(1)] = 0.9
    weight_decay: Annotated[float, AtLeast(0)] = 1e-4
    schedule: Literal["constant", "cosine", "step"] = "constant"
    milestones: tuple[float, ...] = (0.6, 0.8)
    decay: Positive = 0.1
    keep_optimizer: bool = False
    views_batch: Literal["separate", "joint"] = "separate"
    bn_buffers: Literal["average", "local", "leave"] = "average"
    amp: bool = False
    norm_factor: Bound = 10.0
    first_norm: Bound = 1000.0
    min_accepted: Share = 0.5
    start: str | None = None

    def cohort_size(self, clients: int) -> int:
        """How many of so many clients train in a round: the nearest whole number, halves up, at least one."""
        return max(1, int(self.participation * clients + 0.5))


def learning_rate(train: TrainOptions, round: int) -> float:
    """The rate of a round (counted from 1)."""
    done = (round - 1) / max(train.rounds, 1)
    if train.schedule == "cosine":
        return 0.5 * train.lr * (1 + math.cos(math.pi * done))
    if train.schedule == "step":
        return train.lr * train.decay ** sum(done >= milestone for milestone in train.milestones)
    return train.lr


def make_optimizer(train: TrainOptions, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The recipe's optimiser; the rate is set by the round."""
    if train.optimizer == "sgd":
        return torch.optim.SGD(
            parameters, lr=train.lr, momentum=train.momentum, weight_decay=train.weight_decay
        )
    kind: type[torch.optim.Adam] = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[train.optimizer]
    return kind(parameters, lr=train.lr, betas=(train.momentum, 0.999), weight_decay=train.weight_decay)
