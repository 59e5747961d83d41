"""Files to begin with: a new recipe says what its base says, and a new method runs."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from atoll.commands.new import recipe_text, write_new
from atoll.core.config import describe, flatten
from atoll.core.errors import UserError
from atoll.recipe.recipe import load_recipe
from atoll.recipe.table import catalogue, presets
from tests.harness import run_tiny


@pytest.mark.parametrize("base", sorted(presets()))
def test_a_new_recipe_is_its_base_written_out(base: str, tmp_path: Path) -> None:
    path = write_new("recipe", tmp_path / "mine.toml", base)
    mine, theirs = (describe(load_recipe(one).completed()) for one in (path, base))
    assert {**mine, "name": ""} == {**theirs, "name": ""}


def test_the_lines_that_are_commented_out_are_the_defaults() -> None:
    text = recipe_text("digits-ssd")
    sections: dict[str, dict[str, object]] = {}
    place = ""
    for line in text.splitlines():
        if line.startswith("["):
            place = line.strip("[]") + "."
        key, equals, value = line.removeprefix("# ").partition(" = ")
        if equals and key.replace("_", "").replace(".", "").isalnum() and value:
            sections[place + key] = tomllib.loads(f"v = {value}")["v"]
    defaults = flatten(describe(load_recipe("digits-ssd").completed()))
    shown = {key: value for key, value in defaults.items() if key in sections}
    assert len(shown) > 60
    assert {key: sections[key] for key in shown if key not in ("name", "title")} == {
        key: value for key, value in shown.items() if key not in ("name", "title")
    }


def test_every_option_has_its_meaning_above_it() -> None:
    text = recipe_text("digits-ssd")
    options = catalogue()["schema"]["properties"]["options"]["properties"]["dsr"]["properties"]
    for name, option in options.items():
        first = option["description"].split()[0]
        line = next(
            i for i, line in enumerate(text.splitlines()) if line.split(" = ")[0].lstrip("# ") == name
        )
        above = "\n".join(text.splitlines()[max(0, line - 6) : line])
        assert f"# {first}" in above, name


def test_a_new_method_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    write_new("method", Path("near_method.py"))
    losses = [
        run_tiny(tmp_path / name, "method.name=near_method:METHOD", *settings).metrics[-1]["losses"]
        for name, settings in (("on", ()), ("off", ("options.stay.weight=0",)))
    ]
    assert losses[0] != losses[1]


@pytest.mark.parametrize(
    ("what", "name", "sentence"),
    [
        ("recipe", "mine.txt", "a recipe is a .toml file; call it mine.toml"),
        ("method", "mine.toml", "a method is a .py file; call it mine.py"),
        ("method", "my-method.py", "'my-method' is no name of a Python module"),
        ("recipe", "there.toml", "there.toml exists"),
    ],
)
def test_a_file_that_cannot_be_written_is_a_mistake(
    what: str, name: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there.toml").write_text("")
    with pytest.raises(UserError, match=sentence.replace(".", r"\.")):
        write_new(what, Path(name))
    assert Path("there.toml").read_text() == ""


def test_the_base_must_exist(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no recipe 'digits-sdd'"):
        write_new("recipe", tmp_path / "mine.toml", "digits-sdd")
    assert not list(tmp_path.iterdir())
