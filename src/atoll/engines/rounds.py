"""Rounds of a run, with any engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol, TypedDict

from atoll.components.base import Trained
from atoll.components.messages import Checkpoint
from atoll.core.checkpoints import checkpoint_file
from atoll.core.errors import UserError, warn
from atoll.core.kept_models import keep_model
from atoll.core.process_state import seeded_streams
from atoll.core.run_folder import Run
from atoll.core.tree import Tree
from atoll.engines.background import Background
from atoll.engines.callbacks import Callback
from atoll.engines.client_states import States
from atoll.engines.federation import Federation
from atoll.engines.jobs import Executor
from atoll.engines.observer import Observer
from atoll.engines.server import Server
from atoll.evaluation.suite import obstacle
from atoll.recipe.recipe import Recipe


class SiteResults(TypedDict, total=False):
    """Results that clients measured on their local images.

    Attributes:
        sites: Results of each site, by its name.
        sites_mean: Mean of the results, weighted by the number of images.
    """

    sites: dict[str, dict[str, float]]
    sites_mean: dict[str, float]


class Evaluator(Protocol):
    """Evaluates the models of a run (see `atoll.commands.evaluator.Evaluator`)."""

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
        store: The run's folder, with the checkpoints and the metrics.
        evaluator: Called before round 1 and every ``evaluation.every`` rounds; None for no evaluation.
        prerequisites: Results of the prerequisite runs, by name.
        callback: Object that follows the run.
        reset_clients: Clients whose state is dropped; they continue as if they had not taken part yet.
    """

    federation: Federation
    store: Run
    evaluator: Evaluator | None = None
    prerequisites: Mapping[str, Trained] = field(default_factory=dict)
    callback: Callback = field(default_factory=Callback)
    reset_clients: Sequence[int] = ()


