"""The default engine: a federation simulated on one machine, round by round, resumable at any of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atoll.components.base import Trained
from atoll.engines.client_states import ClientStates, States
from atoll.engines.executors import InProcess, WorkerPool
from atoll.engines.federation import Federation
from atoll.engines.rounds import Callback, Evaluate, RunStore, run_rounds
from atoll.engines.server import Executor, Server
from atoll.recipe.recipe import Recipe


class Simulation:
    """The default engine: all clients on this machine."""

    def gather(self, recipe: Recipe, folder: Path) -> Federation:
        """Load the images and deal them out."""
        return Federation(recipe)

    def run(
        self,
        federation: Federation,
        store: RunStore,
        callback: Callback | None = None,
        evaluate: Evaluate | None = None,
        prerequisites: Mapping[str, Trained] | None = None,
    ) -> tuple[Server, States]:
        """See `simulate`."""
        return simulate(federation, store, callback, evaluate, prerequisites)

    def measure(self, federation: Federation, server: Server, final: bool) -> dict[str, Any]:
        """Nothing: all images are here."""
        return {}


def simulate(
    federation: Federation,
    store: RunStore,
    callback: Callback | None = None,
    evaluate: Evaluate | None = None,
    prerequisites: Mapping[str, Trained] | None = None,
) -> tuple[Server, ClientStates]:
    """Run all rounds of a recipe on this machine; see `run_rounds`."""
    states = ClientStates(store.checkpoints / "clients")
    server = run_rounds(
        federation,
        store,
        states,
        lambda server: _executor(federation, states),
        callback,
        evaluate,
        prerequisites,
    )
    return server, states


def _executor(federation: Federation, states: ClientStates) -> Executor:
    cohort = federation.recipe.train.cohort_size(federation.setting.num_clients)
    workers = federation.recipe.engine.count_workers(cohort)
    if workers == 1:
        return InProcess(federation, states)
    return WorkerPool(federation.recipe, states.folder, workers)
