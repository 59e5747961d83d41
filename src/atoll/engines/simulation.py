"""Simulation, the default engine: runs a federation on one machine and can resume after any round."""

from __future__ import annotations

from pathlib import Path

from atoll.engines.client_states import ClientStates
from atoll.engines.executors import InProcess, WorkerPool
from atoll.engines.federation import Federation
from atoll.engines.jobs import Executor
from atoll.engines.rounds import RunContext, RunStore, SiteResults, run_rounds
from atoll.engines.server import Server
from atoll.recipe.recipe import Recipe


class Simulation:
    """The default engine, which trains all clients on this machine."""

    def gather(self, recipe: Recipe, folder: Path) -> Federation:
        """Load the images and partition them."""
        return Federation(recipe)

    def states(self, store: RunStore) -> ClientStates:
        """Client states in the run's folder."""
        return ClientStates(store.checkpoints / "clients", resettable=True)

    def run(self, context: RunContext) -> Server:
        """Run all rounds; see `run_rounds`."""
        states = self.states(context.store)
        return run_rounds(context, states, lambda: _executor(context.federation, states), overlap=True)

    def measure(self, server: Server, final: bool) -> SiteResults:
        """Return nothing, because all images are on this machine."""
        return {}


def _executor(federation: Federation, states: ClientStates) -> Executor:
    cohort = federation.recipe.train.cohort_size(federation.setting.num_clients)
    devices = federation.recipe.engine.worker_devices(cohort)
    if len(devices) == 1:
        return InProcess(federation, states)
    return WorkerPool(federation.recipe, states.folder, devices)
