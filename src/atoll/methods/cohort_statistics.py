"""Objectives whose loss reads statistics of all clients' embeddings: when a client computes and sends them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from atoll.components.base import Objective, Setting


@dataclass(frozen=True)
class CohortStatistics(Objective):
    """An objective that needs statistics from every client before it can train.

    Attributes:
        gather: ``"rounds"``: odd rounds only gather statistics and train nothing, even rounds train with them (the
            paper's exchange, in twice as many rounds). ``"updates"``: each update carries statistics of the trained
            networks, and the next round trains with them; the first round has none.
    """

    gather: Literal["rounds", "updates"] = "rounds"

    @property
    def consecutive_rounds(self) -> bool:
        """Whether the clients of a round train with what those of the round before gathered."""
        return self.gather == "rounds"

    @property
    def idle_rounds(self) -> str:
        """Name the setting without rounds that only gather, if there are such rounds."""
        return f"options.{self.name}.gather = 'updates'" if self.gather == "rounds" else ""

    def trains(self, round: int) -> bool:
        """Whether the clients train in a round."""
        return self.gather == "updates" or round % 2 == 0

    def sends(self, round: int) -> bool:
        """Whether the clients send statistics in a round."""
        return self.gather == "updates" or round % 2 == 1

    def epochs(self, setting: Setting, client: int, cohort: Sequence[int], round: int) -> int | None:
        """Skip the training in a round that only gathers."""
        return None if self.trains(round) else 0
