"""The Flower engine, which gathers sites into a federation and runs its rounds."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch
from flwr.serverapp import Grid

from atoll.core.audit_log import FILE as AUDIT
from atoll.core.audit_log import AuditLog
from atoll.core.errors import UserError
from atoll.core.remedies import missing
from atoll.core.run_folder import SITES, Run, fingerprint_of_sites, is_of_sites
from atoll.data.images import ImageSet, StoredPixels
from atoll.data.partition.partition import Partition
from atoll.data.source_warnings import two_forms
from atoll.data.sources import Splits, load_data
from atoll.engines.callbacks import Callbacks
from atoll.engines.federation import Federation
from atoll.engines.flower.app_options import FlowerOptions
from atoll.engines.flower.enrolment import Site, all_classes
from atoll.engines.flower.executor import FlowerExecutor, RemoteStates, measure_sites
from atoll.engines.flower.ledger import RoundLedger
from atoll.engines.flower.site_registry import SiteRegistry
from atoll.engines.rounds import RunContext, SiteResults, run_rounds
from atoll.engines.server import Server
from atoll.evaluation import mean_over_sites
from atoll.recipe.recipe import Recipe

log = logging.getLogger("flwr")


class FlowerEngine:
    """Runs a recipe on Flower's nodes.

    Args:
        grid: Flower's grid.
        options: The coordinator's options.
        recipe: Text of the complete recipe, which is sent to the sites.
        simulated: The federation whose shares the nodes train, for a simulation in which no client may be lost.
            None to build the federation, and to continue a round without lost clients.
    """

    def __init__(
        self, grid: Grid, options: FlowerOptions, recipe: str, simulated: Federation | None = None
    ) -> None:
        self._options = options
        self._simulated = simulated
        keys = Path(options.keys) if options.keys else None
        self._registry = SiteRegistry(grid, recipe, options.sites, keys, options.other_environment)
        self._states = RemoteStates()
        self._executor: FlowerExecutor | None = None

    @property
    def at_sites(self) -> bool:
        """Whether the images are at real sites."""
        return self._options.sites > 0

    def gather(self, recipe: Recipe, folder: Path, restart: bool = False) -> Federation:
        """Wait for the sites, and build the federation from their answers.

        A run is bound to its sites only once a round is complete; before, it keeps only its id.

        Raises:
            UserError: Too few sites connected, the recipe does not fit them, the record of the sites is lost or of
                another number of sites, or another process uses the folder.
        """
        run = Run(folder)
        with run.locked():  # before waiting, and before this process writes into the run's audit log
            pass
        self._registry.audit = AuditLog(folder / AUDIT)
        record = None if restart else run.read_json(SITES)
        if record is None and not restart and self.at_sites and run.started():
            partition = run.read_json(run.partition_path.name)
            if partition is None or is_of_sites(partition):
                raise UserError(missing(folder / SITES))
        if record is not None:
            self._registry.restore(record)
            if not run.started():
                self._registry.clients = []
            before = len(self._registry.clients)
            if before and self.at_sites and before != self._options.sites:
                raise UserError(
                    f"{folder} is a run of {before} sites, and the app says sites = {self._options.sites}; set "
                    f"sites = {before}, or choose another out"
                )
        federation = self._gather(recipe)
        if record is None and not restart:  # before the partition is written: it contains the run's id
            with run.locked():
                if run.read_json(SITES) is not None:  # the id of a run that another process continues
                    raise UserError(
                        f"another process began the run in {folder} while this one waited for the sites; if that "
                        "one has ended, start again"
                    )
                self._write_sites(folder)
        return federation

    def states(self, store: Run) -> RemoteStates:
        """Return the record of the valid client states; the states themselves are at the sites."""
        return self._states

    def run(self, context: RunContext) -> Server:
        """Run all rounds; see `run_rounds`."""
        checkpoints = context.store.checkpoints
        self._write_sites(checkpoints.parent)
        executor = self._executor = FlowerExecutor(
            self._registry,
            self._states,
            checkpoints / "early",
            self._options.deadline,
            context.federation.partition.classes,
            context.federation.max_update_size(),
            complete=self._simulated is not None,
        )
        ledger = RoundLedger(self._registry.record, context.federation.partition.names)
        context = replace(context, callback=Callbacks([ledger, context.callback]))
        try:
            with ledger.failures():
                return run_rounds(context, self._states, lambda: closing(executor))
        finally:
            # With the nodes that were refused and the sites that withdrew in the meantime.
            self._write_sites(checkpoints.parent)

    def measure(self, server: Server, final: bool) -> SiteResults:
        """Collect each real site's results on its local held-out images, and their mean weighted by images."""
        if not self._options.sites or self._executor is None:
            return {}
        self._executor.start(server.constants)
        deployment = server.deploy()
        requests = {
            client: {
                "client": client,
                "round": server.round,  # for the audit logs
                "kept": server.valid.get(client, 0),
                "final": final,
                "model": deployment.model_of(client),
            }
            for client in range(len(self._registry.clients))
        }
        if not deployment.models:  # all models are personal, and there are none before the first round
            requests = {client: request for client, request in requests.items() if request["kept"]}
        evaluation = server.recipe.evaluation
        protocols = evaluation.at_end if final else evaluation.during
        found = measure_sites(self._executor, requests, protocols)
        if not found:
            return {}
        by_site = {self._registry.clients[client].name: numbers for client, (numbers, _) in found.items()}
        numbers, images = zip(*found.values(), strict=True)
        return {"sites": by_site, "sites_mean": mean_over_sites(numbers, images)}

    def _gather(self, recipe: Recipe) -> Federation:
        sites, wait = self._options.sites, self._options.wait
        if not sites:
            federation = self._simulated or Federation(recipe)
            self._registry.gather(federation.setting.num_clients, wait)
            self._check_shares(federation)
            return federation
        # Before waiting for the sites: the folder may be wrong; and if a recipe cannot run, each site refuses it
        # without telling the reason.
        images = self._coordinator_images(recipe)
        self._federation(recipe, images, self._registry.clients or _any_sites(sites, recipe))
        self._registry.gather(sites, wait)
        if twins := two_forms(all_classes(self._registry.clients)):
            log.warning(twins)
        return self._federation(recipe, images, self._registry.clients)

    def _federation(self, recipe: Recipe, images: Splits | None, sites: Sequence[Site]) -> Federation:
        """Federation whose partition numbers the sites' images consecutively; its classes are those of all sites.

        Without images of the coordinator's, its own splits are empty.
        """
        sizes, names = [site.train for site in sites], [site.name for site in sites]
        classes = all_classes(sites)
        fingerprint = fingerprint_of_sites(self._registry.federation)
        partition = Partition.consecutive(sizes, names, recipe.partition, recipe.seed, fingerprint, classes)
        channels, size = recipe.data.channels, recipe.data.image_size
        pixels = StoredPixels(torch.empty(0, channels, size, size, dtype=torch.uint8))
        return Federation(recipe, images or Splits(ImageSet(pixels, classes=classes)), partition)

    def _write_sites(self, folder: Path) -> None:
        Run(folder).write(SITES, self._registry.to_json())

    def _check_shares(self, federation: Federation) -> None:
        count = federation.setting.num_clients
        names = [site.name for site in self._registry.clients]
        if names != [str(k) for k in range(count)]:
            raise UserError(
                f"the recipe's partition has {count} clients and the nodes have the shares {', '.join(names)}; "
                f"start {count} nodes with partition-id 0 to {count - 1}"
            )
        for site, size in zip(self._registry.clients, federation.setting.sizes, strict=True):
            site.train = size

    def _coordinator_images(self, recipe: Recipe) -> Splits | None:
        """Load the coordinator's images; None if there are none."""
        if not self._options.images:
            return None
        data = replace(recipe.data, source=self._options.images_source, path=self._options.images, limit=None)
        return load_data(data, recipe.seed)


def _any_sites(count: int, recipe: Recipe) -> list[Site]:
    """Sites with images for any recipe, in place of those that have not connected yet."""
    images, classes = 2 * recipe.train.batch_size, ["0", "1"] if recipe.data.labels else []
    return [Site(str(k), "", images, images, classes) for k in range(count)]
