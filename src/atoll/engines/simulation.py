"""The default engine: a federation simulated on one machine, round by round, resumable at any of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from atoll.engines.client_states import ClientStates
from atoll.engines.executors import InProcess, WorkerPool
from atoll.engines.federation import Federation
from atoll.engines.server import Executor, Record, Server
from atoll.parts import Trained
from atoll.tree import Tree


class Journal(Protocol):
    """Where a simulation keeps what it must not lose (see `atoll.runs.Run`)."""

    @property
    def checkpoints(self) -> Path:
        """A folder for client states and what does not fit in memory."""
        ...

    def latest(self) -> Tree | None:
        """The newest complete round."""
        ...

    def checkpoint(self, round: int, tree: Tree) -> None:
        """Keep a complete round."""
        ...

    def log(self, line: dict[str, Any]) -> None:
        """Keep a line of metrics."""
        ...

    def rewind(self, round: int) -> None:
        """Forget metrics beyond a round."""
        ...


class Watcher(Protocol):
    """Who looks on: a progress bar, or nobody."""

    def begin(self, federation: Federation, server: Server) -> None:
        """Before the first round that is played now."""
        ...

    def step(self, images: int) -> None:
        """Some client trained on so many images."""
        ...

    def round(self, record: Record, line: dict[str, Any]) -> None:
        """A round is complete."""
        ...


Evaluate = Callable[[Federation, Server, ClientStates], dict[str, Any]]


def simulate(
    federation: Federation,
    journal: Journal,
    watcher: Watcher | None = None,
    evaluate: Evaluate | None = None,
    prerequisites: Mapping[str, Trained] | None = None,
) -> tuple[Server, ClientStates]:
    """Play all rounds of a plan, from the journal's newest complete one on.

    Args:
        federation: images, clients and networks.
        journal: checkpoints and metrics.
        watcher: is told of progress.
        evaluate: called before round 1 and after each round that ``evaluation.every`` names.
        prerequisites: what came of the runs that the method needs first.

    Returns:
        The server after the last round, and the clients' states.

    Raises:
        TooFewUpdatesError: a round got too few usable updates.
    """
    plan = federation.plan
    states = ClientStates(journal.checkpoints / "clients")
    server = Server(
        plan, federation.setting, federation.initial_weights(), prerequisites, journal.checkpoints / "scratch"
    )
    server.door.names = frozenset(federation.update_names())
    latest = journal.latest()
    if latest is None:
        states.clear()
        journal.rewind(-1)
    else:
        server.restore(latest)
        journal.rewind(server.round)
    every = plan.evaluation.every
    with threads(plan.engine.threads):
        if watcher:
            watcher.begin(federation, server)
        if server.round == 0 and latest is None:
            if evaluate:
                journal.log({"round": 0, "evaluation": evaluate(federation, server, states)})
            journal.checkpoint(0, server.checkpoint())
        if server.round >= plan.train.rounds:
            return server, states
        with closing(_executor(federation, states)) as executor:
            executor.start(server.constants)
            valid = dict(server.valid)
            while server.round < plan.train.rounds:
                record = server.play(executor, watcher.step if watcher else None)
                line = record.to_dict()
                if evaluate and every and server.round % every == 0:
                    line["evaluation"] = evaluate(federation, server, states)
                journal.log(line)
                if server.round % plan.engine.checkpoint_every == 0 or server.round == plan.train.rounds:
                    journal.checkpoint(server.round, server.checkpoint())
                    states.prune(valid)
                    valid = dict(server.valid)
                if watcher:
                    watcher.round(record, line)
    return server, states


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Compute with so many CPU threads, and give back what the caller had."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _executor(federation: Federation, states: ClientStates) -> Executor:
    cohort = max(1, int(federation.plan.train.participation * federation.setting.num_clients + 0.5))
    workers = federation.plan.engine.count_workers(cohort)
    if workers == 1:
        return InProcess(federation, states)
    return WorkerPool(federation.plan, states.folder, workers)
