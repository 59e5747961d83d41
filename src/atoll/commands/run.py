"""From a recipe to a finished run: load, simulate, evaluate, save."""

from __future__ import annotations

import json
import multiprocessing
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from atoll.commands.evaluate import Evaluator, held_out, load_networks, model_path, partition_of
from atoll.components.base import Trained
from atoll.core.config import describe, flatten
from atoll.core.errors import UserError
from atoll.core.provenance import version
from atoll.core.run_folder import Run, default_folder
from atoll.core.threads import threads
from atoll.engines.federation import Federation
from atoll.engines.rounds import Callback, Engine, RunContext
from atoll.engines.server import Server
from atoll.engines.simulation import Simulation
from atoll.models import save_encoder
from atoll.recipe.prerequisites import FOLDER, outcome, prerequisite_recipes
from atoll.recipe.recipe import Recipe, load_recipe, make_recipe
from atoll.report.artifacts import save_artifacts

LENGTH = {"train.rounds", "engine.workers", "name", "title"}  # what a resumed recipe may say otherwise


def simulate(
    recipe: Recipe | Mapping[str, Any] | str | Path,
    out: Path | str | None = None,
    resume: bool = False,
    callback: Callback | None = None,
    *,
    watcher: Callback | None = None,
) -> Run:
    """Simulate a federation on this machine: train, evaluate and save its encoder.

    Args:
        recipe: a preset's name, a TOML file, the table that such a file holds, or a recipe as objects.
        out: the run's folder; None: ``runs/NAME-seedN``.
        resume: go on with what the folder holds.
        callback: is told of progress.
        watcher: deprecated name of ``callback``.

    Returns:
        The finished run.

    Raises:
        UserError: a mistake in the recipe, the data or the folder.
        TooFewUpdatesError: a round got too few usable updates.

    Example:
        >>> import tempfile
        >>> import atoll
        >>> small = {
        ...     "base": "digits",
        ...     "data": {"limit": 100},
        ...     "partition": {"kind": "iid", "clients": 2},
        ...     "train": {"rounds": 1, "epochs": 1},
        ...     "engine": {"workers": 1},
        ... }
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     run = atoll.simulate(small, out=f"{folder}/run")
        ...     encoder = atoll.load_encoder(run.encoder_path)
        >>> encoder.dim
        128
    """
    if watcher is not None:
        warnings.warn("watcher is now called callback", DeprecationWarning, stacklevel=2)
    return run_recipe(recipe, out, resume, callback or watcher)


