"""L-DAWA: layer-wise divergence-aware weight aggregation (Rehman et al., ICCV 2023), and its variants.

    δ_k^(l) = ⟨w_g^(l), w_k^(l)⟩ / (‖w_g^(l)‖ ‖w_k^(l)‖)                                         (Eq. 2)
    w_g^(l) ← Σ_k p_k δ_k^(l) w_k^(l)                                                        (Eqs. 4-6)

Clients train as under FedAvg, with SimCLR (or Barlow Twins: ``method.objective=barlow_twins``). w_g is the model
at the start of the round. Each tensor is a separate layer l: weights, biases, BatchNorm's γ, β and running
statistics. p_k = 1/K over the clients of the round; the variants weight clients by samples or by loss, and
_FedU adds FedU's merge at the client. M-DAWA has one δ_k for the whole model (Eq. 3).

Because δ ≤ 1 and there is no renormalisation, the model shrinks as clients diverge. For a tensor of zeros, no angle
is defined, and δ = 1; rounding never makes a cosine larger than 1. The update checks read each update once, next to
w_g, and pass on the products of Eq. 2 as its `UpdateGeometry`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from atoll.aggregation.fedavg import MeanFold, Weighing, counted
from atoll.aggregation.loss_weighted import LossWeighted
from atoll.aggregation.running_mean import CappedMean
from atoll.components.base import Aggregation, Fold, Models, Setting, Update, UpdateGeometry
from atoll.core.schema import AtLeast
from atoll.core.tree import Weights
from atoll.methods.fedu import FedU
from atoll.methods.method import Method
from atoll.objectives.simclr import SimCLR


@dataclass(frozen=True)
class DAWA(Aggregation):
    """Base class of L-DAWA and M-DAWA: the mean of client models, scaled by their cosines (Eqs. 4-6).

    Attributes:
        weights: p_k: ``"uniform"`` (1/K), ``"samples"`` (the paper's "FedAvg" variant), ``"batches"``, or
            ``"loss"`` (the paper's "Loss" variant, softmax(−L_k)).
        warmup_rounds: Number of initial rounds of plain FedAvg, weighted by samples: 0 in the paper, 3 in its code.
        include_buffers: Scale tensors that no gradient trains (BatchNorm's running statistics) like layers, as the
            code does; otherwise they are averaged with p_k.
        renormalise: Divide by Σ_k p_k |δ_k^(l)|, so that the model does not shrink.
    """

    keeps_updates: ClassVar[bool] = False
    weights: Literal["samples", "batches", "loss", "uniform"] = "uniform"
    warmup_rounds: Annotated[int, AtLeast(0)] = 0
    include_buffers: bool = True
    renormalise: bool = False

    @property
    def statistics(self) -> tuple[str, ...]:
        """Name the numbers from which p_k is computed."""
        warmup = ("samples",) if self.warmup_rounds else ()
        return tuple(dict.fromkeys((*counted(self.weights), *warmup)))

    def open(self, models: Models, setting: Setting, round: int, scratch: Path | None) -> Fold:
        """Start a round's sum; in the warm-up, a mean weighted by samples."""
        if round <= self.warmup_rounds:
            return MeanFold(models["global"], "samples", setting.train.max_share)
        unscaled = frozenset() if self.include_buffers else setting.buffers
        return DAWAFold(self, models["global"], unscaled, setting.train.max_share)

    def delta(self, geometry: UpdateGeometry, layers: list[str]) -> dict[str, float]:
        """Compute δ_k for each of these layers."""
        raise NotImplementedError


@dataclass(frozen=True)
class LDAWA(DAWA):
    """L-DAWA: scale each layer by its cosine to the global model's layer."""

    name: ClassVar[str] = "l_dawa"
    source: ClassVar[str] = "L-DAWA Eqs. 2, 4-6, Algorithm 1"

    def delta(self, geometry: UpdateGeometry, layers: list[str]) -> dict[str, float]:
        """Compute δ_k^(l) = ⟨w_g^(l), w_k^(l)⟩ / (‖w_g^(l)‖ ‖w_k^(l)‖), layer by layer (Eq. 2)."""
        return {layer: geometry.cosine([layer]) for layer in layers}


@dataclass(frozen=True)
class MDAWA(DAWA):
    """M-DAWA: scale each model by its cosine to the global model, with all layers as one vector."""

    name: ClassVar[str] = "m_dawa"
    source: ClassVar[str] = "L-DAWA Eqs. 2-3"

    def delta(self, geometry: UpdateGeometry, layers: list[str]) -> dict[str, float]:
        """Compute δ_k = ⟨w_g, w_k⟩ / (‖w_g‖ ‖w_k‖), the same for all layers (Eq. 3)."""
        return dict.fromkeys(layers, geometry.cosine(layers))


class DAWAFold:
    """The sum Σ_k p_k δ_k^(l) w_k^(l) of a round, one client at a time (Eqs. 4-6).

    A running mean with the weights p_k δ_k^(l) holds it, which cannot overflow: the mean times Σ_k p_k |δ_k^(l)| is
    the sum.

    Args:
        dawa: The aggregation.
        current: w_g, the model at the start of the round.
        unscaled: Tensors with δ = 1.
        max_share: Largest p_k.
    """

    def __init__(
        self, dawa: DAWA, current: Weights, unscaled: frozenset[str], max_share: float = 1.0
    ) -> None:
        self._dawa = dawa
        self._current = current
        self._unscaled = unscaled
        self._weigh = Weighing(dawa.weights)
        self._mean = CappedMean(max_share)

    def add(self, client: int, update: Update, geometry: UpdateGeometry) -> None:
        """Fold in one client's model, scaled layer by layer."""
        p, earlier = self._weigh(update)  # up to a factor that all clients share
        if earlier != 1:
            self._mean.rescale(earlier)
        layers = [name for name in geometry.moved if name not in self._unscaled]
        delta = {**dict.fromkeys(geometry.moved, 1.0), **self._dawa.delta(geometry, layers)}
        self._mean.add(update["weights"], p, delta)

    def close(self) -> Models:
        """Return the next w_g; without an update it is unchanged."""
        mean = self._mean.close()
        summed, total = mean.mean, self._mean.total  # Σ_k p_k
        if not self._dawa.renormalise:
            for layer, scale in mean.totals.items():  # Σ_k p_k |δ_k^(l)|
                if scale != total:
                    summed[layer].mul_(scale / total)
        return {"global": {**self._current, **summed} if summed else self._current}


L_DAWA = Method(
    objective=SimCLR(),
    aggregation=LDAWA(),
    title="L-DAWA",
    paper="Rehman et al., L-DAWA, ICCV 2023",
    family="Aggregation",
)
L_DAWA_FEDAVG = replace(L_DAWA, aggregation=LDAWA(weights="samples"), title="L-DAWA over FedAvg")
L_DAWA_LOSS = replace(L_DAWA, aggregation=LDAWA(weights="loss"), title="L-DAWA over Loss")
L_DAWA_FEDU = replace(L_DAWA_FEDAVG, merge=FedU(), title="L-DAWA over FedU")
M_DAWA = replace(L_DAWA, aggregation=MDAWA(), title="M-DAWA")

FED_LOSS = Method(
    objective=SimCLR(),
    aggregation=LossWeighted(),
    title="Loss",
    paper="Gao et al., ICASSP 2022, as compared with in L-DAWA",
    family="Aggregation",
)
