"""The data that all participants of a run agree on, as a site stores it, and the federation built from it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch

from atoll.core.errors import UserError
from atoll.core.files import hash_bytes
from atoll.core.process_state import standard_settings
from atoll.core.tree import Tree, load, pack
from atoll.data.images import ImageSet
from atoll.data.partition.partition import Partition
from atoll.data.sources import load_data
from atoll.engines.client import Client
from atoll.engines.federation import Federation
from atoll.engines.flower.site_errors import SiteError
from atoll.engines.flower.site_options import SiteOptions
from atoll.recipe.recipe import Recipe, read_recipe, recipe_digest


@dataclass(frozen=True)
class Agreed:
    """File of the agreed data: recipe, classes, constants. Files with the same digest are equal."""

    digest: str
    path: Path = field(compare=False)


def digest_of(agreed: Tree) -> str:
    """Digest of the agreed data."""
    return hash_bytes(pack(agreed))


class Opened(NamedTuple):
    """Objects that a site builds from the agreed data."""

    federation: Federation
    client: Client
    recipe_digest: str


def client_side(agreed: Agreed, options: SiteOptions, client: int) -> Opened:
    """Build the federation and the client side of a site from the agreed data."""
    if options.site:
        return _open(agreed, options, client)
    return _open(agreed, replace(options, share=None), 0)  # the same for every share


@lru_cache(maxsize=1)  # a process of a simulation answers many requests
def _open(file: Agreed, options: SiteOptions, client: int) -> Opened:
    try:
        agreed = load(file.path)
    except UserError as error:
        file.path.unlink(missing_ok=True)
        raise SiteError(
            "the site could not read what the run agreed on, and deleted the file; the next request brings it again"
        ) from error
    policy = options.read_policy()
    if policy is not None:
        policy.check_text(agreed["recipe"])
    recipe = options.recipe(read_recipe(agreed["recipe"]))
    with standard_settings():  # entered after the user's modules, which may change others, were imported
        federation = _federation(recipe, agreed, options, client)
        if policy is not None:
            policy.check_run(federation)
        return Opened(
            federation, federation.client_side(agreed["constants"]), recipe_digest(agreed["recipe"])
        )


def _federation(recipe: Recipe, agreed: Tree, options: SiteOptions, client: int) -> Federation:
    """The federation of a share of the recipe's images, or of the site's own."""
    if not options.site:
        return Federation(recipe)
    splits = load_data(recipe.data, recipe.seed)
    for images in (splits.train, splits.test, splits.validation):
        if images is not None:
            _rename_classes(images, agreed["classes"])
    return Federation(recipe, splits, site_partition(recipe, splits.train, client, agreed["clients"]))


def _rename_classes(images: ImageSet, classes: list[str]) -> None:
    """Number the labels as in the federation, which may have classes that this site lacks."""
    if images.labels is not None:
        if unknown := set(images.classes) - set(classes):
            raise SiteError(
                f"the site has {len(unknown)} class(es) that the run does not know, so its folder has changed "
                "since it enrolled; restore it, or start the run again"
            )
        images.labels = torch.tensor([classes.index(name) for name in images.classes])[images.labels]
        images.classes = list(classes)


def site_partition(recipe: Recipe, images: ImageSet, client: int, clients: int) -> Partition:
    """Partition in which all images belong to this client; a site knows nothing about other clients' images."""
    sizes = [len(images) if k == client else 0 for k in range(clients)]
    return Partition.consecutive(
        sizes,
        list(map(str, range(clients))),
        recipe.partition,
        recipe.seed,
        images.fingerprint,
        images.classes,
    )
