"""The pages in docs/ say what the code does: methods, options, defaults, protocols."""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from typing import Any

import pytest
import tomli_w

from atoll.commands.resume import MAY_CHANGE
from atoll.components.training import TrainOptions
from atoll.core.schema import Above, AtLeast, AtMost, Below, MinLength, OneOf, Rising
from atoll.data.options import DataOptions, PartitionOptions
from atoll.data.shifts.options import ShiftOptions
from atoll.data.views.options import PRESETS, ViewOptions, ViewSettings
from atoll.evaluation import EvaluationOptions
from atoll.evaluation.protocols import FINE_TUNES, PROBES
from atoll.methods.registry import (
    AGGREGATIONS,
    MERGES,
    METHODS,
    OBJECTIVES,
    SERVER_STEPS,
    TERMS,
    MethodOptions,
)
from atoll.models import ModelOptions
from atoll.recipe.engine_options import EngineOptions
from atoll.recipe.generate import MOST_CHOICES, with_tables
from atoll.recipe.recipe import Recipe
from atoll.report.groups import SAME
from tests.docs_tables import MARKED, TABLES, generated
from tests.pages import PAGES, ROOT, all_tables, tables

PARTS: dict[str, Any] = {**OBJECTIVES, **TERMS, **MERGES, **AGGREGATIONS, **SERVER_STEPS}
SECTIONS: dict[str, Any] = {
    "data": DataOptions,
    "partition": PartitionOptions,
    "shift": ShiftOptions,
    "views": ViewOptions,
    "model": ModelOptions,
    "method": MethodOptions,
    "train": TrainOptions,
    "evaluation": EvaluationOptions,
    "engine": EngineOptions,
}


# What they should say.


def literal(value: Any) -> str:
    """A value as it stands in a recipe."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(literal, value))}]"
    return "{}" if value == {} else tomli_w.dumps({"value": value}).strip().removeprefix("value = ")


def kind_of(hint: Any) -> str:
    """A type in a reader's words, without its bounds."""
    words = {int: "whole number", float: "number", str: "text", bool: "true or false"}
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        known = next((rule.limit for rule in inner[1:] if isinstance(rule, OneOf)), ())
        return kind_of(typing.Literal[known]) if 0 < len(known) <= MOST_CHOICES else kind_of(inner[0])
    if origin in (typing.Union, types.UnionType):
        kinds = [kind_of(one) for one in inner if one is not type(None)]
        return "text" if "text" in kinds else " or ".join(kinds)
    if origin is typing.Literal:
        return " or ".join(f"`{literal(one)}`" for one in inner)
    if origin is tuple:
        item = "text" if typing.get_origin(inner[0]) is typing.Literal else kind_of(inner[0])
        return f"{'list of' if inner[-1] is ... else len(inner)} {item}s"
    return "table" if origin is dict else words[hint]


def bounds_of(hint: Any) -> set[str]:
    """What a reader must be told of a type's bounds."""
    words = {Above: "above", AtLeast: "at least", Below: "below", AtMost: "at most", MinLength: "at least"}
    if {type(rule) for rule in getattr(hint, "__metadata__", ())} >= {AtLeast, AtMost}:
        return {"between {} and {}".format(*(rule.limit for rule in hint.__metadata__))}
    said = {"low <= high" for rule in getattr(hint, "__metadata__", ()) if isinstance(rule, Rising)}
    if said:
        return said
    own = {f"{words[type(r)]} {r.limit}" for r in getattr(hint, "__metadata__", ()) if type(r) in words}
    inner = typing.get_args(hint) if typing.get_origin(hint) is not typing.Literal else ()
    return own.union(*(bounds_of(one) for one in inner))


def default_of(field: dataclasses.Field[Any]) -> Any:
    """A field's default."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def shown(value: object) -> str:
    """A value as the pages' tables show it."""
    return "none" if value is None else f"`{literal(value)}`"


def option_rows(cls: Any, leave_out: tuple[str, ...] = ()) -> list[list[str]]:
    """Option, type without bounds, and default of each field."""
    hints, rows = typing.get_type_hints(cls, include_extras=True), []
    for field in dataclasses.fields(cls):
        if field.name not in leave_out:
            rows.append([f"`{field.name}`", kind_of(hints[field.name]), shown(default_of(field))])
    return rows


def check_rows(rows: list[list[str]], cls: Any, leave_out: tuple[str, ...] = ()) -> None:
    """A table of options is the dataclass, with all bounds, and each has a meaning."""
    expected = option_rows(cls, leave_out)
    assert [
        [row[0], row[1][: len(kind)], row[2]] for row, (_, kind, _) in zip(rows, expected, strict=True)
    ] == (expected)
    hints = typing.get_type_hints(cls, include_extras=True)
    for row, (name, kind, _) in zip(rows, expected, strict=True):
        bounds = bounds_of(hints[name.strip("`")])
        assert all(said in row[1] for said in bounds), row
        assert bounds or row[1] == kind, row
    assert all(len(row) == 4 and row[3] for row in rows)


# Methods.


def test_the_readme_counts_the_methods():
    assert f"* **{len(METHODS)} methods**" in (ROOT / "README.md").read_text()


def test_each_method_has_one_page_that_names_its_parts_and_its_paper() -> None:
    shown = [row for *_, header, rows in all_tables("name") if "objective" in header for row in rows]
    expected = [
        [
            f"`{name}`",
            f"`{method.objective.name}`",
            ", ".join(f"`{term.name}`" for term in method.terms) or "none",
            f"`{method.merge.name}`",
            f"`{method.aggregation.name}`",
            f"`{method.server.name}`",
            method.paper,
        ]
        for name, method in METHODS.items()
    ]
    assert sorted(shown) == sorted(expected)


