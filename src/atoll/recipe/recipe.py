"""A recipe: one validated description of a run, from a preset or a TOML file."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import tomli_w

from atoll.components.training import TrainOptions
from atoll.core.config import Options, build, describe, parse_toml, read_settings
from atoll.core.errors import UserError
from atoll.core.given import names_code, value_of
from atoll.core.imports import search
from atoll.core.run_folder import Run
from atoll.core.run_names import check_name
from atoll.core.text import clean, type_words
from atoll.data.options import DataOptions, PartitionOptions, is_own_data
from atoll.data.shifts.options import ShiftOptions
from atoll.data.views.options import ViewOptions
from atoll.evaluation import EvaluationOptions
from atoll.methods.method import Method
from atoll.methods.registry import MethodOptions, complete, make_method
from atoll.models import ModelOptions, is_own_code
from atoll.recipe.encoder_input import with_data, with_encoder, with_input, with_transform
from atoll.recipe.engine_options import EngineOptions
from atoll.recipe.table import complete_table, presets, read_table, recipe_folders

__all__ = ["Recipe", "give", "load_recipe", "make_recipe", "presets", "read_recipe", "recipe_of"]

_NOT_TOGETHER = (
    ("engine.stack", "train.accumulate"),
    ("engine.stack", "train.checkpoint_gradients"),
    ("engine.stack", "train.compile"),
    ("engine.stack", "engine.streams"),
    ("engine.stack", "train.cuda_graphs"),
    ("engine.streams", "train.compile"),
    ("engine.streams", "train.cuda_graphs"),
    ("train.checkpoint_gradients", "train.compile"),
)


@dataclass(frozen=True)
class Recipe(Options):
    """Everything that determines a run's result, section by section.

    Attributes:
        name: Name of the run; its folder is ``runs/NAME-seedN`` unless ``--out`` is given.
        title: One line about the run, for reports.
        seed: Seed of all random streams of the run.
        data: Source of the images.
        partition: Assignment of the images to clients.
        shift: How the clients' images differ from each other.
        views: Augmentation.
        model: Encoder and heads.
        method: The method and its components.
        options: The options of the method's components, by component.
        train: Local training and rounds.
        evaluation: Evaluation protocols, and the rounds in which they run.
        engine: Hardware and checkpoints.

    Example:
        >>> from atoll import Recipe
        >>> recipe = Recipe(name="mine", seed=1)
        >>> recipe.to_toml().splitlines()[0]
        'name = "mine"'
    """

    name: str = "run"
    title: str = ""
    seed: int = 0
    data: DataOptions = field(default_factory=DataOptions)
    partition: PartitionOptions = field(default_factory=PartitionOptions)
    shift: ShiftOptions = field(default_factory=ShiftOptions)
    views: ViewOptions = field(default_factory=ViewOptions)
    model: ModelOptions = field(default_factory=ModelOptions)
    method: MethodOptions = field(default_factory=MethodOptions)
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    train: TrainOptions = field(default_factory=TrainOptions)
    evaluation: EvaluationOptions = field(default_factory=EvaluationOptions)
    engine: EngineOptions = field(default_factory=EngineOptions)

    def __post_init__(self) -> None:
        super().__post_init__()
        used = {
            "engine.stack": self.engine.stack > 1,
            "engine.streams": self.engine.streams > 1,
            "train.accumulate": self.train.accumulate > 1,
            "train.checkpoint_gradients": self.train.checkpoint_gradients,
            "train.compile": self.train.compile,
            "train.cuda_graphs": self.train.cuda_graphs,
        }
        for first, second in _NOT_TOGETHER:
            if used[first] and used[second]:
                raise UserError(f"{second} cannot be used with {first}; leave out one of them")

    @cached_property
    def composed(self) -> Method:
        """The composed method."""
        return make_method(self.method, self.options)

    @property
    def stateful(self) -> bool:
        """Whether clients have a state that they retain from one round to the next."""
        return self.composed.stateful(self.train)

    @property
    def own_code(self) -> tuple[str, ...]:
        """The names ``module:attribute``, in this recipe, of code that is not Atoll's."""
        return tuple(names_of_code(describe(self)))

    @property
    def own_training_code(self) -> tuple[str, ...]:
        """Those of `own_code` that the training executes, too: protocols only measure finished rounds."""
        settings = names_of_code(describe(self))
        return tuple(name for name, setting in settings.items() if not setting.startswith("evaluation."))

    @property
    def trains_with_own_code(self) -> bool:
        """Whether the training executes user code, which the recipe names or is given as an object."""
        objects = (self.model.encoder, self.views.transform, self.data.path)
        return bool(self.own_training_code) or any(value_of(name) is not None for name in objects)

    @property
    def label(self) -> str:
        """Name of a run of this recipe in tables and curves."""
        name = self.composed.title or self.name
        return f"{name}, centralised" if self.partition.kind == "centralised" else name

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Shape (C, H, W) of the encoder's input."""
        size = self.views.size or self.data.image_size
        return self.data.channels, size, size

    def completed(self) -> Recipe:
        """Return the same recipe with all defaults written out."""
        method, options = complete(self.method, self.composed)
        return replace(self, method=method, options=options)

    def to_toml(self) -> str:
        """Format the complete recipe as TOML."""
        return tomli_w.dumps(describe(self.completed()))


