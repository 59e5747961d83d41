"""``atoll neighbours``: the nearest images of some images, and measures that need no labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atoll import functional
from atoll.commands.embed import decoding_of, image_batches, use_device
from atoll.commands.evaluate import with_data_settings
from atoll.commands.run_files import find_encoder, keep_if_possible, partition_of
from atoll.core import tree
from atoll.core.errors import UserError, warn
from atoll.core.process_state import standard_settings
from atoll.core.rng import stream
from atoll.core.run_folder import NEIGHBOURS, SITES, Run
from atoll.core.text import clean, short
from atoll.core.tree import Tree
from atoll.data.decode import Encoded, decode_batch
from atoll.data.images import Pixels, StoredPixels
from atoll.data.sources import load_data
from atoll.data.views.views import make_views
from atoll.engines.partitioning import client_images
from atoll.evaluation import embed, nearest, same_client_share, same_image_retrieval, sample
from atoll.evaluation.embed import input_views
from atoll.models import Encoder, load_encoder
from atoll.recipe.recipe import Recipe, recipe_of
from atoll.report.client_pictures import THUMBNAIL
from atoll.report.pictures import thumbnails

MEASURED = 2000  # images of the measures


@dataclass(frozen=True)
class Gallery:
    """Images to search.

    Attributes:
        pixels: The images.
        names: The name of each.
        h: The representation of each, (N, d).
        owners: The client of each, −1 for none; None if the clients are unknown.
        clients: Names of the clients.
    """

    pixels: Pixels
    names: list[str]
    h: Tensor
    owners: Tensor | None = None
    clients: tuple[str, ...] = ()


def find_neighbours(
    run: Run,
    images: Path | None = None,
    among: Path | None = None,
    queries: int = 8,
    k: int = 8,
    settings: Sequence[str] = (),
    device: str = "auto",
) -> Tree:
    """Find the nearest images of some images, and save them in the run's folder for its report.

    Args:
        run: The finished run.
        images: A file or a folder whose images are the queries; None to sample them from the searched images.
        among: A folder whose images are searched; None for the run's training images.
        queries: Number of queries, at most.
        k: Number of neighbours of each.
        settings: ``data.KEY=value`` settings, for other images than the recipe's, or where they have moved.
        device: The device that computes, as for `atoll.commands.embed.use_device`.

    Returns:
        ``queries``: their names; ``query_pictures``: uint8 (q, C, h, w); ``pictures``: uint8 (k, C, h, w) for each;
        ``names``, ``similarity`` (cosine) and ``clients`` of each query's neighbours, nearest first; ``measures``.

    Raises:
        UserError: The run has not finished, images are missing or cannot be decoded, or there is no such device.
    """
    recipe = with_data_settings(run, settings)
    with standard_settings():
        record, gallery, encoder = search(run, images, among, queries, k, recipe=recipe, device=device)
        record["measures"] = _measures(recipe, encoder, gallery)
    keep_if_possible(lambda: tree.save(run.folder / NEIGHBOURS, record))
    return record


def search(
    run: Run,
    images: Path | Encoded | None = None,
    among: Path | None = None,
    queries: int = 8,
    k: int = 8,
    encoder: Encoder | None = None,
    recipe: Recipe | None = None,
    device: str = "auto",
) -> tuple[Tree, Gallery, Encoder]:
    """Find the nearest images as `find_neighbours` does, without the measures and without a file.

    PyTorch's settings are then those of the device (see `atoll.core.process_state.standard_settings`).

    Args:
        run: The finished run.
        images: As for `find_neighbours`, or an opened image or an array of pixels.
        among: As for `find_neighbours`.
        queries: As for `find_neighbours`.
        k: As for `find_neighbours`.
        encoder: The run's encoder, which is moved to the device; None to read it.
        recipe: The run's recipe, with the objects that the run was given; None to read it.
        device: As for `find_neighbours`.

    Returns:
        The record, the searched images and the encoder.

    Raises:
        UserError: The run has not finished, images are missing or cannot be decoded, or there is no such device.
    """
    if isinstance(k, bool) or not isinstance(k, int | np.integer):
        raise UserError(f"k is {short(k)}; it is a number of neighbours, a whole number")
    if queries < 1 or k < 1:
        raise UserError(f"neighbours need at least 1 image and 1 neighbour, not {queries} and {k}")
    encoder, recipe = encoder or load_encoder(find_encoder(run.folder)), recipe or recipe_of(run)
    use_device(encoder, device)
    gallery = _training_images(run, recipe, encoder) if among is None else _folder(encoder, among)
    if len(gallery.names) < 2:
        raise UserError("there is only one image to search; give a folder with more")
    if images is None:
        own = sample(len(gallery.names), queries, recipe.seed, "neighbours")
        asked = Gallery(
            StoredPixels(gallery.pixels.gather(own)), [gallery.names[i] for i in own], gallery.h[own]
        )
        found, similar = nearest(gallery.h, asked.h, k, own)
    else:
        asked = _folder(encoder, images, queries) if isinstance(images, Path) else _opened(encoder, images)
        found, similar = nearest(gallery.h, asked.h, k)
    found = found.cpu()
    record = {
        "queries": asked.names,
        "query_pictures": thumbnails(asked.pixels.gather(torch.arange(len(asked.names))), THUMBNAIL),
        "pictures": [thumbnails(gallery.pixels.gather(row), THUMBNAIL) for row in found],
        "names": [[gallery.names[i] for i in row] for row in found],
        "similarity": similar.cpu().tolist(),
        "clients": _owners(gallery, found),
    }
    return record, gallery, encoder


def _training_images(run: Run, recipe: Recipe, encoder: Encoder) -> Gallery:
    partition = partition_of(run)
    if run.read(SITES) is not None:
        raise UserError(
            f"the training images of {run.folder} are at its sites; give a folder to search with --among"
        )
    train = load_data(recipe.data, recipe.seed).train
    if partition:
        train = client_images(train, partition, recipe)
    views = input_views(encoder, recipe.data.image_size)
    h = embed(encoder, views.plain, train.images)
    names = [f"#{i}" for i in range(len(train))]
    if partition is None or partition.fingerprint != train.fingerprint:
        if partition:
            warn(
                "these are not the images that the run's clients had, so whose the neighbours are is unknown"
            )
        return Gallery(train.images, names, h)
    return Gallery(train.images, names, h, partition.client_ids(train), tuple(partition.names))


def _opened(encoder: Encoder, image: Encoded) -> Gallery:
    decoded = decode_batch([image], decoding_of(encoder))
    if decoded.corrupt:
        raise UserError(
            f"the image cannot be read as the encoder's training images were: {decoded.corrupt[0]}"
        )
    stored = StoredPixels(torch.from_numpy(decoded.pixels))
    return Gallery(stored, ["image"], embed(encoder, input_views(encoder, stored.shape[-1]).plain, stored))


def _folder(encoder: Encoder, images: Path, limit: int | None = None) -> Gallery:
    names: list[str] = []
    pixels: list[Tensor] = []
    for some, batch in image_batches(encoder, images):
        names += map(clean, some)
        pixels.append(batch)
        if limit is not None and len(names) >= limit:
            break
    stored = StoredPixels(torch.cat(pixels)[:limit])
    h = embed(encoder, input_views(encoder, stored.shape[-1]).plain, stored)
    return Gallery(stored, names[:limit], h)


def _owners(gallery: Gallery, found: Tensor) -> list[list[str]]:
    """Names of the clients of each query's neighbours; empty if they are unknown."""
    if gallery.owners is None:
        return []
    owners = gallery.owners
    return [[gallery.clients[int(owners[i])] if owners[i] >= 0 else "" for i in row] for row in found]


