"""A run from its recipe to its results: load, train, evaluate, save."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import nn

from atoll.commands.evaluator import Evaluator
from atoll.commands.handle import Run
from atoll.commands.inputs import check_inputs
from atoll.commands.logs import check_logs, opened_logs
from atoll.commands.progress import Bar
from atoll.commands.resume import (
    NOTHING,
    Recovery,
    check_clients,
    check_folder,
    check_start,
    delete_evaluation,
    delete_unless_same,
    record_environment,
    rename_finished,
    settled,
)
from atoll.commands.run_files import model_path
from atoll.components.base import Trained
from atoll.core import run_folder
from atoll.core.errors import UserError, warn
from atoll.core.process_state import process_for_training
from atoll.core.provenance import version
from atoll.core.run_names import check_name, default_folder
from atoll.core.threads import threads
from atoll.core.tree import save
from atoll.engines.callbacks import Callback, Callbacks
from atoll.engines.federation import Federation
from atoll.engines.rounds import Engine, RunContext
from atoll.engines.server import Server
from atoll.engines.simulation import Simulation
from atoll.models import save_encoder
from atoll.models.adapters import merged
from atoll.recipe.prerequisites import FOLDER, outcome, prerequisite_recipes
from atoll.recipe.recipe import Recipe, check_kind, give, load_recipe, make_recipe
from atoll.report.artifacts import save_artifacts
from atoll.report.client_pictures import FILE as SAMPLES
from atoll.report.client_pictures import client_samples


def simulate(
    recipe: Recipe | Mapping[str, Any] | str | Path,
    out: Path | str | None = None,
    resume: bool = False,
    callback: Callback | None = None,
    *,
    encoder: nn.Module | Callable[..., nn.Module] | None = None,
    data: object = None,
    transform: Callable[..., Any] | None = None,
    callbacks: Sequence[object] | object | None = (),
    log: Sequence[str] | str | None = (),
    test_data: object = None,
    watcher: Callback | None = None,
    restart: bool = False,
) -> Run:
    """Simulate a federation on this machine: train, evaluate and save its encoder.

    A process runs one simulation at a time; other threads wait. Use processes to run several at once.

    Args:
        recipe: Name of a preset, path of a TOML file, the table in such a file, or a `Recipe`.
        out: The run's folder; None for ``runs/NAME-seedN``.
        resume: Whether to continue the run in the folder.
        callback: An object that follows the run, in addition to those in ``callbacks``.
        encoder: The encoder to train: a module, from whose weights the run starts, or a function or class that
            makes one; None for the recipe's. Load the run's encoder with ``atoll.load_encoder(path, encoder)``.
        data: The images: a dataset with a length whose items are (image, label), a Hugging Face dataset, an array,
            a pair (images, labels), or a dict from clients' names to any of these; None for the recipe's images.
        transform: Makes a view of an image: a transform of torchvision's v2, or a function that takes an image,
            uint8 (C, H, W), and returns a view (C, size, size), uint8 or floats; None for the recipe's views.
        callbacks: One object that follows the run, or several; None for none; see `atoll.Callback`.
        log: One tool that follows the run, or several: ``"tensorboard"``, ``"wandb"``, ``"mlflow"``; None for none.
        test_data: The test images, in the forms of ``data``; None to hold out ``data.test_fraction`` of ``data``.
        watcher: Deprecated name of ``callback``.
        restart: Whether to delete the run in the folder and begin again.

    Returns:
        The finished run, with its results, its report, its encoder and its nearest images.

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
        ...     encoder = run.encoder()
        >>> encoder.dim
        128
    """
    if watcher is not None:
        warn("watcher is now called callback", DeprecationWarning)
    objects = (encoder, data, transform, test_data)
    further = list(callbacks or ()) if isinstance(callbacks, Iterable | None) else [callbacks]
    own = [*([callback] if callback else []), *([watcher] if watcher else []), *further]
    tools = list(log or ()) if isinstance(log, Iterable | None) and not isinstance(log, str) else [log]
    with process_for_training():  # also for an encoder's factory, so that a thread waits only once
        given = give(recipe, *objects) if any(one is not None for one in objects) else _as_recipe(recipe)
        bar = Bar(Console(), given.label)
        try:
            followers = [bar, *own] if bar.console.is_jupyter else own
            recovery = Recovery(restart=restart)
            done = run_recipe(given, out, resume, Callbacks(followers), recovery=recovery, log=tools)
            return Run(done.folder, given)
        finally:
            bar.stop()


@process_for_training()
def run_recipe(
    recipe: Recipe | Mapping[str, Any] | str | Path,
    out: Path | str | None = None,
    resume: bool = False,
    callback: Callback | None = None,
    engine: Engine | None = None,
    recovery: Recovery = NOTHING,
    log: Sequence[str] = (),
) -> run_folder.Run:
    """Run a recipe, continue an interrupted run, or extend a finished one.

    Args:
        recipe: A recipe, as for `simulate`.
        out: The run's folder; None for ``runs/NAME-seedN``.
        resume: Whether to continue the run in the folder.
        callback: An object that follows the run, such as a progress bar.
        engine: The engine that runs the rounds; None for the simulation on this machine.
        recovery: What the user allows when a run continues, beyond a plain continuation.
        log: Tools that follow the run (`atoll.commands.logs`).

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
    check_logs(log)
    recipe = _as_recipe(recipe)
    run = run_folder.Run(out or default_folder(recipe.name, recipe.seed))
    engine = engine or Simulation()
    if check_start(run, recipe, resume, recovery, engine.at_sites):
        rename_finished(run, recipe, bool(log or recovery.reset_clients))
        return run
    prepared = prepare(recipe, run, engine, recovery.restart)
    check_clients(recovery.reset_clients, prepared.federation.setting.num_clients)
    _execute(prepared, resume, Callbacks([callback] if callback else []), recovery, log)
    return run