def recipe_digest(text: str) -> str:
    """SHA-256 of a complete recipe's text (`Recipe.to_toml`); a site's policy lists recipes by it."""
    return hashlib.sha256(text.encode()).hexdigest()


def load_recipe(recipe: str | Path, settings: Sequence[str] = (), own_code: bool = True) -> Recipe:
    """Load a preset by name or a TOML file, and override it with ``key=value`` settings.

    The run has the name of the preset or file, unless the file or its base has a ``name``. Modules that the file
    names are searched for in the file's folder; modules that settings name, in the working folder.

    Args:
        recipe: Name of a preset, or a TOML file.
        settings: Settings that override the recipe's.
        own_code: Whether to compose a recipe that names code (`Recipe.own_code`); this imports the code.

    Raises:
        UserError: The recipe does not exist, the file is not valid TOML, a key is unknown, or a value is out of
            range.

    Example:
        >>> from atoll import load_recipe
        >>> recipe = load_recipe("digits-ssd", ["train.rounds=50", "seed=1"])
        >>> recipe.label, recipe.train.rounds, recipe.seed
        ('SSD', 50, 1)
    """
    if not isinstance(recipe, str | Path):
        raise UserError(
            f"load_recipe reads a preset's name or a TOML file, not {type_words(recipe)}; simulate takes a table, "
            "too"
        )
    table = read_table(recipe, settings)
    _search(table, settings, recipe_folders(recipe))
    return _made(table, own_code or not names_of_code(table))


def make_recipe(
    table: Mapping[str, Any], settings: Sequence[str] = (), folders: Sequence[Path] | None = None
) -> Recipe:
    """Make a recipe from a table, overridden with ``key=value`` settings; its ``base`` may name another recipe.

    Args:
        table: The table.
        settings: Settings that override the table's.
        folders: Folders of the files from which the table was read; modules that the table names are searched for
            there. None if Python code made the table: modules that an earlier recipe named keep their folders,
            others are searched for in the working folder.

    Raises:
        UserError: A key is unknown, or a value is out of range.

    Example:
        >>> from atoll.recipe.recipe import make_recipe
        >>> make_recipe({"base": "digits-ssd", "train": {"rounds": 50}}).train.rounds
        50
    """
    table = complete_table(table, settings)
    _search(table, settings, folders)
    return _made(table)


def check_kind(recipe: object) -> None:
    """Refuse what is no recipe.

    Raises:
        UserError: It is neither a name, a file, a table nor a `Recipe`.
    """
    if not isinstance(recipe, Recipe | Mapping | str | Path):
        raise UserError(
            f"a recipe is a preset's name, a TOML file, a table or an atoll.Recipe, not {type_words(recipe)}; "
            "name user-defined components in it as module:attribute"
        )


