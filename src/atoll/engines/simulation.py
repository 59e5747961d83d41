"""The default engine: a federation simulated on one machine, round by round, resumable at any of them."""

from __future__ import annotations

from pathlib import Path

from atoll.engines.client_states import ClientStates
from atoll.engines.executors import InProcess, WorkerPool
from atoll.engines.federation import Federation
from atoll.engines.rounds import RunContext, RunStore, SiteResults, run_rounds
from atoll.engines.server import Executor, Server
from atoll.recipe.recipe import Recipe


class Simulation:
    """The default engine: all clients on this machine."""

    def gather(self, recipe: Recipe, folder: Path) -> Federation:
        """Load the images and partition them."""
        return Federation(recipe)

    def states(self, store: RunStore) -> ClientStates:
        """In the run's folder."""
        return ClientStates(store.checkpoints / "clients")

    def run(self, context: RunContext) -> Server:
        """All rounds; see `run_rounds`."""
        states = self.states(context.store)
        return run_rounds(context, states, lambda: _executor(context.federation, states))

    def measure(self, server: Server, final: bool) -> SiteResults:
        """Nothing: all images are here."""
        return {}


def _executor(federation: Federation, states: ClientStates) -> Executor:
    cohort = federation.recipe.train.cohort_size(federation.setting.num_clients)
    workers = federation.recipe.engine.count_workers(cohort)
    if workers == 1:
        return InProcess(federation, states)
    return WorkerPool(federation.recipe, states.folder, workers)
