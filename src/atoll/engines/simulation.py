"""The default engine: a federation simulated on one machine, round by round, resumable at any of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from atoll.engines.client_states import ClientStates, States
from atoll.engines.executors import InProcess, WorkerPool
from atoll.engines.federation import Federation, Plan
from atoll.engines.server import Executor, Record, Server
from atoll.errors import UserError
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

    def played(self) -> int:
        """The newest round that was complete, whether it can still be read or not."""
        ...

    def rewind(self, round: int) -> int:
        """Forget metrics beyond a round; the newest round that is left, −1 if none is."""
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


Evaluate = Callable[[Federation, Server, States], dict[str, Any]]


class Engine(Protocol):
    """Who finds the clients of a run and plays its rounds with them."""

    def gather(self, plan: Plan, folder: Path) -> Federation:
        """The federation of a plan; ``folder`` is the run's, and may hold what an interrupted run knew."""
        ...

    def play(
        self,
        federation: Federation,
        journal: Journal,
        watcher: Watcher | None = None,
        evaluate: Evaluate | None = None,
        prerequisites: Mapping[str, Trained] | None = None,
    ) -> tuple[Server, States]:
        """All rounds; see `play_rounds`."""
        ...

    def measure(self, federation: Federation, server: Server, final: bool) -> dict[str, Any]:
        """What clients measure on their own images, where the engine asks them."""
        ...


class Simulation:
    """The default engine: all clients on this machine."""

    def gather(self, plan: Plan, folder: Path) -> Federation:
        """Load the images and deal them out."""
        return Federation(plan)

    def play(
        self,
        federation: Federation,
        journal: Journal,
        watcher: Watcher | None = None,
        evaluate: Evaluate | None = None,
        prerequisites: Mapping[str, Trained] | None = None,
    ) -> tuple[Server, States]:
        """See `simulate`."""
        return simulate(federation, journal, watcher, evaluate, prerequisites)

    def measure(self, federation: Federation, server: Server, final: bool) -> dict[str, Any]:
        """Nothing: all images are here."""
        return {}


def simulate(
    federation: Federation,
    journal: Journal,
    watcher: Watcher | None = None,
    evaluate: Evaluate | None = None,
    prerequisites: Mapping[str, Trained] | None = None,
) -> tuple[Server, ClientStates]:
    """Play all rounds of a plan on this machine; see `play_rounds`."""
    states = ClientStates(journal.checkpoints / "clients")
    server = play_rounds(
        federation,
        journal,
        states,
        lambda server: _executor(federation, states),
        watcher,
        evaluate,
        prerequisites,
    )
    return server, states


def play_rounds(
    federation: Federation,
    journal: Journal,
    states: States,
    make_executor: Callable[[Server], Executor],
    watcher: Watcher | None = None,
    evaluate: Evaluate | None = None,
    prerequisites: Mapping[str, Trained] | None = None,
) -> Server:
    """Play all rounds of a plan, from the journal's newest complete one on, wherever the clients are.

    A round is kept before anyone sees what came of it, an evaluation at the clients' included: played again, it
    might come out otherwise (a private one has other noise, and spends again). Its line of metrics is kept with it,
    and is completed on resumption where a kill came in between.

    Args:
        federation: images, clients and networks.
        journal: checkpoints and metrics.
        states: what clients keep.
        make_executor: called once there is a round to play.
        watcher: is told of progress.
        evaluate: called before round 1 and after each round that ``evaluation.every`` names.
        prerequisites: what came of the runs that the method needs first.

    Returns:
        The server after the last round.

    Raises:
        TooFewUpdatesError: a round got too few usable updates.
        UserError: a round that spent privacy would have to be played again.
    """
    plan = federation.plan
    server = Server(
        plan, federation.setting, federation.initial_weights(), prerequisites, journal.checkpoints / "scratch"
    )
    server.door.names = frozenset(federation.update_names())
    server.door.buffers = frozenset(federation.buffer_names())
    latest = journal.latest()
    spends = plan.method.aggregation.spent(federation.setting, 1)
    if spends and journal.played() > (latest["round"] if latest else 0):
        raise UserError(
            f"the newest round in {journal.checkpoints} cannot be read, and a private round that is played again "
            "spends privacy that ε would not count; put the folder back from a copy, or begin another run"
        )
    if latest is None:
        states.clear()
    else:
        server.restore(latest)
    logged = journal.rewind(-1 if latest is None else server.round)
    every = plan.evaluation.every

    def conclude(line: dict[str, Any]) -> None:
        if evaluate and every and server.round % every == 0:
            line["evaluation"] = evaluate(federation, server, states)
        journal.log(line)

    with threads(plan.engine.threads):
        if watcher:
            watcher.begin(federation, server)
        if latest is None:
            if evaluate:
                start = {"start": federation.warmed} if federation.warmed else {}
                journal.log({"round": 0, **start, "evaluation": evaluate(federation, server, states)})
            journal.checkpoint(0, server.checkpoint())
        elif logged < server.round and "line" in latest:
            conclude(latest["line"])
        if server.round >= plan.train.rounds:
            return server
        with closing(make_executor(server)) as executor:
            executor.start(server.constants)
            valid = dict(server.valid)
            while server.round < plan.train.rounds:
                record = server.play(executor, watcher.step if watcher else None)
                line = record.to_dict()
                if server.round % plan.engine.checkpoint_every == 0 or server.round == plan.train.rounds:
                    journal.checkpoint(server.round, {**server.checkpoint(), "line": line})
                    states.prune(valid)
                    valid = dict(server.valid)
                conclude(line)
                if watcher:
                    watcher.round(record, line)
    return server


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
    cohort = federation.plan.train.cohort_size(federation.setting.num_clients)
    workers = federation.plan.engine.count_workers(cohort)
    if workers == 1:
        return InProcess(federation, states)
    return WorkerPool(federation.plan, states.folder, workers)
