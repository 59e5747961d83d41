"""EUA: the even aggregation of FedU² (Liao et al., CVPR 2024), as released."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from atoll.aggregation.fedavg import RunningMean, Weighing, check_weights
from atoll.aggregation.spill import Spill
from atoll.errors import UserError
from atoll.functional.aggregation import shortest_in_hull
from atoll.parts import Aggregation, Setting
from atoll.tree import Tree, Weights


@dataclass(frozen=True)
class EUA(Aggregation):
    """A step along the direction that all clients' updates have most evenly in common.

        u_k = 2 (w_g − w_k) / ‖w_g − w_k‖
        α   = argmin over the simplex of ‖Σ_k α_k u_k‖²
        w_g ← w_g − η_s Σ_k α_k u_k

    u_k is of all trained weights as one vector. What no gradient trains is averaged with p_k. Clients that agree
    make a step of length 2 η_s and do not meet at their mean: η_s is a learning rate of the server.

    The directions are needed twice, first for their products, then for their sum, so updates spill to disk; α comes
    from the K × K products. A client that did not move leaves the model where it is, since 0 is the shortest
    vector. The released solver returns the data weights for two clients instead of α; that is not copied.

    Attributes:
        server_lr: η_s; the released code's default is 0.1, its main script sets 8.
        weights: p_k of buffers: ``"samples"``, ``"batches"`` (the released code) or ``"uniform"``.
    """

    name: ClassVar[str] = "eua"
    source: ClassVar[str] = "Liao et al. 2024 (FedU²), released code"
    whole_cohort: ClassVar[bool] = True
    server_lr: float = 0.1
    weights: str = "samples"

    def __post_init__(self) -> None:
        check_weights(self, self.weights, ("batches", "samples", "uniform"))
        if not self.server_lr > 0:
            raise UserError(f"options.{self.name}.server_lr is {self.server_lr}; it must be above 0")

    @property
    def statistics(self) -> tuple[str, ...]:
        """What p_k is made from."""
        return () if self.weights == "uniform" else (self.weights,)

    def open(self, models: Tree, setting: Setting, round: int, scratch: Path | None) -> EUAFold:
        """Begin to collect a round's updates."""
        return EUAFold(models["global"], self, setting.buffers, scratch)


class EUAFold:
    """A round's updates on disk, and the running mean of their buffers."""

    def __init__(self, current: Weights, options: EUA, buffers: frozenset[str], scratch: Path | None) -> None:
        self._current = current
        self._server_lr = options.server_lr
        self._weigh = Weighing(options.weights)
        self._buffers = buffers
        self._trained = Spill(scratch)
        self._rest = RunningMean()

    def add(self, client: int, update: Tree) -> None:
        """Write one client's trained weights to disk; fold in the rest."""
        trained: Weights = {}
        rest: Weights = {}
        for name, tensor in update["weights"].items():
            kind = rest if name in self._buffers or not tensor.is_floating_point() else trained
            kind[name] = tensor
        self._trained.add(trained)
        self._rest.add(rest, self._weigh(update)[0])

    def close(self) -> Tree:
        """The step."""
        spill, origin = self._trained, self._trained.flat(self._current)
        gram = spill.gram(origin)  # of w_k − w_g, so that u_k = −2 (w_k − w_g) / ‖w_k − w_g‖
        lengths = gram.diagonal().sqrt()
        unit = torch.where(lengths > 0, lengths, 1.0)
        alpha = shortest_in_hull(4 * gram / unit[:, None] / unit[None, :])
        step = self._server_lr * 2 * alpha / unit

        def move(rows: Tensor, part: slice) -> Tensor:
            before = origin[part].double()
            return before + step @ (rows.double() - before)

        return {"global": {**self._current, **self._rest.mean, **spill.map(move)}}
