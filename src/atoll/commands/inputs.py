"""What a run reads: a resumed run must read the images and the weights with which it was started."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from atoll.commands.evaluate import check_held_out, partition_of
from atoll.core.errors import UserError
from atoll.core.run_folder import HELD_OUT, START, WEIGHTS, Run
from atoll.data.partition.partition import Partition
from atoll.engines.federation import Federation
from atoll.recipe.recipe import Recipe


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
    _check_weights(run, "model.weights", recipe.model.weights, WEIGHTS)
    if recipe.train.start and federation.setting.base_names:  # a resumed run reads their initial values again
        start = Path(recipe.train.start)
        _check_weights(run, "train.start", str(Run(start).encoder_path if start.is_dir() else start), START)
    held_out = federation.splits.held_out[1]
    if held_out.fingerprint:
        check_held_out(run, _recorded(run, HELD_OUT, {"fingerprint": held_out.fingerprint}), held_out)


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


def _check_weights(run: Run, option: str, weights: str | None, name: str) -> None:
    """Compare the file that an option names with the record of that name."""
    if not weights or not Path(weights).is_file():  # a name, or what is missing: loading it says so
        return
    with Path(weights).open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if _recorded(run, name, {"file": weights, "sha256": digest}).get("sha256") != digest:
        raise UserError(
            f"{run.folder} was started from other weights than {weights!r} holds now ({option}); restore the file, "
            "or choose another --out"
        )


def _recorded(run: Run, name: str, now: dict[str, str]) -> dict[str, Any]:
    """What a run has recorded in a file; the present values, after writing them, if it has none."""
    record = run.read_json(name)
    if record is None:
        run.write(name, json.dumps(now) + "\n")
    return now if record is None else record
