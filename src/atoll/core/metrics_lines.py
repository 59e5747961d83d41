"""Lines of ``metrics.jsonl``: one JSON object per round, each with a digest."""

from __future__ import annotations

import json
from typing import Any

from atoll.core.digests import JSON, DamagedError, open_text, seal_text


def format_line(line: dict[str, Any]) -> bytes:
    """Format one line of metrics."""
    return seal_text(json.dumps(line).encode(), JSON) + b"\n"


def parse_lines(data: bytes) -> list[dict[str, Any]]:
    """Parse the lines of metrics; an incomplete last line, as a kill leaves it, does not count.

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
