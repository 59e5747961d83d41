"""What a run reads: a resumed run must read the images and the weights with which it was started."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from atoll.commands.evaluate import check_held_out
from atoll.commands.run_files import partition_of
from atoll.core.errors import UserError
from atoll.core.run_folder import HELD_OUT, START, WEIGHTS, Run
from atoll.data.partition.partition import Partition
from atoll.engines.federation import Federation
from atoll.models.files import encoder_file
from atoll.recipe.recipe import Recipe

RECORDS = {"model.weights": WEIGHTS, "train.start": START}  # of the weights that an option names


def check_inputs(run: Run, recipe: Recipe, federation: Federation) -> None:
    """Compare what a run reads with what it was started from, and record digests if it starts now.

    Args:
        run: The folder.
        recipe: The recipe.
        federation: Its federation, whose images are loaded.

    Raises:
        UserError: The training images, their partition, a file of weights or the held-out images have changed.
    """
    _check_partition(run, recipe, federation.partition)
    for option, path in _weights(recipe):
        # Of a warm start, a resumed run reads the weights again that do not train, and nothing else.
        again = option != "train.start" or bool(federation.setting.base_names)
        _check_weights(run, option, path, again)
    held_out = federation.splits.held_out[1]
    if held_out.fingerprint:
        check_held_out(run, _recorded(run, HELD_OUT, {"fingerprint": held_out.fingerprint}), held_out)


def other_weights(run: Run, recipe: Recipe) -> Path | None:
    """The file of weights that differs now from what a run has recorded of it; None if none does."""
    for option, path in _weights(recipe):
        earlier = (run.read_json(RECORDS[option]) or {}).get("sha256")
        if earlier is not None and path.is_file() and _digest(path) != earlier:
            return path
    return None


def may_move(run: Run) -> list[str]:
    """Options that name weights of which a run has recorded a digest, so that they may lie elsewhere now."""
    return [option for option, record in RECORDS.items() if run.read_json(record) is not None]


def has_other_images(run: Run, partition: Partition) -> bool:
    """Whether a run was started with other training images than those of a partition."""
    earlier = partition_of(run)
    return earlier is not None and earlier.fingerprint != partition.fingerprint


def _check_partition(run: Run, recipe: Recipe, partition: Partition) -> None:
    if has_other_images(run, partition):
        raise UserError(
            f"{run.folder} was started with other training images than the recipe's data contain now; restore "
            "them, or choose another --out"
        )
    earlier = partition_of(run) if recipe.partition.features else None
    if earlier and not _same_clients(earlier, partition):
        raise UserError(
            f"{run.folder} was started with another partition of the same images than its recipe gives; restore "
            "the encoder that partition.features names, or choose another --out"
        )


def _same_clients(one: Partition, other: Partition) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one.clients, other.clients))


def _weights(recipe: Recipe) -> Iterator[tuple[str, Path]]:
    """The weights that a recipe begins with: the option and the file."""
    if recipe.model.weights:
        yield "model.weights", Path(recipe.model.weights)
    if recipe.train.start:
        yield "train.start", encoder_file(Path(recipe.train.start))


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_weights(run: Run, option: str, path: Path, read_again: bool) -> None:
    """Record the file that an option names, and compare it with an earlier record if it is read again."""
    if not path.is_file():  # a name, or what is missing: loading it says so
        return
    digest = _digest(path)
    before = _recorded(run, RECORDS[option], {"file": str(path), "sha256": digest})
    if read_again and before.get("sha256") != digest:
        raise UserError(
            f"{run.folder} was started from other weights than '{path}' holds now ({option}); restore the file, "
            "or choose another --out"
        )


def _recorded(run: Run, name: str, now: dict[str, str]) -> dict[str, Any]:
    """What a run has recorded in a file; the present values, after writing them, if it has none."""
    record = run.read_json(name)
    if record is None:
        run.write(name, json.dumps(now) + "\n")
    return now if record is None else record
