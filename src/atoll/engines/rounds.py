"""Rounds of a run, with any engine."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol, TypedDict

from atoll.components.base import Trained
from atoll.components.messages import Checkpoint
from atoll.core.errors import UserError
from atoll.core.kept_models import keep_model
from atoll.core.tree import Tree
from atoll.engines.background import Background
from atoll.engines.callbacks import Callback
from atoll.engines.client_states import States
from atoll.engines.federation import Federation
from atoll.engines.jobs import Executor
from atoll.engines.observer import Observer
from atoll.engines.server import Server
from atoll.recipe.recipe import Recipe

__all__ = ["Callback", "Engine", "Evaluator", "RunContext", "RunStore", "SiteResults", "run_rounds"]


class RunStore(Protocol):
    """Persistent storage of a run (see `atoll.core.run_folder.Run`)."""

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints, the client states, and the disk buffer."""
        ...

    def latest(self) -> Checkpoint | None:
        """Load the checkpoint of the newest complete round."""
        ...

    def checkpoint(self, round: int, tree: Checkpoint) -> None:
        """Save the state after a complete round."""
        ...

    def log(self, line: dict[str, object]) -> None:
        """Append a line to the metrics."""
        ...

    def completed_rounds(self) -> int:
        """Number of the newest complete round, even if its checkpoint cannot be read."""
        ...

    @property
    def metrics(self) -> list[dict[str, object]]:
        """Read all lines of the metrics."""
        ...

    def rewind(self, round: int) -> int:
        """Delete the metrics after a round; return the newest remaining round, −1 if there is none."""
        ...


class SiteResults(TypedDict, total=False):
    """Results that clients measured on their local images.

    Attributes:
        sites: Results of each site, by its name.
        sites_mean: Mean of the results, weighted by the number of images.
    """

    sites: dict[str, dict[str, float]]
    sites_mean: dict[str, float]


class Evaluator(Protocol):
    """Evaluates the models of a run (see `atoll.commands.evaluate.Evaluator`)."""

    def during(self, server: Server) -> dict[str, object]:
        """Evaluate under the fast protocols, between two rounds."""
        ...

    def final(self, server: Server) -> dict[str, object]:
        """Evaluate the untrained or the finished models under all protocols."""
        ...


@dataclass(frozen=True)
class RunContext:
    """Input of an engine that runs a recipe.

    Attributes:
        federation: Images, clients and networks.
        store: Storage of the checkpoints and the metrics.
        evaluator: Called before round 1 and every ``evaluation.every`` rounds; None for no evaluation.
        prerequisites: Results of the prerequisite runs, by name.
        callback: Receives the progress.
        reset_clients: Clients whose state is dropped; they continue as if they had not taken part yet.
    """

    federation: Federation
    store: RunStore
    evaluator: Evaluator | None = None
    prerequisites: Mapping[str, Trained] = field(default_factory=dict)
    callback: Callback | None = None
    reset_clients: Sequence[int] = ()


class Engine(Protocol):
    """Gathers the clients of a run and runs its rounds."""

    def gather(self, recipe: Recipe, folder: Path) -> Federation:
        """Build the federation of a recipe; ``folder`` is the run's, and may contain an interrupted run."""
        ...

    def states(self, store: RunStore) -> States:
        """Storage of the client states."""
        ...

    def run(self, context: RunContext) -> Server:
        """Run all rounds; see `run_rounds`."""
        ...

    def measure(self, server: Server, final: bool) -> SiteResults:
        """Collect the results that clients measure on their local images, if the engine supports it."""
        ...


