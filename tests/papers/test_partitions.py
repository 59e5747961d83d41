"""Every row of every table and figure can draw its partition and build its networks, at every scale."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import cache

import pytest
import torch
from torch import Tensor

from atoll.data.images import ImageSet, StoredPixels
from atoll.data.options import DataOptions, PartitionOptions
from atoll.data.partition.make import partition_images
from atoll.data.partition.partition import Partition
from atoll.data.sources import Splits
from atoll.engines.federation import Federation
from atoll.papers.figures import figure_of
from atoll.papers.rows import Row, make_rows
from atoll.papers.scales import scale_names
from atoll.papers.tables import figure_names, load_table, table_names
from atoll.recipe.prerequisites import prerequisite_recipes

NAMES = [*table_names(), *figure_names()]
SETS = {  # training images and classes (of amazon-packages, clients); all classes as large as each other
    "cifar10": (50_000, 10),
    "CIFAR100": (50_000, 100),
    "STL10": (5_000, 10),
    "tiny-imagenet": (100_000, 200),
    "mini-imagenet": (50_000, 100),
    "imagenet-100": (126_600, 100),
    "amazon-packages": (80_000, 5),
}
EVEN = (0.5, 1.5)  # sizes that Dec-SSL's code accepts, as shares of the mean size


@cache
def blank(data: DataOptions) -> ImageSet:
    """Black images with the labels of a public set, in a fixed random order."""
    number, classes = SETS[data.path or ""]
    labels = torch.arange(number) % classes
    labels = labels[torch.randperm(number, generator=torch.Generator().manual_seed(0))][: data.limit]
    pixel = torch.zeros(1, data.channels, data.image_size, data.image_size, dtype=torch.uint8)
    pixels = StoredPixels(pixel.expand(len(labels), -1, -1, -1))
    columns = {"client": labels} if data.source == "clients" else {}
    return ImageSet(pixels, labels, [str(one) for one in range(classes)], columns)


@cache
def draw(data: DataOptions, options: PartitionOptions, seed: int) -> Partition:
    """Draw a partition; classes stand for the clusters of features, which depend on the images."""
    images = blank(data)
    clusters: Tensor | None = None
    if options.features:
        clusters = images.labels % (options.feature_clusters or options.clients)  # type: ignore[operator]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of clients that sit out, which a row may allow
        return partition_images(images, options, seed, clusters)


def rows(name: str) -> Iterator[tuple[str, Row]]:
    """The rows of a table or a figure at each of its scales, each with words for it."""
    table = load_table(name)[0]
    for scale in scale_names(table):
        for row in make_rows(table, scale=scale):
            yield f"{name} {row.name} at scale {scale}", row


@pytest.mark.parametrize("name", NAMES)
def test_every_row_draws_its_partition(name: str) -> None:
    for where, row in rows(name):
        recipe = row.recipe
        for seed in range(recipe.seed, recipe.seed + 3):
            partition = draw(recipe.data, recipe.partition, seed)
            assert min(partition.sizes) >= 2, where  # the least that trains
            if recipe.partition.kind in ("natural", "centralised"):
                continue
            assert len(partition) + len(partition.sit_out) == recipe.partition.clients, where
            if name.startswith("dec-ssl"):
                assert not partition.sit_out, where
            if name.startswith("dec-ssl") and "scale test" not in where:
                mean = len(blank(recipe.data)) / recipe.partition.clients
                assert EVEN[0] * mean <= min(partition.sizes), where
                assert max(partition.sizes) <= EVEN[1] * mean, where


def build(row: Row) -> Federation:
    """Build the federation of a row and of the runs that its method needs first."""
    recipe = row.recipe
    for other in prerequisite_recipes(recipe).values():
        Federation(other, Splits(blank(other.data)))
    partition = draw(recipe.data, recipe.partition, recipe.seed)
    return Federation(recipe, Splits(blank(recipe.data), blank(recipe.data)), partition)


@pytest.mark.parametrize("name", ["dec-ssl-2-top", "dec-ssl-fig-5", "dec-ssl-fig-9", "dec-ssl-fig-16"])
def test_featarc_builds_at_every_scale(name: str) -> None:
    """Its regulariser compares representations with embeddings, whose widths a scale changes."""
    built = set()
    for where, row in rows(name):
        kind = (row.recipe.method.name, where.partition(" at ")[2])
        if kind not in built and "featarc" in str(row.recipe.method.name):
            build(row)
            built.add(kind)
    assert len(built) == 3 * (3 if name == "dec-ssl-fig-5" else 1)


def test_a_map_shows_models_that_the_runs_of_its_rows_keep() -> None:
    shown = set()
    for name in figure_names():
        figure = figure_of(load_table(name)[0])
        maps = [panel for panel in figure.panels if panel.kind == "map"] if figure else []
        every = make_rows(load_table(name)[0], scale="test") if maps else []
        for panel in maps:
            for row in panel.choose(every):
                federation = build(row)
                method, setting = row.recipe.composed, federation.setting
                state = method.init(setting, federation.initial_weights())
                models = method.deploy(state).models
                kept = {"global"} if len(models) == 1 else {f"global-{one}" for one in models}
                if -1 in row.recipe.train.keep_local_models:
                    kept |= {f"client-{client}" for client in range(setting.num_clients)}
                assert set(panel.models) <= kept, (name, row.name)
                shown.add((name, row.name))
        assert {row for figure, row in shown if figure == name} == {row.name for row in every}
    assert ("dec-ssl-fig-9", "featarc") in shown


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_row_builds(name: str) -> None:
    for _, row in rows(name):
        build(row)
