"""A recipe: one validated description of a run, from a preset or a TOML file."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

import tomli_w

from atoll.data.options import DataOptions
from atoll.data.partitions import PartitionOptions
from atoll.data.view_options import ViewOptions
from atoll.engines.federation import Plan
from atoll.engines.options import EngineOptions
from atoll.errors import UserError, did_you_mean
from atoll.evaluation import EvaluationOptions
from atoll.methods.catalogue import MethodOptions, complete, make_method
from atoll.methods.method import Method
from atoll.models import ModelOptions
from atoll.options import build, describe
from atoll.training import TrainOptions


@dataclass(frozen=True)
class Recipe:
    """Everything that decides a run's result, section by section.

    Attributes:
        name: of the run.
        title: a line about it.
        seed: every random stream comes from it.
        data: where the images come from.
        partition: which client holds which.
        views: augmentation.
        model: encoder and heads.
        method: which method, by axes.
        options: the options of the method's parts, by part.
        train: how clients train.
        evaluation: what is measured, and when.
        engine: where it runs.
    """

    name: str = "run"
    title: str = ""
    seed: int = 0
    data: DataOptions = field(default_factory=DataOptions)
    partition: PartitionOptions = field(default_factory=PartitionOptions)
    views: ViewOptions = field(default_factory=ViewOptions)
    model: ModelOptions = field(default_factory=ModelOptions)
    method: MethodOptions = field(default_factory=MethodOptions)
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    train: TrainOptions = field(default_factory=TrainOptions)
    evaluation: EvaluationOptions = field(default_factory=EvaluationOptions)
    engine: EngineOptions = field(default_factory=EngineOptions)

    @cached_property
    def composed(self) -> Method:
        """The method that the recipe composes."""
        return make_method(self.method, self.options)

    @property
    def label(self) -> str:
        """What tables and curves call a run of this recipe."""
        name = self.composed.title or self.name
        return f"{name}, centralised" if self.partition.kind == "centralised" else name

    def plan(self) -> Plan:
        """The recipe as the objects that an engine needs."""
        return Plan(
            self.composed, self.seed, self.data, self.partition, self.views, self.model, self.train,
            self.evaluation, self.engine,
        )  # fmt: skip

    def completed(self) -> Recipe:
        """The same recipe with every default written out."""
        method, options = complete(self.method, self.composed)
        return replace(self, method=method, options=options)

    def to_toml(self) -> str:
        """The complete recipe as TOML."""
        return tomli_w.dumps(describe(self.completed()))


def presets() -> dict[str, str]:
    """The recipes that come with Atoll: their texts by name."""
    folder = resources.files("atoll") / "recipes"
    return {
        entry.name.removesuffix(".toml"): entry.read_text("utf-8")
        for entry in sorted(folder.iterdir(), key=lambda entry: entry.name)
        if entry.name.endswith(".toml")
    }


def load_recipe(recipe: str | Path, settings: Sequence[str] = ()) -> Recipe:
    """A preset by name or a TOML file, with ``key=value`` settings laid over it.

    Raises:
        UserError: no such recipe, a file that is not TOML, an unknown key, a value out of range.
    """
    table = _read(str(recipe))
    for setting in settings:
        _lay(table, setting)
    made = build(Recipe, table)
    _ = made.composed  # so that a misspelt method is found now, not after the data has loaded
    return made


def read_recipe(text: str) -> Recipe:
    """The recipe in a text that `Recipe.to_toml` wrote.

    Raises:
        UserError: the text is no recipe.
    """
    try:
        return build(Recipe, tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"this recipe is not valid TOML: {error}") from None


def _read(recipe: str, folder: Path = Path(), above: tuple[str, ...] = ()) -> dict[str, Any]:
    """A preset or a file as a table, laid over its base; a file's base is looked for beside it."""
    known = presets()
    path = folder / recipe
    if recipe in known:
        text, place, folder = known[recipe], f"preset {recipe}", Path()
    elif path.suffix == ".toml" or path.is_file():
        try:
            text, place, folder = path.read_text("utf-8-sig"), str(path), path.parent
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"cannot read the recipe {path}: {error}") from None
    else:
        raise UserError(
            f"no recipe {recipe!r}: neither a preset nor a .toml file; {did_you_mean(recipe, known)}"
        )
    if place in above:
        raise UserError(f"{place} is its own base ({' → '.join([*above, place])}); end the circle")
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{place} is not valid TOML: {error}") from None
    base = table.pop("base", None)
    return table if base is None else _over(_read(str(base), folder, (*above, place)), table)


def _over(base: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in table.items():
        old = merged.get(key)
        merged[key] = _over(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _lay(table: dict[str, Any], setting: str) -> None:
    key, equals, text = setting.partition("=")
    if not equals or not key.strip():
        raise UserError(f"--set {setting!r} is not of the form key=value, such as train.rounds=20")
    *sections, last = key.strip().split(".")
    for section in sections:
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            raise UserError(f"--set {setting!r}: {section!r} is no section of a recipe")
    try:
        table[last] = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        table[last] = text.strip()
