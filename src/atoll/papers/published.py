"""The papers' numbers: the lines of ``tables/published.csv``."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from functools import cache
from importlib import resources

from atoll.core.errors import UserError


@cache
def published_lines() -> list[dict[str, str]]:
    """All lines of ``published.csv``; ``value`` has the paper's digits."""
    text = (resources.files("atoll") / "tables" / "published.csv").read_text("utf-8")
    return list(csv.DictReader(io.StringIO(text)))


def find_published(keys: Mapping[str, str], metric: str) -> dict[str, str]:
    """Find the line of ``published.csv`` with these keys.

    Raises:
        UserError: There is no such line, or more than one.
    """
    wanted = {"metric": metric, **keys}
    found = [
        line for line in published_lines() if all(line.get(key) == value for key, value in wanted.items())
    ]
    if len(found) != 1:
        query = ", ".join(f"{key} = {value!r}" for key, value in wanted.items())
        raise UserError(
            f"{len(found) or 'no'} published values have {query}; the keys must select exactly one"
        )
    return found[0]