def _measures(recipe: Recipe, encoder: Encoder, gallery: Gallery) -> dict[str, Any]:
    """Measures of the representations that need no labels, on a sample of the searched images."""
    rows = sample(len(gallery.names), MEASURED, recipe.seed, "neighbours-measures")
    some = StoredPixels(gallery.pixels.gather(rows))
    views = make_views(recipe.views, some.shape[-1], some.shape[1])
    h = gallery.h[rows]
    measures: dict[str, Any] = {
        "effective_rank": float(functional.effective_rank(h)),
        "width": h.shape[1],
    }
    draws = stream(recipe.seed, "neighbours-views")
    try:
        view1, view2 = (embed(encoder, lambda pixels: views(pixels, draws), some) for _ in range(2))
        measures |= {"retrieval": same_image_retrieval(view1, view2), "retrieval_images": len(rows)}
    except UserError as error:  # the recipe's own transform is not here
        if views.transform is None:
            raise
        warn(f"left out how often a view finds its image: {error}")
    if gallery.owners is not None and int(gallery.owners.max()) > 0:
        held = rows[gallery.owners[rows] >= 0]
        found, _ = nearest(gallery.h, gallery.h[held], 10, held)
        share, chance = same_client_share(found.cpu(), gallery.owners, held)
        measures |= {"same_client": share, "same_client_chance": chance}
    return measures
