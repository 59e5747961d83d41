"""History of the accepted updates' magnitudes, from which the bounds of later rounds follow."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

LATEST = 1000  # number of latest accepted values from which a median is computed


@dataclass
class History:
    """Numbers of accepted updates, such as distances and losses, by name.

    Attributes:
        earlier: The latest accepted values of earlier rounds.
        new: The accepted values of this round, which do not count yet.
    """

    earlier: dict[str, list[float]] = field(default_factory=dict)
    new: dict[str, list[float]] = field(default_factory=dict)

    def usual(self, name: str) -> float | None:
        """Return the median magnitude of earlier rounds; None if there are none."""
        values = self.earlier.get(name)
        return statistics.median(map(abs, values)) if values else None

    def least(self, name: str) -> float | None:
        """Return the smallest value of earlier rounds, with its sign; None if there are none."""
        return min(self.earlier.get(name, []), default=None)

    def add(self, values: Mapping[str, float]) -> None:
        """Add the values of an accepted update; a value of 0 gives no information about usual ones."""
        for name, value in values.items():
            if value:
                self.new.setdefault(name, []).append(value)

    def forget_round(self) -> None:
        """Forget the values of this round."""
        self.new = {}

    def close_round(self) -> None:
        """Let the values of this round count in the next ones."""
        for name, values in self.new.items():
            self.earlier[name] = (self.earlier.get(name, []) + values)[-LATEST:]
        self.forget_round()
