"""``atoll schema``: the JSON schema of recipes, with which editors complete and check them."""

from __future__ import annotations

import json
from pathlib import Path

from atoll.core.files import write_whole
from atoll.recipe.table import catalogue


def schema_text() -> str:
    """Format the schema (draft 2020-12) as text."""
    return json.dumps(catalogue()["schema"], ensure_ascii=False, indent=2) + "\n"


def write_schema(path: Path) -> None:
    """Write the schema to a file.

    Raises:
        UserError: The file cannot be written.
    """
    write_whole(path, schema_text().encode())
