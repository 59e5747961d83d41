"""Models of chosen rounds that a run keeps, in ``models/round-NNNNNN/`` of its folder; nothing deletes them."""

from __future__ import annotations

from pathlib import Path

from atoll.core.checkpoints import round_name, round_of
from atoll.core.tree import Weights, save

FOLDER = "models"


def keep_model(run: Path, round: int, name: str, weights: Weights) -> None:
    """Save a model of a round, atomically.

    Args:
        run: The run's folder.
        round: The round.
        name: ``global`` or ``global-NAME`` for a resulting model, ``client-K`` for a local one.
        weights: The model, or the part of it that a client sent.
    """
    save(run / FOLDER / round_name(round) / f"{name}.safetensors", weights)


def kept_models(run: Path, round: int) -> dict[str, Path]:
    """Files of the models that a run kept of a round, by name."""
    files = (run / FOLDER / round_name(round)).glob("*.safetensors")
    return {path.stem: path for path in sorted(files)}


def kept_rounds(run: Path) -> list[int]:
    """Rounds of which a run kept models, in order.

    Raises:
        UserError: A folder has the name of a round's models without a round.
    """
    return sorted(map(round_of, (run / FOLDER).glob("round-*")))
