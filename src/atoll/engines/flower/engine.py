"""The Flower engine: gathers sites into a federation and plays its rounds with them."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from flwr.serverapp import Grid

from atoll.core.errors import UserError
from atoll.core.files import write_whole
from atoll.core.tree import Tree
from atoll.data.images import ImageSet, StoredPixels
from atoll.data.partition.partition import Partition
from atoll.data.sources import Splits, load_data
from atoll.engines.federation import Federation
from atoll.engines.flower.executor import FlowerExecutor, RemoteStates, measure_sites
from atoll.engines.flower.site_registry import SiteRegistry
from atoll.engines.rounds import RunContext, RunStore, SiteResults, run_rounds
from atoll.engines.server import Server
from atoll.evaluation import mean_over_sites
from atoll.recipe.recipe import Recipe

SITES = "sites.json"  # in the run's folder
PARTITION = "partition.json"  # there, once the run has begun
log = logging.getLogger("flwr")


@dataclass(frozen=True)
class FlowerOptions:
    """What a coordinator decides beside the recipe: the keys of a Flower app's configuration.

    Attributes:
        recipe: a preset's name, or a file in the app's folder.
        set: settings laid over it, as ``key=value key=value``.
        out: the run's folder; empty: ``runs/NAME-seedN``, under ``$ATOLL_RUNS`` if that is set.
        sites: how many real sites take part; 0: nodes train shares of the recipe's own images.
        images: the coordinator's own images, to evaluate on; empty: none.
        images_source: how they lie there (see the recipe's ``data.source``).
        wait: seconds that sites have to appear.
        deadline: seconds that a round may take.
    """

    recipe: str = "recipe.toml"
    set: str = ""
    out: str = ""
    sites: int = 0
    images: str = ""
    images_source: str = "folder"
    wait: float = 600.0
    deadline: float = 3600.0

    @classmethod
    def read(cls, config: Mapping[str, object]) -> FlowerOptions:
        """From Flower's run configuration; its keys are written with dashes.

        Raises:
            UserError: an unknown key, or a value of the wrong kind.
        """
        given: dict[str, Tree] = {key.replace("-", "_"): value for key, value in config.items()}
        defaults = cls()
        for key, value in given.items():
            if not hasattr(defaults, key):
                raise UserError(f"the Flower app's configuration has an unknown key {key!r}")
            kind = type(getattr(defaults, key))
            if isinstance(value, bool) or not isinstance(value, kind | int if kind is float else kind):
                raise UserError(
                    f"the Flower app's configuration has {key} = {value!r}; it must be a {kind.__name__}"
                )
        options = cls(**given)
        if options.sites < 0 or options.wait <= 0 or options.deadline <= 0:
            raise UserError(
                "the Flower app's 'sites' cannot be negative, and 'wait' and 'deadline' must be above 0"
            )
        return options


class FlowerEngine:
    """Plays a run on Flower's nodes.

    Args:
        grid: Flower's.
        options: the coordinator's.
        recipe: the complete recipe's text, which sites are sent.
    """

    def __init__(self, grid: Grid, options: FlowerOptions, recipe: str) -> None:
        self._options = options
        self._registry = SiteRegistry(grid, recipe, options.sites)
        self._states = RemoteStates()
        self._executor: FlowerExecutor | None = None

    def gather(self, recipe: Recipe, folder: Path) -> Federation:
        """Wait for the sites, and make a federation of what they say.

        Raises:
            UserError: too few sites, or the recipe does not fit them.
        """
        begun = (folder / PARTITION).is_file()
        if begun and (folder / SITES).is_file():
            self._registry.restore(json.loads((folder / SITES).read_text()))
        federation = self._gather(recipe)
        if not begun:  # before the partition is written, which names the run
            self._write_sites(folder)
        return federation

    def states(self, store: RunStore) -> RemoteStates:
        """At the sites; here only which of them are valid."""
        return self._states

    def run(self, context: RunContext) -> Server:
        """All rounds; see `run_rounds`."""
        checkpoints = context.store.checkpoints
        self._write_sites(checkpoints.parent)
        executor = self._executor = FlowerExecutor(
            self._registry,
            self._states,
            checkpoints / "early",
            self._options.deadline,
            context.federation.partition.classes,
            context.federation.max_update_bytes(),
        )
        server = run_rounds(context, self._states, lambda: executor)
        self._write_sites(checkpoints.parent)  # with who was turned away meanwhile
        return server

    def measure(self, server: Server, final: bool) -> SiteResults:
        """Each real site's numbers on its own held-out images, and their mean weighted by images."""
        if not self._options.sites or self._executor is None:
            return {}
        self._executor.start(server.constants)
        deployment = server.deploy()
        first = next(iter(deployment.models), None)
        requests = {
            client: {
                "client": client,
                "kept": server.valid.get(client, 0),
                "final": final,
                "model": deployment.models[deployment.choice.get(client, first)] if first is not None else {},
            }
            for client in range(len(self._registry.clients))
        }
        if first is None:  # there are only the clients' own models, and none before the first round
            requests = {client: request for client, request in requests.items() if request["kept"]}
        found = measure_sites(self._executor, requests)
        if not found:
            return {}
        by_site = {self._registry.clients[client].name: numbers for client, (numbers, _) in found.items()}
        numbers, images = zip(*found.values(), strict=True)
        return {"sites": by_site, "sites_mean": mean_over_sites(numbers, images)}

    def _gather(self, recipe: Recipe) -> Federation:
        sites, wait = self._options.sites, self._options.wait
        if not sites:
            federation = Federation(recipe)
            self._registry.gather(federation.setting.num_clients, wait)
            self._check_shares(federation)
            return federation
        retained = self._own_images(recipe)  # before anybody is waited for: the folder may be wrong
        self._registry.gather(sites, wait)
        return Federation(recipe, retained or self._no_images(recipe), _partition_of(self._registry, recipe))

    def _write_sites(self, folder: Path) -> None:
        write_whole(folder / SITES, self._registry.to_json().encode())

    def _check_shares(self, federation: Federation) -> None:
        count = federation.setting.num_clients
        names = [site.name for site in self._registry.clients]
        if names != [str(k) for k in range(count)]:
            raise UserError(
                f"the recipe's partition has {count} clients and the nodes hold the shares {', '.join(names)}; "
                f"start {count} nodes with partition-id 0 to {count - 1}"
            )
        for site, size in zip(self._registry.clients, federation.setting.sizes, strict=True):
            site.train = size

    def _own_images(self, recipe: Recipe) -> Splits | None:
        """The coordinator's images, if it has some."""
        if not self._options.images:
            return None
        data = replace(recipe.data, source=self._options.images_source, path=self._options.images, limit=None)
        return load_data(data, recipe.seed)

    def _no_images(self, recipe: Recipe) -> Splits:
        """Empty sets that know the sites' classes."""
        channels, size = recipe.data.channels, recipe.data.image_size
        pixels = StoredPixels(torch.empty(0, channels, size, size, dtype=torch.uint8))
        return Splits(ImageSet(pixels, classes=self._registry.classes()))


def _partition_of(registry: SiteRegistry, recipe: Recipe) -> Partition:
    """The sites' images in a row: who holds how many, of classes that all sites' names make up."""
    sizes = [site.train for site in registry.clients]
    names = [site.name for site in registry.clients]
    rows = list(torch.split(torch.arange(sum(sizes)), sizes))
    return Partition(
        rows, names, None, None, recipe.partition, recipe.seed, sum(sizes), f"sites-{registry.federation}",
        tuple(registry.classes()),
    )  # fmt: skip
