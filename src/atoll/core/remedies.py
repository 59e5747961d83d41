"""What a user can do about a damaged or missing file of a run."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from atoll.core.errors import UserError

RESTART = "start the run again with --restart"


class _Remedy(NamedTuple):
    """What to do about a file.

    Attributes:
        then: What to do once the damaged file is deleted; empty if that does not help.
        copy: Whether a copy is better.
        restart: Whether the run cannot go on without the file.
    """

    then: str
    copy: bool = False
    restart: bool = False

    def sentence(self, first: str) -> str:
        """Describe the remedy; ``first`` precedes what to do, such as the deletion of a damaged file."""
        ways = (
            *(["restore it from a copy"] if self.copy else []),
            *([first + self.then] if self.then else []),
            *([RESTART] if self.restart else []),
        )
        return ", or ".join(ways)


_USUAL = _Remedy("resume the run, which writes it again")
_EVALUATED = _Remedy("resume the run without its evaluation.json, which writes both again")
_REMEDIES = {  # by the end of a path
    "recipe.toml": _Remedy("", copy=True, restart=True),  # without which the folder holds no run
    "sites.json": _Remedy("", copy=True, restart=True),  # holds the id by which sites find their states
    "audit.jsonl": _Remedy("go on without its lines so far", copy=True),
    "metrics.jsonl": _Remedy("go on without the curves so far", copy=True),
    "environment.json": _Remedy("resume the run with --other-environment", copy=True),
    "evaluation-*.json": _Remedy("run atoll evaluate again"),
    "neighbours.safetensors": _Remedy("run atoll neighbours again"),
    "map.safetensors": _EVALUATED,
    "clients.safetensors": _EVALUATED,
    "detection/*/*": _Remedy("run atoll detect again"),
    "models/*/*": _Remedy("", copy=True),
}


def remedy(path: Path) -> str:
    """Say what to do about a damaged file of a run."""
    return _of(path).sentence("delete it and ")


def damaged(path: Path, why: object) -> UserError:
    """Make the error for a damaged file of a run, which says what to do."""
    return UserError(f"{path} is damaged ({why}); {remedy(path)}")


def missing(path: Path) -> str:
    """Make the sentence for a missing file of a run, which says what to do."""
    return f"{path} is missing; {_of(path).sentence('')}"


def of_sites(folder: Path) -> UserError:
    """Make the error for a run whose images are at real sites, which only its app reaches."""
    return UserError(f"{folder} is a run of real sites, which its app continues: flwr run APP")


def _of(path: Path) -> _Remedy:
    return next((found for end, found in _REMEDIES.items() if path.match(end)), _USUAL)