@dataclass(frozen=True)
class PreparedRun:
    """A run whose recipe, images and networks fit together. Nothing has been written yet.

    Attributes:
        recipe: The run's recipe.
        run: The run's folder.
        engine: The engine that runs the rounds.
        federation: The federation that the engine gathered.
        prerequisites: The prerequisite runs, by name.
        version: Version of the code, read before the run: the source files may change before the run ends.
    """

    recipe: Recipe
    run: run_folder.Run
    engine: Engine
    federation: Federation
    prerequisites: dict[str, PreparedRun]
    version: str


def prepare(recipe: Recipe, run: run_folder.Run, engine: Engine, restart: bool = False) -> PreparedRun:
    """Load the images and build the networks of a run and of its prerequisites, to find most errors early.

    Args:
        recipe: The recipe.
        run: The run's folder.
        engine: The engine that runs the rounds.
        restart: Whether the run in the folder is to be deleted.

    Raises:
        UserError: The recipe or the data is invalid.
    """
    code = version()
    if isinstance(engine, Simulation):  # over Flower, each site settles this for its own device
        recipe = settled(recipe, run, restart)
    prerequisites = {
        name: prepare(other, run_folder.Run(run.folder / FOLDER / name), Simulation(), restart)
        for name, other in prerequisite_recipes(recipe).items()
    }
    return PreparedRun(recipe, run, engine, engine.gather(recipe, run.folder, restart), prerequisites, code)


def _execute(
    prepared: PreparedRun,
    resume: bool,
    callback: Callback,
    recovery: Recovery,
    log: Sequence[str],
) -> None:
    """Perform all steps of a run."""
    recipe, run, engine = prepared.recipe, prepared.run, prepared.engine
    federation = prepared.federation
    with run.locked(), threads(recipe.engine.threads):
        if recovery.restart and run.exists():
            run.clear()
        # Checked again under the lock, because another process may have used the folder in the meantime.
        check_folder(run, recipe, resume, recovery.other_environment, engine.at_sites)
        _start(prepared)
        inner = Recovery(other_environment=recovery.other_environment)
        trained = {
            name: _run_prerequisite(other, callback, inner, log)
            for name, other in prepared.prerequisites.items()
        }
        evaluator = Evaluator(federation, engine.states(run), engine)
        with opened_logs(log, run, recipe) as logs:
            followers = Callbacks([callback, *logs])
            server = engine.run(
                RunContext(federation, run, evaluator, trained, followers, recovery.reset_clients)
            )
            _finish(prepared, evaluator, server)
            followers.end(Run(run.folder, recipe))


