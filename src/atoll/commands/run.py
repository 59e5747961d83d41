"""From a recipe to a finished run: load, simulate, evaluate, save."""

from __future__ import annotations

import json
import multiprocessing
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from atoll.commands.evaluate import _evaluate_all, deployed, held_out, load_networks, model_path, partition_of
from atoll.components.base import Trained
from atoll.core.config import describe, flatten
from atoll.core.errors import UserError
from atoll.core.provenance import version
from atoll.core.run_folder import SITES_OWN, Run, default_folder
from atoll.core.threads import threads
from atoll.engines.client_states import States
from atoll.engines.federation import Federation
from atoll.engines.rounds import Callback, Engine
from atoll.engines.server import Server
from atoll.engines.simulation import Simulation
from atoll.models import save_encoder
from atoll.recipe.prerequisites import FOLDER, outcome, prerequisite_recipes
from atoll.recipe.recipe import Recipe, load_recipe, make_recipe
from atoll.report.artifacts import save_artifacts

LENGTH = {"train.rounds", "engine.workers", "name", "title"}  # what a resumed recipe may say otherwise


def run_recipe(
    recipe: Recipe | Mapping[str, Any] | str | Path,
    out: Path | str | None = None,
    resume: bool = False,
    callback: Callback | None = None,
    engine: Engine | None = None,
) -> Run:
    """Run a recipe, or go on with one that was interrupted or is to be longer.

    Args:
        recipe: a preset's name, a TOML file, the table that such a file holds, or a recipe as objects.
        out: the run's folder; None: ``runs/NAME-seedN``.
        resume: go on with what the folder holds.
        callback: is told of progress.
        engine: who plays the rounds; None: the simulation on this machine.

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
    if isinstance(recipe, Mapping):
        recipe = make_recipe(recipe)
    elif isinstance(recipe, str | Path):
        recipe = load_recipe(recipe)
    elif not isinstance(recipe, Recipe):
        raise UserError(
            f"a recipe is a preset's name, a TOML file, a table or an atoll.Recipe, not a {type(recipe).__name__}; "
            "name your own components in it as module:attribute"
        )
    code = version()  # now: the files may change before the run ends
    run = Run(out or default_folder(recipe.name, recipe.seed))
    check_folder(run, recipe, resume)
    if resume and _is_done(run, recipe):
        return run
    engine = engine or Simulation()
    # Before anything is written: most mistakes show here.
    needed = prerequisite_recipes(recipe)
    for other in needed.values():
        Federation(other)
    federation = engine.gather(recipe, run.folder)
    with run.locked():
        check_folder(run, recipe, resume)  # again: another process may have been at work here meanwhile
        if not run.begun():
            run.begin_anew()
            for name, other in needed.items():
                _drop_another(Run(run.folder / FOLDER / name), other)
        _check_images(run, federation)
        run.write("recipe.toml", recipe.to_toml())
        if not run.partition_path.is_file():
            run.write("partition.json", federation.partition.to_json())

        def measure(
            federation: Federation, server: Server, states: States, final: bool = False
        ) -> dict[str, Any]:
            final = final or server.round == 0  # the untrained encoder too is measured by every protocol
            here = _evaluate_all(federation, server, states, final)
            there = engine.measure(federation, server, final)
            if (
                not here and "sites_mean" in there
            ):  # no images here: the clients' own numbers are all there is
                here = {"split": SITES_OWN, **there["sites_mean"]}
            return {**here, **there}

        trained = {
            name: _prepare(run.folder / FOLDER / name, other, callback) for name, other in needed.items()
        }
        server, states = engine.run(federation, run, callback, measure, trained)
        with threads(recipe.engine.threads):
            results = measure(federation, server, states, final=True)
            _finish(run, federation, server, states, results, recipe.label, code)
    return run


def _drop_another(run: Run, recipe: Recipe) -> None:
    """Make room for a run that is needed first, where there is one of another recipe."""
    if not run.exists():
        return
    try:
        check_folder(run, recipe, resume=True)
    except UserError:
        shutil.rmtree(run.folder)


def _prepare(folder: Path, recipe: Recipe, callback: Callback | None) -> Trained:
    """What came of a run that the method needs first; it is begun or resumed where it has not finished."""
    run = Run(folder)
    if run.finished:
        check_folder(run, recipe, resume=True)
    else:
        run_recipe(recipe, folder, resume=run.exists(), callback=callback)
    return outcome(run, recipe)


def _is_done(run: Run, recipe: Recipe) -> bool:
    """Whether nothing is left to do: the last round is measured, and its encoder is there."""
    if not run.exists() or load_recipe(run.recipe_path).train.rounds != recipe.train.rounds:
        return False
    record = run.read_json("evaluation.json")
    if record is None or record["round"] != recipe.train.rounds:
        return False
    return record["model"] is None or run.encoder_path.is_file()


def _check_images(run: Run, federation: Federation) -> None:
    """A run goes on with the images that it began with."""
    began = partition_of(run)
    if began and began.fingerprint != federation.partition.fingerprint:
        raise UserError(
            f"{run.folder} was begun with other training images than the recipe's data give now; put them back, "
            "or choose another --out"
        )


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


def _finish(
    run: Run,
    federation: Federation,
    server: Server,
    states: States,
    results: dict[str, Any],
    label: str,
    code: str,
) -> None:
    """Save the encoders and say what they are worth."""
    recipe = federation.recipe
    models = deployed(federation, server, states)
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
    about: dict[str, Any] = {
        "method": label,
        "egress": list(method.egress),
        "keeps": list(method.keeps),
        "version": code,
    }
    if len(models) > 1:
        about["clients_by_model"] = {name: len(users) for name, (_, users) in models.items()}
    record = {"round": server.round, "model": largest, **results, **about}
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