class Engine(Protocol):
    """Gathers the clients of a run and runs its rounds."""

    @property
    def at_sites(self) -> bool:
        """Whether the images are at real sites, so that no other engine can continue the run."""
        ...

    def gather(self, recipe: Recipe, folder: Path, restart: bool = False) -> Federation:
        """Build the federation of a recipe.

        Args:
            recipe: The recipe.
            folder: The run's folder, which may contain an interrupted run.
            restart: Whether that run will be deleted, so that nothing of it is used.
        """
        ...

    def states(self, store: Run) -> States:
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

    A round is saved before its result is used, also before clients evaluate it, because a repeated round may give
    another result (a private round draws new noise and spends privacy again). The round's line of metrics is saved
    in the same checkpoint. If the process is killed before it logs the line, the resumed run logs it.

    Args:
        context: The federation, the storage and the callbacks of the run.
        states: The client states.
        open_executor: Opens the executor; called only if there is a round to run.
        overlap: Whether a round may be saved while the next one trains. If the process is killed in that time, it
            repeats both rounds, so clients must not notice the difference.

    Returns:
        The server after the last round.

    Raises:
        TooFewUpdatesError: A round received too few usable updates.
        UserError: A round that spent privacy would be repeated.
    """
    rounds = _Rounds(context, states)
    rounds.begin()
    if not rounds.ended:
        rounds.check_patience()
        with open_executor() as executor, Background() as background:
            executor.start(rounds.server.constants)
            while not rounds.ended:
                rounds.run(executor, background, overlap)
    return rounds.server


class _Rounds:
    """The rounds of a run, each from training to its line of metrics."""

    def __init__(self, context: RunContext, states: States) -> None:
        federation, folder = context.federation, context.store.checkpoints
        recipe = federation.recipe
        self._context, self._states, self._store = context, states, context.store
        self._train, self._evaluation, self._engine = recipe.train, recipe.evaluation, recipe.engine
        self._observer = Observer(federation, partial(keep_model, folder.parent))
        start, scratch = federation.initial_weights(), folder / "scratch"
        self.server = Server(
            recipe, federation.setting, start, context.prerequisites, scratch, self._observer
        )
        self._spends = bool(recipe.composed.spent(federation.setting, 1))
        self._stateful = recipe.stateful
        self._reset = context.reset_clients  # clients that start the next round without a state
        self._needed: dict[int, int] = {}  # the client states of the newest checkpoint

    @property
    def ended(self) -> bool:
        """Whether no round is left."""
        round, patience = self.server.round, self._evaluation.patience
        return round >= self._train.rounds or (
            patience is not None
            and self._evaluator(round) is not None
            and stalled(self._store.metrics, patience)
        )

    def begin(self) -> None:
        """Continue after the newest complete round; without one, evaluate and save the untrained model.

        Raises:
            UserError: A round that spent privacy would be repeated.
        """
        federation, evaluator = self._context.federation, self._context.evaluator
        latest = self._resume()
        logged = self._store.rewind(-1 if latest is None else self.server.round)
        self._needed = dict(self.server.valid)
        self._context.callback.begin(federation, self.server)
        if latest is None:
            if evaluator:
                warm = {"start": federation.warm_start} if federation.warm_start else {}
                self._store.log({"round": 0, **warm, "evaluation": evaluator.final(self.server)})
            self._observer.keep(0, self.server.state)
            self._store.checkpoint(0, self.server.checkpoint())
            return
        self._observer.keep(self.server.round, self.server.state)
        if logged < self.server.round and "line" in latest:
            self._conclude(self.server.round, latest["line"])

    def check_patience(self) -> None:
        """Warn if early stopping cannot end the run before its last round."""
        patience, rounds = self._evaluation.patience, self._train.rounds
        if patience is None:
            return
        splits = self._context.federation.splits
        images = splits.held_out[1]
        if len(images) and (why := obstacle(splits.train, images)):  # real sites have none here
            warn(f"evaluation.patience has no effect, because {why}")
        elif (first := (patience + 1) * self._evaluation.every) >= rounds:
            warn(
                f"evaluation.patience = {patience} cannot end this run early: it needs {patience + 1} evaluations, "
                f"the last after round {first}, and train.rounds = {rounds}; lower evaluation.patience or "
                "evaluation.every"
            )

    def run(self, executor: Executor, background: Background, overlap: bool) -> None:
        """Train, save and evaluate a round; with ``overlap``, the background saves it if nothing waits for it."""
        callback = self._context.callback
        with seeded_streams(self.server.seed(self.server.round + 1)):
            record = self.server.run_round(executor, callback.step)
        line = deepcopy(record.to_dict())  # the background may save it while the callback changes the record
        if self._reset:
            line["reset"] = list(self._reset)
            self._reset = ()
        save, state = self._snapshot(line), self.server.state

        def complete() -> None:
            save()
            # After the checkpoint, because a repeated private round has another result.
            self._observer.keep(record.round, state)
            self._conclude(record.round, line)

        if overlap and not self._spends and not self._evaluator(record.round):
            background.run(complete)
        else:
            background.wait()
            complete()
        callback.round(record, deepcopy(line))

    def _evaluator(self, round: int) -> Evaluator | None:
        """Return the evaluator of a round; None if the round is not evaluated."""
        every = self._evaluation.every
        return self._context.evaluator if every and round % every == 0 else None

    def _snapshot(self, line: dict[str, object]) -> Callable[[], None]:
        """Copy the content of the round's checkpoint, and return a function that saves it, if the round has one."""
        round, store, states = self.server.round, self._store, self._states
        may_stall = self._evaluation.patience is not None and self._evaluator(round)
        may_be_last = round == self._train.rounds or may_stall
        if not may_be_last and round % self._engine.checkpoint_every:
            return lambda: None
        checkpoint: Checkpoint = {**self.server.checkpoint(), "line": line}
        needed, self._needed = self._needed, dict(self.server.valid)
        new = self._needed.items() - needed.items() if self._stateful else ()

        def save() -> None:
            states.sync(new)
            store.checkpoint(round, checkpoint)
            states.prune(needed)  # other states are needed only by rounds before the previous checkpoint

        return save

    def _conclude(self, round: int, line: dict[str, object]) -> None:
        """Evaluate a complete round, if it is due, and log its line."""
        if evaluator := self._evaluator(round):
            line["evaluation"] = evaluator.during(self.server)
        self._store.log(line)

    def _resume(self) -> Checkpoint | None:
        """Restore the server from the newest readable checkpoint and return it; None if there is none."""
        store = self._store
        latest: Checkpoint | None = store.latest()
        newest = store.completed_rounds()
        round = latest["round"] if latest else 0
        if self._spends and round < newest:
            raise UserError(
                f"the newest round in {store.checkpoints} cannot be read, and repeating a private round spends "
                "privacy that ε would not count; restore the folder from a copy, or start another run"
            )
        if latest is None:
            self._states.clear()
            return None
        if round < newest:
            warn(
                f"{checkpoint_file(store.checkpoints, newest)} is damaged; the run continues from round {round} "
                f"instead of round {newest}"
            )
        self.server.restore(latest)
        for client in self._reset:
            self.server.valid.pop(client, None)
        return latest


def stalled(metrics: Sequence[Tree], patience: int) -> bool:
    """Whether the last ``patience`` evaluations did not raise the highest kNN accuracy.

    Round 0 does not count, and neither do idle rounds, which leave the model unchanged.

    Example:
        >>> from atoll.engines.rounds import stalled
        >>> lines = [{"round": r, "evaluation": {"knn/accuracy": a}} for r, a in ((1, 0.5), (2, 0.7), (3, 0.6))]
        >>> stalled(lines, patience=1), stalled(lines, patience=2)
        (True, False)
    """
    results = [line.get("evaluation", {}) for line in metrics if line["round"] > 0 and not line.get("idle")]
    found = [result["knn/accuracy"] for result in results if "knn/accuracy" in result]
    return len(found) > patience and max(found[-patience:]) <= max(found[:-patience])
