"""Which client holds which images, and how each client's images are shifted."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from atoll.components.base import init_seed, seeded
from atoll.core.errors import UserError, warn
from atoll.core.files import cache_folder, hash_bytes
from atoll.core.threads import threads
from atoll.core.tree import load, save
from atoll.data.images import ImageSet
from atoll.data.partition.feature_clusters import feature_clusters
from atoll.data.partition.make import partition_images
from atoll.data.partition.partition import Partition
from atoll.data.partition.small_clients import too_small_words
from atoll.data.shifts.shift import Shift, shifted, shifted_held_out
from atoll.data.sources import Splits
from atoll.data.views.views import Views, make_views
from atoll.evaluation.embed import embed, input_views
from atoll.models import Encoder, build_encoder, load_encoder
from atoll.models.files import encoder_file
from atoll.recipe.recipe import Recipe

UNTRAINED = "untrained"  # as partition.features
_LABEL = "clusters of images"


def partition_clients(images: ImageSet, recipe: Recipe) -> Partition:
    """Partition training images according to a recipe, by feature clusters if it names features.

    Raises:
        UserError: The partition does not exist for these images, or the encoder of the features cannot be used.
    """
    kind = recipe.partition.kind
    if recipe.data.source == "clients" and kind not in ("natural", "centralised"):
        warn(
            "the images of all folders of clients are distributed among other clients, because partition.kind = "
            f"{kind!r}; to keep the folders as clients, set partition.kind = 'natural'"
        )
    return partition_images(images, recipe.partition, recipe.seed, cluster_images(images, recipe))


def why_too_small(partition: Partition) -> str:
    """Reason why no run can train on a partition, because clients have one image; empty if it can."""
    small = {name: size for name, size in zip(partition.names, partition.sizes, strict=True) if size < 2}
    if not small:
        return ""
    fewer = "" if partition.options.kind == "natural" else ", fewer clients or a larger partition.min_size"
    return (
        f"{too_small_words(small)}, and training needs at least 2 images in a batch; use more images{fewer}, "
        "or let such clients sit out: partition.sit_out_below = 2"
    )


def cluster_images(images: ImageSet, recipe: Recipe) -> Tensor | None:
    """Cluster training images by the features that a recipe names; None if it names none.

    The clusters are cached, because every process of a run needs them.

    Shape:
        - output: (N,) int64

    Raises:
        UserError: The encoder cannot be read, or does not fit the images; or there are too few images.
    """
    options = recipe.partition
    if not options.features or options.kind == "centralised":
        return None
    encoder, views = _feature_encoder(options.features, recipe)
    clusters = options.feature_clusters or options.clients
    weights = b"".join(tensor.cpu().numpy().tobytes() for tensor in encoder.state_dict().values())
    # Equal weights may belong to another architecture or code; the features of one image reveal it.
    first = embed(encoder, views.plain, images.subset(torch.arange(1)).images)
    versions = [torch.__version__, metadata.version("scikit-learn"), np.__version__]
    view = [repr(views.settings), views.size]
    key = [
        images.fingerprint,
        hash_bytes(weights),
        hash_bytes(first.numpy().tobytes()),
        view,
        clusters,
        options.feature_dims,
        recipe.seed,
        versions,
    ]
    path = cache_folder() / "clusters" / f"{hash_bytes(json.dumps(key).encode())}.safetensors"
    if images.fingerprint:
        with contextlib.suppress(UserError):  # missing or damaged: computed again
            kept: Tensor = load(path, _LABEL)
            return kept
    with threads(recipe.engine.threads):
        features = embed(encoder.to(recipe.engine.use_device()), views.plain, images.images)
    ids = feature_clusters(features, clusters, options.feature_dims, recipe.seed)
    if images.fingerprint:
        save(path, ids, _LABEL, shared=True)
    return ids


def _feature_encoder(name: str, recipe: Recipe) -> tuple[Encoder, Views]:
    """The encoder that `partition.features` names, and the views that convert the recipe's images to its input."""
    size, channels = recipe.data.image_size, recipe.data.channels
    if name == UNTRAINED:
        return initial_encoder(recipe), make_views(recipe.views, size, channels)
    try:
        encoder = load_encoder(encoder_file(Path(name)))
    except UserError as error:
        raise UserError(f"partition.features = {name!r}: {error}") from None
    if encoder.metadata.get("channels") != channels:
        raise UserError(
            f"partition.features = {name!r} is an encoder of images with {encoder.metadata.get('channels')} "
            f"channel(s), and data.channels = {channels}; choose an encoder of such images"
        )
    return encoder, input_views(encoder, size)


def initial_encoder(recipe: Recipe, draw: int = 0) -> Encoder:
    """Build a recipe's encoder with random initial weights; ``draw`` counts independent ones."""
    channels, size, _ = recipe.image_shape
    return seeded(
        init_seed(recipe.seed, "encoder", draw), lambda: build_encoder(recipe.model, channels, size)
    )


def shift_of(recipe: Recipe, clients: int) -> Shift | None:
    """The shift of the clients' images; None if the recipe has none, or only one client."""
    if not recipe.shift.kinds or recipe.partition.kind == "centralised":
        return None
    return Shift(recipe.shift, clients, recipe.seed)


def described(partition: Partition, recipe: Recipe) -> Partition:
    """Add a description of each client's shift to a partition."""
    shift = shift_of(recipe, len(partition))
    return (
        replace(partition, shifts=tuple(map(shift.describe, range(len(partition))))) if shift else partition
    )


def client_images(images: ImageSet, partition: Partition, recipe: Recipe) -> ImageSet:
    """The training images of the clients, each with its client's shift."""
    shift = shift_of(recipe, len(partition))
    if shift is None or partition.fingerprint != images.fingerprint:  # the clients' images are elsewhere
        return images
    return shifted(images, partition.clients, shift)


def evaluation_splits(splits: Splits, partition: Partition, recipe: Recipe) -> Splits:
    """The images of the evaluation, shifted if the recipe asks for it."""
    shift = shift_of(recipe, len(partition))
    if shift is None or recipe.shift.evaluation == "source":
        return splits
    held = {
        name: None if images is None else shifted_held_out(images, partition.sizes, shift, name)
        for name, images in (("test", splits.test), ("validation", splits.validation))
    }
    return Splits(client_images(splits.train, partition, recipe), **held)
