"""``atoll data``: a recipe's images, and which client holds which."""

from __future__ import annotations

from atoll.data.partition.make import partition_images
from atoll.data.partition.partition import Partition
from atoll.data.sources import Splits, load_data
from atoll.recipe.recipe import Recipe


def load_partition(recipe: Recipe) -> tuple[Splits, Partition]:
    """A recipe's images and their partition; no network is built.

    Raises:
        UserError: the images cannot be loaded, or the partition does not exist for them.
    """
    splits = load_data(recipe.data, recipe.seed)
    return splits, partition_images(splits.train, recipe.partition, recipe.seed)
