"""What commands read of a run's folder, and how they write into it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from atoll.core.errors import UserError, warn
from atoll.core.remedies import damaged
from atoll.core.run_folder import Run, is_of_sites
from atoll.data.partition.partition import Partition
from atoll.models.exported import CONFIG


def partition_of(run: Run) -> Partition | None:
    """Load the partition of a run; None if its file does not exist.

    Raises:
        UserError: The file is damaged, or belongs to a run of another seed.
    """
    text = run.read("partition.json")
    try:
        found = None if text is None else Partition.from_json(text)
    except UserError as error:
        raise damaged(run.partition_path, error) from None
    if found is not None and found.seed != (seed := run.recipe_table().get("seed", 0)):
        raise damaged(run.partition_path, f"it is of seed {found.seed}, and the run of seed {seed}")
    return found


def model_path(run: Run, name: str) -> Path:
    """File of the finished encoder of one of several models."""
    return run.folder / f"encoder-{name}.safetensors"


def find_encoder(run_or_encoder: Path | str) -> Path:
    """Find the encoder's file in a run's folder; any other path is returned unchanged.

    Raises:
        UserError: The folder contains no run, or the run has not finished.
    """
    path = Path(run_or_encoder)
    if not path.is_dir() or (path / CONFIG).is_file():  # a file, or a folder that `atoll export` wrote
        return path
    run = Run(path).require()
    if not run.encoder_path.is_file():
        of_sites = is_of_sites(run.read_json(run.partition_path.name) or {})
        how = "flwr run APP" if of_sites else f"atoll resume {path}"
        raise UserError(f"{path} has no finished encoder yet; finish it with: {how}")
    return run.encoder_path


def find_one_encoder(run_or_encoder: Path | str) -> Path:
    """Find the encoder's file as `find_encoder` does, and warn if a run has further encoders."""
    path = find_encoder(run_or_encoder)
    results = Run(path.parent).results if Path(run_or_encoder).is_dir() and path.is_file() else {}
    if models := results.get("clients_by_model"):
        warn(
            f"{run_or_encoder} ended with {len(models)} encoders; this is that of {results['model']}, whose "
            "clients hold the most images; the others are encoder-NAME.safetensors in its folder"
        )
    return path


def keep_if_possible(write: Callable[[], object]) -> None:
    """Write a result into a folder, or warn that this is not possible, so that the result can be shown."""
    try:
        write()
    except UserError as error:
        warn(f"the result is shown and not kept: {error}")
