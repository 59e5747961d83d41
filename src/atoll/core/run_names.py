"""Names of runs, and the folders that they name."""

from __future__ import annotations

import os
from pathlib import Path

from atoll.core.errors import UserError
from atoll.core.files import expand_home
from atoll.core.text import clean, short

MAX_NAME_BYTES = 200  # limit of a recipe's name: file systems allow 255, and suffixes need some of them


def check_name(name: str) -> None:
    """Check that a recipe's name can be the name of a run's folder.

    Raises:
        UserError: The name is blank, a path or too long.
    """
    is_path = name.strip() in ("", "..") or set(name) & set("/\\\0") or clean(name) != name
    if is_path or len(os.fsencode(name)) > MAX_NAME_BYTES:
        raise UserError(
            f"name = {short(name)} cannot name a run's folder; give it a short word, and set the location of the "
            "folder with --out"
        )


def run_name(name: str, seed: int) -> str:
    """Name of a run's folder, by its recipe's name and its seed."""
    return f"{name}-seed{seed}"


def default_folder(name: str, seed: int) -> Path:
    """Folder of a run without ``--out``: under ``$ATOLL_RUNS``, or under ``runs`` in the working folder.

    Args:
        name: The recipe's name.
        seed: The run's seed.

    Raises:
        UserError: The name cannot be the name of a folder.

    Example:
        >>> from atoll.core.run_names import default_folder
        >>> default_folder("digits-ssd", seed=0).name
        'digits-ssd-seed0'
    """
    check_name(name)
    return expand_home(os.environ.get("ATOLL_RUNS") or "runs") / run_name(name, seed)