def give(
    recipe: Recipe | Mapping[str, Any] | str | Path,
    encoder: Any = None,
    data: Any = None,
    transform: Any = None,
    test_data: Any = None,
) -> Recipe:
    """Combine a recipe with objects from Python: an encoder (a module or its factory), images, a transform.

    A `Recipe` determines the size of the images. A name, a file or a table may leave it open; the encoder's
    configuration then determines it.

    Raises:
        UserError: The recipe, the data or the transform is invalid, or the encoder's configuration does not
            describe its input.
    """
    check_kind(recipe)
    if isinstance(recipe, Recipe):
        table = describe(recipe)
    else:
        table = complete_table(recipe) if isinstance(recipe, Mapping) else read_table(recipe)
    if data is not None or test_data is not None:
        table = with_data(table, data, test_data)
    if transform is not None:
        table = with_transform(table, transform)
    return _made(table if encoder is None else with_encoder(table, encoder))


def _made(table: Mapping[str, Any], own_code: bool = True) -> Recipe:
    made = build(Recipe, with_input(table, own_code=own_code))
    made = replace(made, title=clean(made.title))
    check_name(made.name)
    if own_code:
        _ = made.composed  # report a method that cannot be composed now, not after the data has loaded
    return made


def recipe_of(run: Run, settings: Sequence[str] = ()) -> Recipe:
    """Load the recipe of a run, overridden with ``key=value`` settings; code that it names is not imported.

    Raises:
        UserError: The file is missing or damaged, or a setting is invalid.
    """
    table = complete_table(run.recipe_table(), settings)
    names = names_of_code(table)
    search(names, (), keep=True)  # the run may come from elsewhere
    made = build(Recipe, table)  # complete: mean and std need not be read from the weights again
    return replace(made, title=clean(made.title))


def read_recipe(text: str) -> Recipe:
    """Parse a text that `Recipe.to_toml` wrote; modules that it names must be on Python's path.

    Raises:
        UserError: The text is not a recipe.

    Example:
        >>> from atoll.recipe.recipe import load_recipe, read_recipe
        >>> recipe = load_recipe("digits-ssd")
        >>> read_recipe(recipe.to_toml()) == recipe.completed()
        True
    """
    made = build(Recipe, parse_toml(text, "this recipe"))
    search(made.own_code, ())
    return replace(made, title=clean(made.title))


def _search(table: Mapping[str, Any], settings: Sequence[str], folders: Sequence[Path] | None) -> None:
    """Set where to search for the code that a recipe names; code that settings name: in the working folder."""
    typed = names_of_code(read_settings(settings))
    search(typed, None)
    named = names_of_code(table)
    search([name for name in named if name not in typed], folders, keep=folders is None, settings=named)


def names_of_code(table: Mapping[str, Any]) -> dict[str, str]:
    """Names of code in a recipe's table, ``module:attribute``, each with the setting, ``key=value``, that gives it.

    The table may have any form.
    """
    found: dict[str, str] = {}
    for key, value in _part(table, "method").items():
        for name in value if isinstance(value, list) else [value]:
            if isinstance(name, str) and ":" in name:
                found.setdefault(name, f"method.{key}={value}")
    options = _part(table, "options")
    for section, part, key, is_code in (
        ("model", _part(table, "model"), "encoder", is_own_code),
        ("views", _part(table, "views"), "transform", names_code),
        ("data", _part(table, "data"), "source", is_own_data),
        *((f"options.{n}.data", _part(_part(options, n), "data"), "source", is_own_data) for n in options),
    ):
        name = str(part.get(key, ""))
        if is_code(name):
            found.setdefault(name, f"{section}.{key}={name}")
    for key in ("during", "at_end"):
        names = _part(table, "evaluation").get(key)
        for name in names if isinstance(names, list | tuple) else ():
            if isinstance(name, str) and names_code(name):
                found.setdefault(name, f"evaluation.{key}={names}")
    return found


def _part(table: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = table.get(name)
    return part if isinstance(part, Mapping) else {}
