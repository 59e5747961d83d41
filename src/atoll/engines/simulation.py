"""Simulation, the default engine: runs a federation on one machine and can resume after any round."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from atoll.core.config import describe
from atoll.core.processes import process_context
from atoll.core.run_folder import Run
from atoll.engines.client_states import ClientStates
from atoll.engines.executors import in_this_process
from atoll.engines.federation import Federation
from atoll.engines.interleaved import Interleaved
from atoll.engines.job_times import JobTimes
from atoll.engines.jobs import Executor
from atoll.engines.rounds import RunContext, SiteResults, run_rounds
from atoll.engines.server import Server
from atoll.engines.stacked import Stacked
from atoll.engines.worker_devices import worker_devices
from atoll.engines.worker_pool import WorkerPool
from atoll.recipe.recipe import Recipe
from atoll.recipe.table import further_imports


class Simulation:
    """The default engine, which trains all clients on this machine.

    One engine may run several recipes, one after another; `keep` then retains its worker processes between runs.
    """

    at_sites = False

    def __init__(self) -> None:
        self._keeps = False
        self._pool: WorkerPool | None = None
        self._paces: dict[int, float] = {}

    @contextlib.contextmanager
    def keep(self) -> Iterator[Simulation]:
        """Retain the worker processes from one run to the next, within the context."""
        self._keeps = True
        try:
            yield self
        finally:
            self._keeps = False
            self._close()

    def gather(self, recipe: Recipe, folder: Path, restart: bool = False) -> Federation:
        """Load the images and partition them."""
        if len(recipe.engine.worker_devices(cohort=2)) > 1 or recipe.engine.decoders:
            # The processes' imports take as long as loading the images.
            process_context(*further_imports(describe(recipe)))
        return Federation(recipe)

    def states(self, store: Run) -> ClientStates:
        """Client states in the run's folder."""
        return ClientStates(store.checkpoints / "clients", resettable=True, synced=False)

    def run(self, context: RunContext) -> Server:
        """Run all rounds; see `run_rounds`."""
        states = self.states(context.store)
        return run_rounds(context, states, lambda: self._executor(context.federation, states), overlap=True)

    def measure(self, server: Server, final: bool) -> SiteResults:
        """Return nothing, because all images are on this machine."""
        return {}

    @contextlib.contextmanager
    def _executor(self, federation: Federation, states: ClientStates) -> Iterator[Executor]:
        recipe, setting = federation.recipe, federation.setting
        devices = worker_devices(federation)
        if recipe.engine.stack > 1:
            yield Stacked(federation, states)
            return
        if recipe.engine.streams > 1:
            yield Interleaved(federation, states)
            return
        if len(devices) == 1:
            yield in_this_process(federation, states)
            return
        try:
            if self._pool is None or self._pool.devices != devices:
                self._close()
                self._pool = WorkerPool(devices)
            self._pool.assign(recipe, states.folder, JobTimes(setting.sizes, self._paces))
            yield self._pool
        except BaseException:
            self._close()  # its workers may still train a job of this run
            raise
        if not self._keeps:
            self._close()

    def _close(self) -> None:
        if self._pool:
            self._pool.close()
        self._pool = None
