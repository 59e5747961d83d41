"""Checkpoints: one file per complete round."""

from __future__ import annotations

from pathlib import Path

from atoll.core.errors import UserError
from atoll.core.tree import Tree, load, save

KINDS = {"round": int, "state": dict, "valid": dict, "norms": list, "constants_sent": list}


def checkpoint_files(folder: Path) -> dict[int, Path]:
    """Find the checkpoints in a folder by round, the newest first.

    Raises:
        UserError: A file has the name of a checkpoint without a round.
    """
    found = {round_of(path): path for path in folder.glob("round-*.safetensors")}
    return dict(sorted(found.items(), reverse=True))


def round_of(path: Path) -> int:
    """Round of a checkpoint or of kept models, from the name of the file or folder.

    Raises:
        UserError: The name has no round.
    """
    number = path.stem.removeprefix("round-")
    if not (number.isascii() and number.isdecimal()):
        raise UserError(f"{path} is no checkpoint or kept model, because its name has no round; remove it")
    return int(number)


def checkpoint_file(folder: Path, round: int) -> Path:
    """File of the checkpoint of a round."""
    return folder / f"{round_name(round)}.safetensors"


def round_name(round: int) -> str:
    """Name of a round's checkpoint and of its kept models; `round_of` reads the round from it."""
    return f"round-{round:06d}"


def save_checkpoint(folder: Path, round: int, tree: Tree) -> None:
    """Write the state after a round atomically."""
    save(checkpoint_file(folder, round), tree, _label(round))


def load_checkpoint(path: Path, round: int) -> Tree:
    """Load the state after a round.

    Raises:
        UserError: The file is damaged, or is not a checkpoint of this round.
    """
    tree = load(path, _label(round))
    fits = isinstance(tree, dict) and all(isinstance(tree.get(key), kind) for key, kind in KINDS.items())
    if not fits or tree["round"] != round or not isinstance(tree["state"].get("models"), dict):
        raise UserError(f"{path} is no checkpoint of round {round}")
    return tree


def _label(round: int) -> str:
    return f"checkpoint of round {round}"
