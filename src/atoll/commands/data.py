"""``atoll data``: a recipe's images, their partition and their shifts."""

from __future__ import annotations

from atoll.data.partition.partition import Partition
from atoll.data.sources import Splits, load_data
from atoll.engines.partitioning import described, partition_clients
from atoll.recipe.recipe import Recipe


def load_partition(recipe: Recipe) -> tuple[Splits, Partition]:
    """Load and partition a recipe's images, without building networks.

    Raises:
        UserError: The images cannot be loaded, or the partition is not possible for them.
    """
    splits = load_data(recipe.data, recipe.seed)
    return splits, described(partition_clients(splits.train, recipe), recipe)
