"""FedU²: flexible uniform regulariser (FUR) and efficient unified aggregator (EUA) (Liao et al., CVPR 2024).

    L_k = L_SSL + 0.01 · [FUR(z₁) + FUR(z₂)]

The paper defines FUR as unbalanced transport from a batch to a spherical Gaussian; those equations are not
available to us, and the released code does not use its transport. This module implements what the code runs:
sliced transport on the sphere (see `atoll.functional.sphere_sliced_uniformity`). The code adds rotation
prediction (the term ``rotation_term``), and small clients train more epochs, so that all clients take about the
same number of steps. The server aggregates by `EUA`, with the rate of the code's main script.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import Tensor

from atoll.aggregation.disk_buffer import DiskBuffer
from atoll.aggregation.fedavg import Weighing, counted
from atoll.aggregation.running_mean import CappedMean
from atoll.components.base import (
    VIEWS,
    Aggregation,
    Batch,
    ClientContext,
    Forward,
    Models,
    Passes,
    Setting,
    Term,
    Update,
    UpdateGeometry,
)
from atoll.core.errors import warn
from atoll.core.schema import Count, Positive
from atoll.core.tree import Weights
from atoll.data.client_data import num_batches
from atoll.functional.aggregation import shortest_in_hull
from atoll.functional.sphere import sliced_uniformity
from atoll.methods.method import Method
from atoll.objectives.simclr import SimCLR

MOST_EPOCHS = 10  # maximum epochs of a small client in a round


@dataclass(frozen=True)
class FUR(Term):
    """The flexible uniform regulariser as released: FUR(z₁) + FUR(z₂) on normalised embeddings.

    Attributes:
        weight: Weight of FUR(z₁) + FUR(z₂).
        projections: Number of directions at each tangent point.
        equal_steps: A client trains min(⌊(⌊n_max/N⌋ + 1)·E / batches_k⌋, 10) epochs instead of E, if the
            server knows the clients' sizes.
    """

    replays: ClassVar[bool] = True
    name: ClassVar[str] = "fur"
    source: ClassVar[str] = "Liao et al. 2024 (FedU²), released code"
    least_loss: ClassVar[float] = 0.0
    weight: float = 0.01
    projections: Count = 6
    equal_steps: bool = False

    def epochs(self, setting: Setting, client: int, cohort: Sequence[int], round: int) -> int | None:
        """Compute the epochs of a client: small clients train more epochs."""
        if not self.equal_steps or not setting.sizes:
            return None
        train = setting.train
        most_steps = (max(setting.sizes) // train.batch_size + 1) * train.epochs
        batches = num_batches(setting.sizes[client], train.batch_size, train.drop_last)
        return min(most_steps // batches, MOST_EPOCHS)

    def forwards(self) -> Sequence[Forward]:
        """Pass both views through the local networks."""
        return VIEWS

    def start(self, context: ClientContext) -> None:
        """Open the random stream of the samples on the sphere."""
        context.of(self).draws = context.stream("fur")

    def loss(self, context: ClientContext, batch: Batch, passes: Passes) -> Tensor:
        """Sum of FUR over both views."""
        draws = context.of(self).draws

        def normal(*shape: int) -> Tensor:
            return context.from_host(lambda: torch.randn(shape, generator=draws))

        one, two = (sliced_uniformity(passes[view].z, normal, self.projections) for view in VIEWS)
        return one + two


@dataclass(frozen=True)
class EUA(Aggregation):
    """A step along the shortest vector in the convex hull of the clients' normalised updates.

        u_k = 2 (w_g − w_k) / ‖w_g − w_k‖
        α   = argmin over the simplex of ‖Σ_k α_k u_k‖²
        w_g ← w_g − η_s Σ_k α_k u_k

    u_k is computed from all trained weights as one vector. Buffers, which no gradient trains, are averaged with
    p_k. If all updates have the same direction, the step has length 2 η_s, regardless of their lengths: η_s is a
    server learning rate.

    The directions are needed twice, for their inner products and for their sum, so updates are buffered on disk;
    α is computed from the K × K products. A client that did not move has no direction and is left out, with a
    warning: with u_k = 0, the shortest vector of any round would be 0. For two clients, the released solver returns
    the data weights instead of α; this implementation does not.

    Attributes:
        server_lr: η_s; the released code's default is 0.1, and its main script sets 8.
        weights: p_k of the buffers: ``"samples"``, ``"batches"`` (the released code) or ``"uniform"``.
    """

    name: ClassVar[str] = "eua"
    source: ClassVar[str] = "Liao et al. 2024 (FedU²), released code"
    keeps_updates: ClassVar[bool] = False
    whole_cohort: ClassVar[bool] = True
    server_lr: Positive = 0.1
    weights: Literal["samples", "batches", "uniform"] = "samples"

    @property
    def statistics(self) -> tuple[str, ...]:
        """Name the number from which p_k is computed."""
        return counted(self.weights)

    def open(self, models: Models, setting: Setting, round: int, scratch: Path | None) -> EUAFold:
        """Start to collect a round's updates."""
        return EUAFold(models["global"], self, setting, scratch)


class EUAFold:
    """A round's updates on disk, and the running mean of their buffers."""

    def __init__(self, current: Weights, options: EUA, setting: Setting, scratch: Path | None) -> None:
        self._current = current
        self._server_lr = options.server_lr
        self._weigh = Weighing(options.weights)
        self._buffers = setting.buffers
        self._trained = DiskBuffer(scratch)
        self._rest = CappedMean(setting.train.max_share)

    def add(self, client: int, update: Update, geometry: UpdateGeometry) -> None:
        """Write one client's trained weights to disk, and average its buffers."""
        trained: Weights = {}
        rest: Weights = {}
        for name, tensor in update["weights"].items():
            kind = rest if name in self._buffers or not tensor.is_floating_point() else trained
            kind[name] = tensor
        self._trained.add(trained)
        self._rest.add(rest, self._weigh(update)[0])

    def close(self) -> Models:
        """Take the step."""
        disk_buffer, origin = self._trained, self._trained.flat(self._current)
        gram = disk_buffer.gram(origin)  # inner products of w_k − w_g; u_k = −2 (w_k − w_g) / ‖w_k − w_g‖
        lengths = gram.diagonal().sqrt()
        moved = lengths > 0
        step = torch.zeros_like(lengths)
        if bool(moved.any()):  # in a round without training, no client moves
            if not bool(moved.all()):
                warn("'eua' leaves out clients whose trained weights did not change")
            unit = lengths[moved]
            alpha = shortest_in_hull(4 * gram[moved][:, moved] / unit[:, None] / unit[None, :])
            step[moved] = self._server_lr * 2 * alpha / unit

        def move(rows: Tensor, block: slice) -> Tensor:
            before = origin[block].double()
            return before + step @ (rows.double() - before)

        return {"global": {**self._current, **self._rest.close().mean, **disk_buffer.map(move)}}


METHOD = Method(
    objective=SimCLR(temperature=0.07, variant="zero_self"),
    terms=(FUR(equal_steps=True),),
    aggregation=EUA(server_lr=8.0, weights="batches"),
    title="FedU²",
    paper="Liao et al., Rethinking the Representation in Federated Unsupervised Learning, CVPR 2024",
    family="Federated self-supervised methods",
)