def run_recipe(
    recipe: Recipe | Mapping[str, Any] | str | Path,
    out: Path | str | None = None,
    resume: bool = False,
    callback: Callback | None = None,
    engine: Engine | None = None,
) -> Run:
    """Run a recipe, or go on with one that was interrupted or is to be longer.

    Args:
        recipe: as for `simulate`.
        out: the run's folder; None: ``runs/NAME-seedN``.
        resume: go on with what the folder holds.
        callback: is told of progress.
        engine: runs the rounds; None: the simulation on this machine.

    Returns:
        The finished run.

    Raises:
        UserError: a mistake in the recipe, the data or the folder.
        TooFewUpdatesError: a round got too few usable updates.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # as multiprocessing itself asks
        raise UserError(
            "a worker process imports this script, and the script begins a run again; put what it does under "
            "if __name__ == '__main__':"
        )
    recipe = _as_recipe(recipe)
    run = Run(out or default_folder(recipe.name, recipe.seed))
    check_folder(run, recipe, resume)  # before the images are loaded, which may take long
    if resume and _is_done(run, recipe):
        return run
    prepared = prepare(recipe, run, engine or Simulation())
    _execute(prepared, resume, callback)
    return run


@dataclass(frozen=True)
class PreparedRun:
    """A run whose recipe, images and networks fit together. Nothing of it is written yet.

    Attributes:
        recipe: of the run.
        run: its folder.
        engine: runs the rounds.
        federation: what the engine gathered.
        prerequisites: the runs that the method needs first, by name.
        version: of the code, as it was read before anything ran: the files may change before the run ends.
    """

    recipe: Recipe
    run: Run
    engine: Engine
    federation: Federation
    prerequisites: dict[str, PreparedRun]
    version: str


def prepare(recipe: Recipe, run: Run, engine: Engine) -> PreparedRun:
    """Load the images and build the networks of a run and of its prerequisites: most mistakes show here.

    Raises:
        UserError: a mistake in the recipe or the data.
    """
    code = version()
    prerequisites = {
        name: prepare(other, Run(run.folder / FOLDER / name), Simulation())
        for name, other in prerequisite_recipes(recipe).items()
    }
    return PreparedRun(recipe, run, engine, engine.gather(recipe, run.folder), prerequisites, code)


def _execute(prepared: PreparedRun, resume: bool, callback: Callback | None) -> None:
    """All steps of a run, in their order."""
    recipe, run, engine = prepared.recipe, prepared.run, prepared.engine
    federation = prepared.federation
    with run.locked(), threads(recipe.engine.threads):
        check_folder(run, recipe, resume)  # under the lock: another process may have worked here meanwhile
        _begin(prepared)
        trained = {name: _train_first(other, callback) for name, other in prepared.prerequisites.items()}
        evaluator = Evaluator(federation, engine.states(run), engine)
        server = engine.run(RunContext(federation, run, evaluator, trained, callback))
        _finish(prepared, evaluator, server)


def _as_recipe(recipe: Recipe | Mapping[str, Any] | str | Path) -> Recipe:
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, Mapping):
        return make_recipe(recipe)
    if isinstance(recipe, str | Path):
        return load_recipe(recipe)
    raise UserError(
        f"a recipe is a preset's name, a TOML file, a table or an atoll.Recipe, not a {type(recipe).__name__}; "
        "name your own components in it as module:attribute"
    )


def _begin(prepared: PreparedRun) -> None:
    """Write what comes before the first round: the complete recipe, and which client holds which image."""
    run, partition = prepared.run, prepared.federation.partition
    if not run.begun():
        run.begin_anew()
        for other in prepared.prerequisites.values():
            _drop_another(other.run, other.recipe)
    began = partition_of(run)
    if began and began.fingerprint != partition.fingerprint:
        raise UserError(
            f"{run.folder} was begun with other training images than the recipe's data give now; put them back, "
            "or choose another --out"
        )
    run.write("recipe.toml", prepared.recipe.to_toml())
    if not began:
        run.write("partition.json", partition.to_json())


def _drop_another(run: Run, recipe: Recipe) -> None:
    """Make room for a run that is needed first, where there is one of another recipe."""
    if not run.exists():
        return
    try:
        check_folder(run, recipe, resume=True)
    except UserError:
        shutil.rmtree(run.folder)


def _train_first(prerequisite: PreparedRun, callback: Callback | None) -> Trained:
    """What came of a run that the method needs first; it begins or goes on where it has not finished."""
    run = prerequisite.run
    if run.finished:
        check_folder(run, prerequisite.recipe, resume=True)
    else:
        _execute(prerequisite, run.exists(), callback)
    return outcome(run, prerequisite.federation.splits.train.images)


def _is_done(run: Run, recipe: Recipe) -> bool:
    """Whether nothing is left to do: the last round is measured, and its encoder is there."""
    if not run.exists() or load_recipe(run.recipe_path).train.rounds != recipe.train.rounds:
        return False
    record = run.read_json("evaluation.json")
    if record is None or record["round"] != recipe.train.rounds:
        return False
    return record["model"] is None or run.encoder_path.is_file()


def check_folder(run: Run, recipe: Recipe, resume: bool) -> None:
    """Refuse a folder that this recipe can neither begin nor go on with.

    Raises:
        UserError: it holds other things, a run that is not to be resumed, or one of another recipe.
    """
    if not run.exists():
        if stray := run.strays():
            raise UserError(
                f"{run.folder} holds no run (no recipe.toml in it), and a run would write over its {stray[0]!r}; "
                "choose another --out"
            )
        return
    if not run.begun():  # it failed before its first round, maybe of the recipe: nothing of it would be lost
        return
    if not resume:
        raise UserError(
            f"{run.folder} already holds a run; add --resume to go on with it, or choose another --out"
        )
    before, now = (
        flatten(describe(load_recipe(run.recipe_path).completed())),
        flatten(describe(recipe.completed())),
    )
    changed = [key for key in sorted(before | now) if before.get(key) != now.get(key) and key not in LENGTH]
    if changed:
        key = changed[0]
        raise UserError(
            f"{run.folder} was begun with {key} = {before.get(key)!r}, and the recipe now says {now.get(key)!r}; a "
            "resumed run may differ in train.rounds and engine.workers only: choose another --out"
        )
    completed_rounds = run.completed_rounds()
    if now["train.rounds"] < completed_rounds:
        raise UserError(
            f"{run.folder} has completed {completed_rounds} rounds already; train.rounds can only be raised"
        )
    if (
        completed_rounds
        and now["train.rounds"] != before["train.rounds"]
        and recipe.train.schedule != "constant"
    ):
        raise UserError(
            f"{run.folder} was begun with train.rounds = {before['train.rounds']}, over which its learning rate "
            f"falls ({recipe.train.schedule}), so a longer run is another one; begin it elsewhere, and warm with "
            f"train.start={run.folder} if you like"
        )


def _finish(prepared: PreparedRun, evaluator: Evaluator, server: Server) -> None:
    """Evaluate the finished models by every protocol, and save them with the results."""
    recipe, run, federation = prepared.recipe, prepared.run, prepared.federation
    results = evaluator.final(server)
    models = evaluator.models(server)
    sizes = federation.setting.sizes
    largest = max(models, key=lambda name: sum(sizes[c] for c in models[name][1]), default=None)
    metadata = _about(federation)
    for name in models:
        if len(models) > 1:
            encoder = load_networks(federation, models[name][0])
            save_encoder(model_path(run, name), encoder, metadata)
    encoder = load_networks(federation, models[largest][0] if largest else {})
    if largest:
        save_encoder(run.encoder_path, encoder, metadata)
    shown, points = held_out(federation.splits)[1], recipe.evaluation.map_points
    if points and largest and len(shown):
        save_artifacts(run.folder, encoder, shown, federation.views, recipe.seed, points)
    method = recipe.composed
    record = {
        "round": server.round,
        "model": largest,
        **results,
        "method": recipe.label,
        "egress": list(method.egress),
        "keeps": list(method.keeps),
        "version": prepared.version,
    }
    if len(models) > 1:
        record["clients_by_model"] = {name: len(users) for name, (_, users) in models.items()}
    run.write("evaluation.json", json.dumps(record) + "\n")


def _about(federation: Federation) -> dict[str, Any]:
    """What an encoder's file says of its inputs: ``decoding`` makes the stored images that the views read."""
    settings = federation.views.settings
    decoding = asdict(federation.recipe.data.decoding)
    del decoding["channels"]
    return {
        "classes": list(federation.splits.train.classes),
        "image_size": federation.views.size,
        "channels": federation.views.channels,
        "mean": list(settings.mean),
        "std": list(settings.std),
        "decoding": decoding,
    }
