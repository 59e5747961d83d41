"""Loss-weighted averaging (Gao et al., End-to-End Speech Recognition from Federated Acoustic Models, 2022)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from atoll.aggregation.fedavg import MeanFold
from atoll.components.base import Aggregation, Models, Setting


@dataclass(frozen=True)
class LossWeighted(Aggregation):
    """w ← Σ_k β_k w_k with β = softmax(−L) over the cohort; L_k is the mean loss of the last local epoch.

    A constant added to the loss of all clients does not change the result.
    """

    name: ClassVar[str] = "loss_weighted"
    source: ClassVar[str] = "Gao et al. 2022, Eq. 1; L-DAWA Sec. 3.1"
    keeps_updates: ClassVar[bool] = False

    @property
    def statistics(self) -> tuple[str, ...]:
        """Name the number from which β_k is computed: L_k."""
        return ("loss",)

    def open(self, models: Models, setting: Setting, round: int, scratch: Path | None) -> MeanFold:
        """Start a round's mean."""
        return MeanFold(models["global"], "loss", setting.train.max_share)
