"""A run from its recipe to its results: load, train, evaluate, save."""

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

MAY_CHANGE = ("train.rounds", "engine.workers", "name", "title")  # when a run is resumed


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
        recipe: Name of a preset, path of a TOML file, the table in such a file, or a `Recipe`.
        out: The run's folder; None for ``runs/NAME-seedN``.
        resume: Whether to continue the run in the folder.
        callback: Receives the progress.
        watcher: Deprecated name of ``callback``.

    Returns:
        The finished run.

    Raises:
        UserError: The recipe, the data or the folder is invalid.
        TooFewUpdatesError: A round received too few usable updates.

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
    """Run a recipe, continue an interrupted run, or extend a finished one.

    Args:
        recipe: A recipe, as for `simulate`.
        out: The run's folder; None for ``runs/NAME-seedN``.
        resume: Whether to continue the run in the folder.
        callback: Receives the progress.
        engine: Runs the rounds; None for the simulation on this machine.

    Returns:
        The finished run.

    Raises:
        UserError: The recipe, the data or the folder is invalid.
        TooFewUpdatesError: A round received too few usable updates.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # the test that multiprocessing uses
        raise UserError(
            "a worker process imports this script, and the script starts the run again; put its code under "
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
    """A run whose recipe, images and networks fit together; nothing is written yet.

    Attributes:
        recipe: The run's recipe.
        run: The run's folder.
        engine: Runs the rounds.
        federation: The federation that the engine gathered.
        prerequisites: The prerequisite runs, by name.
        version: Version of the code, read before the run: the source files may change before the run ends.
    """

    recipe: Recipe
    run: Run
    engine: Engine
    federation: Federation
    prerequisites: dict[str, PreparedRun]
    version: str


def prepare(recipe: Recipe, run: Run, engine: Engine) -> PreparedRun:
    """Load the images and build the networks of a run and of its prerequisites, which finds most errors.

    Raises:
        UserError: The recipe or the data is invalid.
    """
    code = version()
    prerequisites = {
        name: prepare(other, Run(run.folder / FOLDER / name), Simulation())
        for name, other in prerequisite_recipes(recipe).items()
    }
    return PreparedRun(recipe, run, engine, engine.gather(recipe, run.folder), prerequisites, code)


def _execute(prepared: PreparedRun, resume: bool, callback: Callback | None) -> None:
    """Perform all steps of a run."""
    recipe, run, engine = prepared.recipe, prepared.run, prepared.engine
    federation = prepared.federation
    with run.locked(), threads(recipe.engine.threads):
        check_folder(
            run, recipe, resume
        )  # again under the lock, because another process may have used the folder meanwhile
        _start(prepared)
        trained = {name: _run_prerequisite(other, callback) for name, other in prepared.prerequisites.items()}
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
        "name user-defined components in it as module:attribute"
    )


def _start(prepared: PreparedRun) -> None:
    """Write the complete recipe and the partition, before the first round."""
    run, partition = prepared.run, prepared.federation.partition
    if not run.started():
        run.reset()
        for other in prepared.prerequisites.values():
            _delete_unless_same(other.run, other.recipe)
    earlier = partition_of(run)
    if earlier and earlier.fingerprint != partition.fingerprint:
        raise UserError(
            f"{run.folder} was started with other training images than the recipe's data contain now; restore "
            "them, or choose another --out"
        )
    run.write("recipe.toml", prepared.recipe.to_toml())
    if not earlier:
        run.write("partition.json", partition.to_json())


def _delete_unless_same(run: Run, recipe: Recipe) -> None:
    """Delete a prerequisite run if it was started with another recipe."""
    if not run.exists():
        return
    try:
        check_folder(run, recipe, resume=True)
    except UserError:
        shutil.rmtree(run.folder)


def _run_prerequisite(prerequisite: PreparedRun, callback: Callback | None) -> Trained:
    """Return the result of a prerequisite run; start or continue the run if it has not finished."""
    run = prerequisite.run
    if run.finished:
        check_folder(run, prerequisite.recipe, resume=True)
    else:
        _execute(prerequisite, run.exists(), callback)
    return outcome(run, prerequisite.federation.splits.train.images)


def _is_done(run: Run, recipe: Recipe) -> bool:
    """Whether the run is complete: the last round is evaluated, and its encoder is saved."""
    if not run.exists() or load_recipe(run.recipe_path).train.rounds != recipe.train.rounds:
        return False
    record = run.read_json("evaluation.json")
    if record is None or record["round"] != recipe.train.rounds:
        return False
    return record["model"] is None or run.encoder_path.is_file()


def check_folder(run: Run, recipe: Recipe, resume: bool) -> None:
    """Check that a run of this recipe can start or continue in a folder.

    Raises:
        UserError: The folder contains other files, a run while ``resume`` is false, or a run of another recipe.
    """
    if not run.exists():
        if stray := run.stray_files():
            raise UserError(
                f"{run.folder} holds no run (no recipe.toml in it), and a run would overwrite its {stray[0]!r}; "
                "choose another --out"
            )
        return
    if (
        not run.started()
    ):  # it failed before its first round, maybe because of the recipe: there is nothing to lose
        return
    if not resume:
        raise UserError(
            f"{run.folder} already holds a run; add --resume to continue it, or choose another --out"
        )
    before, now = (
        flatten(describe(load_recipe(run.recipe_path).completed())),
        flatten(describe(recipe.completed())),
    )
    changed = [
        key for key in sorted(before | now) if before.get(key) != now.get(key) and key not in MAY_CHANGE
    ]
    if changed:
        key = changed[0]
        raise UserError(
            f"{run.folder} was started with {key} = {before.get(key)!r}, and the recipe now says {now.get(key)!r}; "
            f"a resumed run may only change {', '.join(MAY_CHANGE)}: choose another --out"
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
            f"{run.folder} was started with train.rounds = {before['train.rounds']}, over which its learning rate "
            f"falls ({recipe.train.schedule}), so a longer run is a different one; choose another --out, with "
            f"train.start={run.folder} for a warm start"
        )


def _finish(prepared: PreparedRun, evaluator: Evaluator, server: Server) -> None:
    """Evaluate the finished models under all protocols, and save them with the results."""
    recipe, run, federation = prepared.recipe, prepared.run, prepared.federation
    results = evaluator.final(server)
    models = evaluator.models(server)
    sizes = federation.setting.sizes
    largest = max(models, key=lambda name: sum(sizes[c] for c in models[name][1]), default=None)
    metadata = _about(federation)
    shown, points = held_out(federation.splits)[1], recipe.evaluation.map_points
    for name, (weights, _) in models.items():
        encoder = load_networks(federation, weights)
        if len(models) > 1:
            save_encoder(model_path(run, name), encoder, metadata)
        if name == largest:
            save_encoder(run.encoder_path, encoder, metadata)
            if points and len(shown):
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
    """Metadata of an encoder's input; ``decoding`` describes the stored images, from which the views are made."""
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
