"""The rounds of a run, wherever its clients are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypedDict

from atoll.components.base import Trained
from atoll.components.messages import Checkpoint
from atoll.core.errors import UserError
from atoll.engines.client_states import States
from atoll.engines.federation import Federation
from atoll.engines.server import Executor, Record, Server
from atoll.recipe.recipe import Recipe


class RunStore(Protocol):
    """Where a run keeps what it must not lose (see `atoll.core.run_folder.Run`)."""

    @property
    def checkpoints(self) -> Path:
        """A folder for client states and what does not fit in memory."""
        ...

    def latest(self) -> Checkpoint | None:
        """The newest complete round."""
        ...

    def checkpoint(self, round: int, tree: Checkpoint) -> None:
        """Keep a complete round."""
        ...

    def log(self, line: dict[str, object]) -> None:
        """Keep a line of metrics."""
        ...

    def completed_rounds(self) -> int:
        """The newest round that was complete, whether it can still be read or not."""
        ...

    def rewind(self, round: int) -> int:
        """Forget metrics beyond a round; the newest round that is left, −1 if none is."""
        ...


class Callback(Protocol):
    """Is told how a run goes: a progress bar, lines in a log."""

    def begin(self, federation: Federation, server: Server) -> None:
        """Before the first round that runs now."""
        ...

    def step(self, images: int) -> None:
        """Some client trained on so many images."""
        ...

    def round(self, record: Record, line: dict[str, object]) -> None:
        """A round is complete."""
        ...


class SiteResults(TypedDict, total=False):
    """What clients measured on their own images.

    Attributes:
        sites: the numbers of each, by the site's name.
        sites_mean: their mean, weighted by images.
    """

    sites: dict[str, dict[str, float]]
    sites_mean: dict[str, float]


class Evaluator(Protocol):
    """Measures the models of a run (see `atoll.commands.evaluate.Evaluator`)."""

    def during(self, server: Server) -> dict[str, object]:
        """Numbers by the cheap protocols, between two rounds."""
        ...

    def final(self, server: Server) -> dict[str, object]:
        """Numbers by every protocol: of the untrained models and of the finished ones."""
        ...


@dataclass(frozen=True)
class RunContext:
    """What an engine needs to run a recipe.

    Attributes:
        federation: images, clients and networks.
        store: checkpoints and metrics.
        evaluator: called before round 1 and after each round that ``evaluation.every`` names; None: nothing is
            measured.
        prerequisites: what came of the runs that the method needs first.
        callback: is told of progress.
    """

    federation: Federation
    store: RunStore
    evaluator: Evaluator | None = None
    prerequisites: Mapping[str, Trained] = field(default_factory=dict)
    callback: Callback | None = None


class Engine(Protocol):
    """Finds the clients of a run and runs its rounds with them."""

    def gather(self, recipe: Recipe, folder: Path) -> Federation:
        """The federation of a recipe; ``folder`` is the run's, and may hold what an interrupted run knew."""
        ...

    def states(self, store: RunStore) -> States:
        """Where clients' states are kept."""
        ...

    def run(self, context: RunContext) -> Server:
        """All rounds; see `run_rounds`."""
        ...

    def measure(self, server: Server, final: bool) -> SiteResults:
        """What clients measure on their own images, where the engine asks them."""
        ...


def run_rounds(context: RunContext, states: States, make_executor: Callable[[], Executor]) -> Server:
    """Run all rounds of a recipe, from the store's newest complete one on, wherever the clients are.

    A round is kept before anyone sees what came of it, an evaluation at the clients' included: run again, it
    might come out otherwise (a private one has other noise, and spends again). Its line of metrics is kept with it,
    and is completed on resumption where a kill came in between.

    Args:
        context: of the run.
        states: what clients keep.
        make_executor: called once there is a round to run.

    Returns:
        The server after the last round.

    Raises:
        TooFewUpdatesError: a round got too few usable updates.
        UserError: a round that spent privacy would have to be run again.
    """
    federation, store = context.federation, context.store
    evaluator, callback = context.evaluator, context.callback
    recipe = federation.recipe
    server = Server(
        recipe,
        federation.setting,
        federation.initial_weights(),
        context.prerequisites,
        store.checkpoints / "scratch",
    )
    latest = store.latest()
    spends = recipe.composed.aggregation.spent(federation.setting, 1)
    if spends and store.completed_rounds() > (latest["round"] if latest else 0):
        raise UserError(
            f"the newest round in {store.checkpoints} cannot be read, and a private round that is run again "
            "spends privacy that ε would not count; put the folder back from a copy, or begin another run"
        )
    if latest is None:
        states.clear()
    else:
        server.restore(latest)
    logged = store.rewind(-1 if latest is None else server.round)
    every = recipe.evaluation.every

    def conclude(line: dict[str, object]) -> None:
        if evaluator and every and server.round % every == 0:
            line["evaluation"] = evaluator.during(server)
        store.log(line)

    if callback:
        callback.begin(federation, server)
    if latest is None:
        if evaluator:
            start = {"start": federation.warm_start} if federation.warm_start else {}
            store.log({"round": 0, **start, "evaluation": evaluator.final(server)})
        store.checkpoint(0, server.checkpoint())
    elif logged < server.round and "line" in latest:
        conclude(latest["line"])
    if server.round >= recipe.train.rounds:
        return server
    with closing(make_executor()) as executor:
        executor.start(server.constants)
        valid = dict(server.valid)
        while server.round < recipe.train.rounds:
            record = server.run_round(executor, callback.step if callback else None)
            line = record.to_dict()
            if server.round % recipe.engine.checkpoint_every == 0 or server.round == recipe.train.rounds:
                store.checkpoint(server.round, {**server.checkpoint(), "line": line})
                states.prune(valid)
                valid = dict(server.valid)
            conclude(line)
            if callback:
                callback.round(record, line)
    return server