def _as_recipe(recipe: Recipe | Mapping[str, Any] | str | Path) -> Recipe:
    check_kind(recipe)
    if isinstance(recipe, Recipe):
        check_name(recipe.name)
        return recipe
    if isinstance(recipe, Mapping):
        return make_recipe(recipe)
    return load_recipe(recipe)


def _start(prepared: PreparedRun) -> None:
    """Write the complete recipe and the partition, before the first round."""
    run, partition = prepared.run, prepared.federation.partition
    begins = not run.started()
    if begins:
        run.reset()
        for other in prepared.prerequisites.values():
            delete_unless_same(other.run, other.recipe, other.federation.partition)
        # Written before any other file, so that the folder is recognised as a run if this process is killed.
        run.write("recipe.toml", prepared.recipe.to_toml())
    check_inputs(run, prepared.recipe, prepared.federation)
    record_environment(run, prepared.recipe, prepared.federation.device)  # which the evaluation lists, too
    delete_evaluation(run, prepared.recipe)
    if not begins:
        run.write("recipe.toml", prepared.recipe.to_toml())
    if not run.partition_path.is_file():
        run.write("partition.json", partition.to_json())
    images = prepared.federation.images
    if prepared.recipe.evaluation.map_points and partition.fingerprint == images.fingerprint:
        save(run.folder / SAMPLES, client_samples(images, partition))


def _run_prerequisite(
    prerequisite: PreparedRun, callback: Callback, recovery: Recovery, log: Sequence[str]
) -> Trained:
    """Return the result of a prerequisite run; start or continue the run if it has not finished."""
    run = prerequisite.run
    if run.finished:
        try:
            check_folder(run, prerequisite.recipe, True, recovery.other_environment)
            check_inputs(run, prerequisite.recipe, prerequisite.federation)
        except UserError as error:
            raise UserError(f"this method needs the run in {run.folder} first: {error}") from None
    else:
        _execute(prerequisite, run.exists(), callback, recovery, log)
    return outcome(run, prerequisite.federation.splits.train.images)


def _finish(prepared: PreparedRun, evaluator: Evaluator, server: Server) -> None:
    """Evaluate the finished models under all protocols, and save them with the results."""
    recipe, run, federation = prepared.recipe, prepared.run, prepared.federation
    results = evaluator.final(server)
    models = evaluator.models(server)
    sizes = federation.setting.sizes
    largest = max(models, key=lambda name: sum(sizes[c] for c in models[name][1]), default=None)
    metadata = _about(federation)
    shown, points = federation.splits.held_out[1], recipe.evaluation.map_points
    for name, (load, _) in models.items():
        encoder = merged(federation.load(load()))
        if len(models) > 1:
            save_encoder(model_path(run, name), encoder, metadata)
        if name == largest:
            save_encoder(run.encoder_path, encoder, metadata)
            if points and len(shown):
                save_artifacts(run.folder, encoder, shown, federation.views, recipe.seed, points)
    method = recipe.composed
    record = {
        "round": server.round,
        **({"stopped_early": True} if server.round < recipe.train.rounds else {}),
        "model": largest,
        **results,
        "method": recipe.label,
        "supervised": method.needs_labels,
        "egress": list(method.egress),
        "keeps": list(method.keeps),
        "version": prepared.version,
        "environments": run.environments(),
        "seconds": round(sum(line.get("seconds") or 0 for line in run.metrics), 3),
    }
    record["users_by_model"] = {name: users for name, (_, users) in models.items()}
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
