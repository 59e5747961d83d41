"""Local training: the recipe's ``[train]`` section, the optimiser, and the learning rate by round."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import nn

from atoll.core.config import Options
from atoll.core.optimizers import SGD, Adam, AdamW
from atoll.core.schema import Above, AtLeast, AtMost, Below, Infinite, Positive, Share, Whole

Bound = Annotated[float, Above(0), Infinite()]


@dataclass(frozen=True)
class TrainOptions(Options, section="train"):
    """The recipe's ``[train]`` section.

    Attributes:
        rounds: Number of communication rounds R.
        epochs: Local epochs E of a selected client in one round.
        batch_size: Images in a local batch.
        drop_last: Skip a client's last batch if it is smaller (never its only batch).
        participation: Share of the clients that train in a round, drawn without replacement.
        optimizer: ``"sgd"``, ``"adam"`` or ``"adamw"``; rebuilt each round unless ``keep_optimizer`` is set.
        lr: Learning rate of the first round.
        momentum: Momentum of SGD; also Adam's first beta.
        weight_decay: L2 penalty (decoupled for AdamW).
        schedule: Schedule of the learning rate over the rounds: ``"constant"``, ``"cosine"`` to 0 over all rounds,
            or ``"step"``.
        milestones: Shares of the rounds after which ``"step"`` multiplies the rate by ``decay``.
        decay: Factor of the rate at each of the ``milestones``.
        keep_optimizer: Each client retains its optimiser's state across rounds (for centralised runs).
        views_batch: The networks process two views as ``"separate"`` batches or as one ``"joint"`` batch; with
            BatchNorm, the results differ.
        bn_buffers: BatchNorm's running statistics are averaged like weights (``"average"``), retained by each
            client (``"local"``), or left at the server's initial values (``"leave"``).
        amp: Mixed precision on a GPU: networks and their gradients in bfloat16, weights and losses in float32.
            Without it, everything is computed in float32, never in TF32. It has no effect on a CPU, where PyTorch's
            bfloat16 convolutions gave wrong gradients on small feature maps.
        checkpoint_gradients: Keep only the inputs of the encoder's blocks for the backward pass, which computes the
            blocks again. This takes less memory and about a third more time; the gradients are the same.
        compile: Compile the encoder for full batches (``torch.compile``). This needs a C++ compiler and takes
            minutes when a run starts; on a CPU it gains little. The last bits of the result depend on it.
        cuda_graphs: On a GPU, record all kernels of a client's second step and replay them with one call in its
            later steps (CUDA graphs). This is faster if kernels are short, and takes more memory; the result is
            the same. Smaller batches are computed as usual, and so are all steps of FedDINO, FedSwAV, FedMAR,
            DecMAR and components that do not say that they can be replayed, of networks that draw random numbers,
            of clients with fewer than five steps, and with ``accumulate`` or ``checkpoint_gradients``. With
            ``compile``, the methods that cannot be recorded replay the encoder's passes alone.
        accumulate: Number of parts into which a batch is split. The optimiser takes one step with the sum of the
            parts' gradients, weighted by their sizes. If the loss is a mean over samples, this is the step of the
            whole batch. A contrastive loss takes its negatives from the same part only, and BatchNorm and other
            batch statistics are those of a part. A loss that grows with the batch (FedCA's alignment, FedU²'s FUR,
            SIGReg, and FedDecorr of correlated features) becomes weaker by this factor, and SSD's DSR, which
            shrinks with the batch's root, stronger by its root.
        norm_factor: An update is refused if one of these values exceeds this factor times the running median of the
            accepted values: its distance from the model that the client received, the norm of a component's slice,
            a loss, or the distance of BatchNorm's running statistics. The median counts as at least 10 for losses,
            as at least 1% of the received weights' norm for distances, and as at least the norm of the received
            running statistics for these. If losses determine the clients' weights, a client gets at most this
            factor times the largest weight of earlier rounds.
        first_norm: Maximum distance, and maximum norm of a slice, in the first round; in all rounds, if the
            aggregation clips updates.
        max_share: Maximum share of one client in a weighted mean of models; 1 sets no bound. The weights of heavier
            clients are reduced; if fewer than 1 / ``max_share`` updates are accepted, all have equal weights. The
            ⌊1 / ``max_share``⌋ heaviest models stay in memory until the round ends.
        min_accepted: Minimum share of a cohort's updates that must be accepted for the round to complete. Otherwise
            the run stops; if clients take turns, it skips the turn instead.
        keep_local_models: Rounds of which the run's folder keeps the local models, as the clients sent them, and
            the resulting models; -1 is the last round.
        keep_models_every: Number of rounds between two resulting models that are kept, beginning with the initial
            model; 0 keeps none.
        start: Warm start: a run's folder, whose encoder initialises the first model. A file is deprecated here; use
            ``model.weights``.
    """

    rounds: Whole = 100
    epochs: Whole = 5
    batch_size: Annotated[int, AtLeast(2), AtMost(2**31 - 1)] = 128
    drop_last: bool = False
    participation: Share = 1.0
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    lr: Annotated[float, Above(0), AtMost(1_000_000)] = 0.1
    momentum: Annotated[float, AtLeast(0), Below(1)] = 0.9
    weight_decay: Annotated[float, AtLeast(0)] = 1e-4
    schedule: Literal["constant", "cosine", "step"] = "constant"
    milestones: tuple[Annotated[float, Above(0), Below(1, "a share of the rounds, not a round")], ...] = (
        0.6,
        0.8,
    )
    decay: Positive = 0.1
    keep_optimizer: bool = False
    views_batch: Literal["separate", "joint"] = "separate"
    bn_buffers: Literal["average", "local", "leave"] = "average"
    amp: bool = True
    checkpoint_gradients: bool = False
    compile: bool = False
    cuda_graphs: bool = False
    accumulate: Annotated[int, Above(0), AtMost(2**31 - 1)] = 1
    norm_factor: Bound = 10.0
    first_norm: Bound = 1000.0
    max_share: Share = 1.0
    min_accepted: Share = 0.5
    keep_local_models: tuple[Annotated[int, AtLeast(-1)], ...] = ()
    keep_models_every: Whole = 0
    start: str | None = None

    def keeps_local_models(self, round: int) -> bool:
        """Return whether the local models of a round are kept."""
        return round in self.keep_local_models or (round == self.rounds and -1 in self.keep_local_models)

    def keeps_models(self, round: int) -> bool:
        """Return whether the models that result from a round are kept."""
        every = self.keep_models_every
        return self.keeps_local_models(round) or bool(every and round % every == 0)

    def cohort_size(self, clients: int) -> int:
        """Return the number of clients that train in a round: rounded to nearest, halves up, at least one."""
        return max(1, int(self.participation * clients + 0.5))


def learning_rate(train: TrainOptions, round: int) -> float:
    """Return the learning rate of a round (counted from 1)."""
    done = (round - 1) / max(train.rounds, 1)
    if train.schedule == "cosine":
        return 0.5 * train.lr * (1 + math.cos(math.pi * done))
    if train.schedule == "step":
        return train.lr * train.decay ** sum(done >= milestone for milestone in train.milestones)
    return train.lr


def make_optimizer(train: TrainOptions, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Build the recipe's optimiser; each round sets its learning rate. On a GPU, one kernel updates all weights."""
    weights = list(parameters)
    fused = all(weight.is_cuda for weight in weights) or None  # None: PyTorch's default
    if train.optimizer == "sgd":
        sgd = SGD(weights, lr=train.lr, momentum=train.momentum, weight_decay=train.weight_decay, fused=fused)
        if fused and train.momentum:
            sgd.register_step_pre_hook(_start_momentum)
        return sgd
    kind: type[Adam] = {"adam": Adam, "adamw": AdamW}[train.optimizer]
    betas = (train.momentum, 0.999)
    return kind(weights, lr=train.lr, betas=betas, weight_decay=train.weight_decay, fused=fused)


def _start_momentum(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Start momentum at zero: PyTorch's fused kernel needs it for all weights or none, and some start later."""
    for group in optimizer.param_groups:
        for weight in group["params"]:
            if weight.grad is not None and "momentum_buffer" not in (state := optimizer.state[weight]):
                state["momentum_buffer"] = torch.zeros_like(weight)
