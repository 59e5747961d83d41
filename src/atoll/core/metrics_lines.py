"""Lines of ``metrics.jsonl``: one JSON object per round, each with a digest."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from atoll.core.digests import JSON, DamagedError, open_text, seal_text
from atoll.core.errors import warn


class Results(dict[str, Any]):
    """Results of a run; until 0.2, ``Run.results`` was a method."""

    def __call__(self) -> Results:
        """Return itself, with a warning."""
        warn("Run.results is no longer called; write run.results", DeprecationWarning)
        return self

    def __missing__(self, key: object) -> Any:
        """Say what there is instead."""
        known = ", ".join(name for name in self if name.endswith("/accuracy")) or "none"
        why = f"; {self['note']}" if "note" in self else "" if self else ", until the run has finished"
        raise KeyError(f"no result {key!r}; the accuracies are: {known}{why}")


class Metrics(list[dict[str, Any]]):
    """Lines of a run's metrics; until 0.2, ``Run.metrics`` was a method."""

    def __call__(self) -> Metrics:
        """Return itself, with a warning."""
        warn("Run.metrics is no longer called; write run.metrics", DeprecationWarning)
        return self


def format_line(line: dict[str, Any]) -> bytes:
    """Format one line of metrics."""
    return seal_text(json.dumps(line).encode(), JSON) + b"\n"


def parse_lines(data: bytes) -> list[dict[str, Any]]:
    """Parse the lines of metrics; an incomplete last line, which a killed process may leave, does not count.

    Raises:
        DamagedError: A line is damaged, or lines are missing.
    """
    *lines, rest = data.split(b"\n")
    parsed: list[dict[str, Any]] = []
    for number, line in enumerate([*lines, rest], start=1):
        try:
            found = json.loads(open_text(line, JSON)[0])
            if not isinstance(found, dict) or type(found.get("round")) is not int:
                raise DamagedError("it names no round")
            if parsed and found["round"] != parsed[-1]["round"] + 1:
                raise DamagedError(f"round {found['round']} follows round {parsed[-1]['round']}")
        except (RecursionError, ValueError) as error:
            if number > len(lines):
                break
            raise DamagedError(f"line {number}: {error}") from None
        parsed.append(found)
    return parsed


def numbers(line: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the numbers of a line, or of results, by name; a table's numbers are called ``TABLE/NAME``.

    Example:
        >>> from atoll.core.metrics_lines import numbers
        >>> numbers({"round": 1, "evaluation": {"knn/accuracy": 0.9, "split": "test"}})
        {'round': 1, 'evaluation/knn/accuracy': 0.9}
    """
    found: dict[str, float] = {}
    for key, value in line.items():
        if isinstance(value, Mapping):
            found |= numbers(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found[f"{prefix}{key}"] = value
    return found