def run_rounds(
    context: RunContext,
    states: States,
    open_executor: Callable[[], AbstractContextManager[Executor]],
    overlap: bool = False,
) -> Server:
    """Run all rounds of a recipe, starting after the newest complete round in the store.

    A round is saved before its result is used, also before an evaluation at the clients: a repeated round may
    give another result (a private round draws other noise, and spends privacy again). Its line of metrics is saved
    in the same checkpoint; if the process is killed before the line is logged, the resumed run logs it.

    Args:
        context: The federation, the storage and the callbacks of the run.
        states: The client states.
        open_executor: Opens the executor; called only if there is a round to run.
        overlap: Whether a round may be saved while the next one trains. A process that is killed meanwhile repeats
            both rounds; this needs clients that do not see the difference.

    Returns:
        The server after the last round.

    Raises:
        TooFewUpdatesError: A round received too few usable updates.
        UserError: A round that spent privacy would be repeated.
    """
    federation, store = context.federation, context.store
    evaluator, callback = context.evaluator, context.callback
    recipe = federation.recipe
    observer = Observer(federation, partial(keep_model, store.checkpoints.parent))
    start, scratch = federation.initial_weights(), store.checkpoints / "scratch"
    server = Server(recipe, federation.setting, start, context.prerequisites, scratch, observer)
    spends = bool(recipe.composed.aggregation.spent(federation.setting, 1))
    latest = _resume(context, states, server, spends)
    logged = store.rewind(-1 if latest is None else server.round)
    every, patience = recipe.evaluation.every, recipe.evaluation.patience

    def ended() -> bool:
        return server.round >= recipe.train.rounds or (
            patience is not None and stalled(store.metrics, patience)
        )

    def kept() -> bool:
        """Whether the round is saved; the run ends after no other."""
        last = server.round == recipe.train.rounds or (patience is not None and server.round % every == 0)
        return last or server.round % recipe.engine.checkpoint_every == 0

    def conclude(line: dict[str, object]) -> None:
        if evaluator and every and server.round % every == 0:
            line["evaluation"] = evaluator.during(server)
        store.log(line)

    if callback:
        callback.begin(federation, server)
    if latest is None:
        if evaluator:
            warm = {"start": federation.warm_start} if federation.warm_start else {}
            store.log({"round": 0, **warm, "evaluation": evaluator.final(server)})
        observer.start(server.state)
        store.checkpoint(0, server.checkpoint())
    elif logged < server.round and "line" in latest:
        conclude(latest["line"])
    end = ended()
    if end:
        return server
    with open_executor() as executor, Background() as background:
        executor.start(server.constants)
        valid = dict(server.valid)
        first = server.round + 1
        while not end:
            record = server.run_round(executor, callback.step if callback else None)
            line = record.to_dict()
            if context.reset_clients and server.round == first:
                line["reset"] = list(context.reset_clients)
            save: Callable[[], None] | None = None
            if kept():
                checkpoint: Checkpoint = {**server.checkpoint(), "line": line}
                save = partial(_save, store, states, checkpoint, valid)
                valid = dict(server.valid)
            if overlap and not spends and not (evaluator and every and server.round % every == 0):
                background.run(partial(_save_and_log, save, store, line))
                end = server.round >= recipe.train.rounds
            else:
                background.wait()
                if save:
                    save()
                conclude(line)
                end = ended()
            if callback:
                callback.round(record, line)
    return server


def _resume(context: RunContext, states: States, server: Server, spends: bool) -> Checkpoint | None:
    """Restore the server from the newest readable checkpoint and return it; None if there is none.

    Args:
        context: Its `reset_clients` lose their state.
        states: The client states, which are deleted if the run starts from round 1.
        server: The server, as initialised.
        spends: Whether a round spends privacy.

    Raises:
        UserError: A round that spent privacy would be repeated.
    """
    store = context.store
    latest, newest = store.latest(), store.completed_rounds()
    round = latest["round"] if latest else 0
    if spends and round < newest:
        raise UserError(
            f"the newest round in {store.checkpoints} cannot be read, and repeating a private round spends "
            "privacy that ε would not count; restore the folder from a copy, or start another run"
        )
    if latest is None:
        states.clear()
        return None
    if round < newest:
        warnings.warn(
            f"{store.checkpoints / f'round-{newest:06d}.safetensors'} is damaged; the run continues from round "
            f"{round} instead of round {newest}",
            stacklevel=3,
        )
    server.restore(latest)
    for client in context.reset_clients:
        server.valid.pop(client, None)
    return latest


def _save(store: RunStore, states: States, checkpoint: Checkpoint, valid: Mapping[int, int]) -> None:
    """Save a round; the states that only rounds before the previous checkpoint need may then be deleted."""
    store.checkpoint(checkpoint["round"], checkpoint)
    states.prune(valid)


def _save_and_log(save: Callable[[], None] | None, store: RunStore, line: dict[str, object]) -> None:
    if save:
        save()
    store.log(line)


def stalled(metrics: Sequence[Tree], patience: int) -> bool:
    """Whether the last ``patience`` evaluations did not raise the highest kNN accuracy; without round 0.

    Example:
        >>> from atoll.engines.rounds import stalled
        >>> lines = [{"round": r, "evaluation": {"knn/accuracy": a}} for r, a in ((1, 0.5), (2, 0.7), (3, 0.6))]
        >>> stalled(lines, patience=1), stalled(lines, patience=2)
        (True, False)
    """
    results = [line.get("evaluation", {}) for line in metrics if line["round"] > 0]
    found = [result["knn/accuracy"] for result in results if "knn/accuracy" in result]
    return len(found) > patience and max(found[-patience:]) <= max(found[:-patience])
