"""Start, continuation or refusal of a run in a folder."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace

import tomli_w
import torch

from atoll.commands.inputs import has_other_images, may_move, other_weights
from atoll.commands.run_files import model_path
from atoll.core.config import describe, flatten
from atoll.core.environment import (
    difference,
    environment,
    environment_of_code,
    other_code,
)
from atoll.core.errors import UserError, warn
from atoll.core.given import PREFIX, value_of
from atoll.core.remedies import RESTART, missing, of_sites
from atoll.core.run_folder import ENVIRONMENT, Run, is_of_sites
from atoll.core.text import plural
from atoll.data.partition.partition import Partition
from atoll.models import load_encoder
from atoll.recipe.prerequisites import FOLDER, prerequisite_recipes
from atoll.recipe.recipe import Recipe, recipe_of

MAY_CHANGE = (  # when a run is resumed
    *("train.rounds", "train.min_accepted", "evaluation.at_end", "name", "title"),
    *("engine.workers", "engine.streams", "engine.decoders"),
    # Another kind of device is another environment, which is not resumed.
    *("engine.device", "engine.devices"),
    *("train.keep_local_models", "train.keep_models_every"),
)


@dataclass(frozen=True)
class Recovery:
    """What the user allows beyond a plain continuation of a run.

    Attributes:
        restart: Delete the run in the folder and start it again.
        reset_clients: Clients whose damaged or lost state is dropped.
        other_environment: Continue on another kind of CPU, device or library, or with changed code of the user's,
            so that the weights will differ.
    """

    restart: bool = False
    reset_clients: tuple[int, ...] = ()
    other_environment: bool = False


NOTHING = Recovery()
# Options that hold an object, and the argument of `simulate` that takes it.
OBJECTS = {"data.path": "data", "model.encoder": "encoder", "views.transform": "transform"}
LAYOUT, AUTO = "engine.channels_last", "auto"


def settled(recipe: Recipe, run: Run, restart: bool = False) -> Recipe:
    """Return the recipe with what ``"auto"`` stands for: on this machine, or where the run in the folder began.

    Args:
        recipe: The recipe.
        run: The folder.
        restart: Whether the run in the folder is to be deleted.
    """
    engine = recipe.engine
    if engine.channels_last != AUTO:
        return recipe
    begun = not restart and run.exists() and run.started()
    here = recipe_of(run).engine.channels_last if begun else engine.uses_channels_last()
    return replace(recipe, engine=replace(engine, channels_last=here))


def delete_unless_same(run: Run, recipe: Recipe, partition: Partition) -> None:
    """Delete a prerequisite run if it was started with another recipe, with other code or with other images.

    Raises:
        UserError: A file of the run is damaged.
    """
    if not run.exists() or not run.started():
        return
    if has_other_images(run, partition) or _difference(run, recipe, moved=False) or _other_code(run, recipe):
        shutil.rmtree(run.folder)


def is_done(run: Run, recipe: Recipe) -> bool:
    """Whether the run is complete: the last round is evaluated, and its encoder is saved."""
    record = run.results if run.exists() else {}
    if not record or not run.partition_path.is_file():
        return False
    before, rounds = recipe_of(run), recipe.train.rounds
    if before.data.path != recipe.data.path:  # the images are read, and compared with the run's
        return False
    if before.train.rounds != rounds or set(recipe.evaluation.at_end) - set(before.evaluation.at_end):
        return False
    if record["round"] != rounds and not record.get("stopped_early"):
        return False
    if record.get("model") is None:
        return True
    models = [model_path(run, name) for name in record.get("clients_by_model", ())]
    if all(path.is_file() for path in (run.encoder_path, *models)):
        load_encoder(run.encoder_path, value_of(recipe.model.encoder))  # names a damaged one
        return True
    return False


def rename_finished(run: Run, recipe: Recipe, asked_more: bool) -> None:
    """Rename a run of which nothing is left to do, and warn if more was asked for, such as a log."""
    _rename(run, recipe)
    if asked_more:
        warn(f"{run.folder} had finished: --log, --reset-client change nothing")


def _rename(run: Run, recipe: Recipe) -> None:
    """Write the recipe's name and title into the run's recipe, and nothing else of it."""
    before = run.recipe_table()
    named = {**before, "name": recipe.name, "title": recipe.title}
    if named != before:
        run.write("recipe.toml", tomli_w.dumps(named))


def delete_evaluation(run: Run, recipe: Recipe) -> None:
    """Delete the evaluation of a run whose rounds are complete and that is evaluated again.

    Otherwise, an interruption would leave the old evaluation beside a recipe with other protocols.
    """
    complete = run.completed_rounds() >= recipe.train.rounds or run.results.get("stopped_early")
    if run.finished and complete:
        (run.folder / "evaluation.json").unlink()


def record_environment(run: Run, recipe: Recipe, device: torch.device) -> None:
    """Write down in which environment the next rounds are computed, if it is not that of the rounds before."""
    here = environment(device, recipe.engine.threads) | environment_of_code(recipe.own_code)
    environments = run.environments()
    last = environments[-1]["environment"] if environments else {}
    same = environments and not difference(last, here) and not other_code(last, here)
    if not same:
        environments.append({"after_round": run.completed_rounds(), "environment": here})
    if not same or not (run.folder / ENVIRONMENT).is_file():
        run.write(ENVIRONMENT, json.dumps({"environments": environments}) + "\n")


def check_clients(clients: Sequence[int], count: int) -> None:
    """Check the clients of ``--reset-client``: each is one of `count`."""
    wrong = next((client for client in clients if not 0 <= client < count), None)
    if wrong is not None:
        raise UserError(f"--reset-client {wrong} names no client; the run's are 0 to {count - 1}")


def check_start(run: Run, recipe: Recipe, resume: bool, recovery: Recovery, at_sites: bool) -> bool:
    """Check that a run can start, start again or continue in a folder, before its images are loaded.

    Returns:
        Whether nothing is left to do, because the run in the folder is complete.

    Raises:
        UserError: It cannot; see `check_folder`.
    """
    if recovery.reset_clients and not resume:
        raise UserError("--reset-client needs --resume, because a new run has no client states")
    if recovery.restart and resume:
        raise UserError("--restart deletes the run that --resume would continue; give one of them")
    if recovery.restart:
        _check_not_others(run)
        return False
    return check_folder(run, recipe, resume, recovery.other_environment, at_sites)


def _check_not_others(run: Run) -> None:
    if os.path.isfile(run.folder):  # which does not raise for a name that is too long
        raise UserError(f"{run.folder} is a file, and a run is a folder; choose another --out")
    if stray := run.stray_files():
        raise UserError(
            f"{run.folder} holds no run, and a run would overwrite its {stray[0]!r}; choose another --out"
        )


def cannot_continue(run: Run, recipe: Recipe, other_environment: bool = False) -> bool:
    """Whether a folder holds a run that this recipe, this code or this environment cannot continue."""
    try:
        # A run of real sites is not one to delete here; its app may continue it.
        done = check_folder(run, recipe, True, other_environment, at_sites=True)
        if not done and run.exists() and run.started():
            run.latest()
            for name, other in prerequisite_recipes(recipe).items():
                check_folder(Run(run.folder / FOLDER / name), other, True, other_environment)
    except UserError:
        return run.exists()
    return False


def check_folder(
    run: Run, recipe: Recipe, resume: bool, other_environment: bool = False, at_sites: bool = False
) -> bool:
    """Check that a run of this recipe can start or continue in a folder.

    Args:
        run: The folder.
        recipe: The recipe.
        resume: Whether a run in the folder may be continued.
        other_environment: Whether it may be continued in another environment.
        at_sites: Whether the engine reaches images at real sites.

    Returns:
        Whether the run in the folder is complete: the last round is evaluated, and its encoder is saved.

    Raises:
        UserError: The folder is a file, or contains other files, a run while ``resume`` is false, a run of another
            recipe, one of other code of the user's, an unfinished one of real sites or of another environment, or
            one that has lost its record.
    """
    _check_not_others(run)
    if not run.exists():
        return False
    if not run.started():  # it failed before its first round, maybe because of the recipe: nothing is lost
        return False
    if not resume:
        raise UserError(
            f"{run.folder} already holds a run; add --resume to continue it (in Python: resume=True) or --restart "
            "to delete it and begin again (restart=True), or choose another --out"
        )
    if reason := _difference(run, recipe):
        raise UserError(reason)
    if not other_environment:
        if run.lost_environments():
            raise UserError(missing(run.folder / ENVIRONMENT))
        _check_code(run, recipe)
    done = is_done(run, recipe)
    if not done and not at_sites and is_of_sites(run.read_json(run.partition_path.name) or {}):
        raise of_sites(run.folder)
    if not done and not other_environment:
        _check_environment(run, recipe)
    if done and (changed := other_weights(run, recipe)):
        warn(
            f"{run.folder} had finished, from the weights that '{changed}' held when it began; it holds others now"
        )
    if done and (protocols := set(recipe_of(run).evaluation.at_end)) > set(recipe.evaluation.at_end):
        warn(
            f"{run.folder} had finished, and keeps its results of all protocols, {', '.join(sorted(protocols))}, "
            "though evaluation.at_end asks for fewer now"
        )
    return done


def _difference(run: Run, recipe: Recipe, moved: bool = True) -> str | None:
    """Return a sentence that says why a run in a folder is not one of this recipe, or None.

    Args:
        run: The folder.
        recipe: The recipe.
        moved: Whether the same images and weights may lie elsewhere now.
    """
    files = recipe.data.source != "object"  # an object's name has the fingerprint of its images
    free = [*MAY_CHANGE, *(["data.path"] if moved and files else [])]
    before, now = (
        flatten(describe(recipe_of(run).completed())),
        flatten(describe(recipe.completed())),
    )
    if now[LAYOUT] == AUTO:
        now[LAYOUT] = before[LAYOUT]
    if moved:
        free += [option for option in may_move(run) if before.get(option) and now.get(option)]
    changed = [key for key in sorted(before | now) if before.get(key) != now.get(key) and key not in free]
    if changed:
        key = changed[0]
        given = [
            name
            for option, name in OBJECTS.items()
            if str(before.get(option)).startswith(PREFIX) and before[option] != now.get(option)
        ]
        again = f"give the same {' and '.join(f'{name}=…' for name in given)} again, " if given else ""
        return (
            f"{run.folder} was started with {key} = {before.get(key)!r}, and the recipe now says {now.get(key)!r}; "
            f"a resumed run may only change {', '.join(free)}: {again}choose another --out, or {RESTART}"
        )
    completed_rounds = run.completed_rounds()
    if now["train.rounds"] < completed_rounds:
        return (
            f"{run.folder} has completed {plural(completed_rounds, 'round')} already, and train.rounds = "
            f"{now['train.rounds']} is fewer; set train.rounds = {completed_rounds} or more"
        )
    share = before["train.min_accepted"]
    if now["train.min_accepted"] > share:
        return (
            f"{run.folder} was started with train.min_accepted = {share}, and its rounds so far may have accepted "
            f"no larger share; set train.min_accepted = {share}, because a resumed run may only lower it"
        )
    over = _over_all_rounds(recipe)
    if completed_rounds and now["train.rounds"] != before["train.rounds"] and over:
        return (
            f"{run.folder} was started with train.rounds = {before['train.rounds']}, over which {over}, so a "
            f"longer run is a different one; choose another --out, with train.start={run.folder} for a warm start"
        )
    return None


def _over_all_rounds(recipe: Recipe) -> str:
    """What changes over all rounds of a run, in words; empty if nothing does."""
    if recipe.train.schedule != "constant":
        return f"its learning rate falls ({recipe.train.schedule})"
    scheduled = next((one.name for one in recipe.composed.components if one.follows_rounds), None)
    return f"{scheduled!r} changes its loss" if scheduled else ""


def _other_code(run: Run, recipe: Recipe) -> str | None:
    """Name of code of the recipe that is not what computed the run's last rounds, or None."""
    environments = run.environments()
    if not environments:
        return None
    return other_code(environments[-1]["environment"], environment_of_code(recipe.own_code))


def _check_code(run: Run, recipe: Recipe) -> None:
    if name := _other_code(run, recipe):
        raise UserError(
            f"{run.folder} was computed with another version of {name} than its module holds now; restore that "
            f"code, choose another --out, {RESTART}, or mix both with the command's "
            "--other-environment"
        )


def _check_environment(run: Run, recipe: Recipe) -> None:
    here, environments = environment(recipe.engine.find_device(), recipe.engine.threads), run.environments()
    changed = difference(environments[-1]["environment"], here) if environments else None
    if changed:
        raise UserError(
            f"the rounds of {run.folder} were computed with {changed}, so a resumed run would not end with the "
            "same weights; resume it in the same environment, choose another --out, or mix both with the "
            "command's --other-environment"
        )
