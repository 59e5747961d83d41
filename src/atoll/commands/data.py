"""``atoll data``: a recipe's images, their partition and their shifts."""

from __future__ import annotations

from pathlib import Path

from atoll.core.config import describe
from atoll.core.errors import UserError, warn
from atoll.core.files import write_whole
from atoll.data.partition.partition import Partition
from atoll.data.source_warnings import warn_of_classes, warn_of_copies
from atoll.data.sources import Splits, load_data
from atoll.engines.partitioning import client_images, described, partition_clients, why_too_small
from atoll.recipe.recipe import Recipe
from atoll.report.client_pictures import client_samples, clients_picture
from atoll.report.wording import setting_words


def load_partition(recipe: Recipe) -> tuple[Splits, Partition]:
    """Load and partition a recipe's images, without building networks.

    Raises:
        UserError: The images cannot be loaded, or the partition is not possible for them.
    """
    splits = load_data(recipe.data, recipe.seed)
    warn_of_classes(splits.train, splits.test, recipe.data.limit)
    if splits.test is not None:
        warn_of_copies(splits.train, splits.test)
    partition = partition_clients(splits.train, recipe)
    if words := why_too_small(partition):
        warn(f"a run refuses this partition: {words}")
    return splits, described(partition, recipe)


def draw_clients(recipe: Recipe, splits: Splits, partition: Partition, out: Path) -> None:
    """Draw the clients of a recipe as an SVG file: sizes, labels, distance, shifts and sample images.

    Raises:
        UserError: The file's name does not end in .svg, or it cannot be written.
    """
    if out.suffix != ".svg":
        raise UserError(f"the picture is an SVG, and {out} does not end in .svg; choose another -o")
    samples = client_samples(client_images(splits.train, partition, recipe), partition)
    words = setting_words(describe(recipe))
    write_whole(
        out, clients_picture(partition, samples, recipe.title or recipe.name, words).encode(errors="replace")
    )