def test_each_method_says_what_leaves_a_client_and_what_it_keeps() -> None:
    shown = [row for *_, header, rows in all_tables("name") if "returned by it" in header for row in rows]
    assert all(sent for _, sent, _, _ in shown)
    expected = [
        [f"`{name}`", "; ".join(method.egress), "; ".join(method.keeps) or "nothing"]
        for name, method in METHODS.items()
    ]
    assert sorted([name, up, kept] for name, _, up, kept in shown) == sorted(expected)


def test_a_method_that_changes_a_parts_default_says_so() -> None:
    pages = {
        row[0].strip("`"): page
        for page, _, header, rows in all_tables("name")
        if "objective" in header
        for row in rows
    }
    for name, method in METHODS.items():
        for component in method.components:
            for field in dataclasses.fields(component):
                value = getattr(component, field.name)
                if value != default_of(field):
                    said = f"`options.{component.name}.{field.name} = {literal(value)}`"
                    assert said in PAGES[pages[name]], (pages[name], said)


def test_the_index_leads_to_each_method_once() -> None:
    links = re.findall(r"^\| \[`(\w+)`\]\((\w+\.md)\)", PAGES["methods/index.md"], re.MULTILINE)
    assert sorted(name for name, _ in links) == sorted(METHODS)
    for name, page in links:
        assert f"\n| `{name}` | `" in PAGES[f"methods/{page}"]


@pytest.mark.parametrize("name", sorted(PARTS))
def test_the_options_of_a_part_stand_in_one_page_as_they_are(name: str) -> None:
    component, mark = PARTS[name], f"`[options.{name}]`"
    said = [rows for _, before, _, rows in all_tables("option") if before.endswith(mark)]
    if dataclasses.fields(component):
        (rows,) = said
        check_rows(rows, component)
    else:
        assert not said
        assert sum(f"{mark} has no keys" in text for text in PAGES.values()) == 1


@pytest.mark.parametrize("page", sorted(PAGES))
def test_tables_of_options_are_generated(page: str) -> None:
    assert with_tables(PAGES[page]) == PAGES[page], "run python -m atoll.recipe.generate"
    assert PAGES[page].count("| option | type | default |") == PAGES[page].count("<!-- options: ")


# Recipes, data, evaluation.


@pytest.mark.parametrize("name", sorted(SECTIONS))
def test_a_section_of_a_recipe_stands_as_it_is(name: str) -> None:
    (text,) = re.findall(
        rf"^## `\[{name}\]`.*?\n(.*?)(?=^## |\Z)", PAGES["recipes.md"], re.DOTALL | re.MULTILINE
    )
    (rows,) = (rows for _, header, rows in tables(text) if header[0] == "option")
    check_rows(rows, SECTIONS[name])


def test_the_top_of_a_recipe_stands_as_it_is() -> None:
    rows = next(rows for _, header, rows in tables(PAGES["recipes.md"]) if header[0] == "option")
    check_rows(rows, Recipe, leave_out=(*SECTIONS, "options"))


@pytest.mark.parametrize(
    ("page", "first", "named"),
    [
        ("recipes.md", r"\* `atoll resume` can change ", MAY_CHANGE),
        ("reports-and-evaluation.md", "Runs are one row, ", SAME),
    ],
)
def test_what_may_differ_between_runs_stands_as_it_is(page: str, first: str, named: tuple[str, ...]) -> None:
    (text,) = re.findall(rf"^{first}.*?\.(?=\s)", PAGES[page], re.DOTALL | re.MULTILINE)
    assert set(named) <= set(re.findall(r"`([\w.]+)`", text))


def test_the_presets_of_views_set_what_the_page_says() -> None:
    ((_, _, rows),) = (found for found in tables(PAGES["data.md"]) if found[1] == ["preset", "settings"])
    expected = []
    for name, settings in PRESETS.items():
        set_here = [
            f"`{field.name} = {literal(getattr(settings, field.name))}`"
            for field in dataclasses.fields(ViewSettings)
            if getattr(settings, field.name) != field.default
        ]
        expected.append([f"`{name}`", ", ".join(set_here) or "none"])
    assert rows == expected


@pytest.mark.parametrize("protocols", [PROBES, FINE_TUNES], ids=["probes", "fine-tuning"])
def test_the_constants_of_protocols_stand_as_they_are(protocols: dict[str, Any]) -> None:
    page = PAGES["reports-and-evaluation.md"]
    (rows,) = (
        rows
        for _, header, rows in tables(page)
        if header == ["constant", *(f"`{name}`" for name in protocols)]
    )
    fields = dataclasses.fields(next(iter(protocols.values())))
    assert rows == [
        [f"`{field.name}`", *(shown(getattr(one, field.name)) for one in protocols.values())]
        for field in fields
        if field.name not in ("name", "differs")
    ]
    for one in protocols.values():
        assert getattr(one, "differs", "") in page


def test_generated_tables_stand_as_the_code_has_them() -> None:
    """Otherwise run ``python -m tests.docs_tables``."""
    found = [name for text in PAGES.values() for _, name, _ in MARKED.findall(text)]
    assert sorted(found) == sorted(TABLES)
    for page, text in PAGES.items():
        assert generated(text) == text, page
