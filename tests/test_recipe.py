import tomllib
from dataclasses import dataclass
from typing import Literal

import pytest

from atoll.errors import UserError
from atoll.options import build, describe
from atoll.recipe import load_recipe, presets


@dataclass(frozen=True)
class Inner:
    x: float = 1.0


@dataclass(frozen=True)
class Outer:
    n: int = 1
    on: bool = False
    pair: tuple[float, float] = (0.0, 1.0)
    names: tuple[str, ...] | None = None
    kind: Literal["red", "green"] = "red"
    inner: Inner = Inner()


def test_build_converts_and_describe_goes_back():
    table = {"n": 3, "pair": [1, 2], "names": ["a"], "inner": {"x": 2}, "kind": "green"}
    made = build(Outer, table)
    assert made == Outer(3, False, (1.0, 2.0), ("a",), "green", Inner(2.0))
    assert build(Outer, describe(made)) == made


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ({"m": 1}, "unknown recipe key 'm'"),
        ({"inner": {"y": 1}}, "unknown recipe key 'inner.y'"),
        ({"n": 1.5}, "n = 1.5 is not a whole number"),
        ({"n": True}, "n = True is not a whole number"),
        ({"on": 1}, "on = 1 is not true or false"),
        ({"pair": [1]}, "needs 2 values"),
        ({"kind": "gren"}, "did you mean 'green'"),
    ],
)
def test_mistakes_get_a_sentence(table, sentence):
    with pytest.raises(UserError, match=sentence.replace("[", r"\[")):
        build(Outer, table)


@pytest.mark.parametrize("name", sorted(presets()))
def test_every_preset_is_valid_and_its_complete_form_means_the_same(name):
    recipe = load_recipe(name)
    again = tomllib.loads(recipe.to_toml())
    from atoll.recipe import Recipe

    complete = build(Recipe, again)
    assert complete.composed == recipe.composed
    assert complete.to_toml() == recipe.to_toml()


def test_misspelt_key_names_the_right_one():
    with pytest.raises(UserError, match=r"train\.ronds.*did you mean 'rounds'"):
        load_recipe("digits-ssd", ["train.ronds=3"])


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("train.rounds=-1", "train.rounds is -1"),
        ("train.lr=0", "train.lr is 0"),
        ("train.participation=1.5", "train.participation"),
        ("method.name=sdd", "unknown method 'sdd'; did you mean 'ssd'"),
        ("method.terms=['dsr','nothing']", "unknown term 'nothing'"),
        ("options.dsr.scal=3", "options.dsr.scal.*did you mean 'scale'"),
        ("options.simclr.temperature=3", "options.simclr belongs to no part"),
        ("method.name=nowhere:X", "no module 'nowhere'"),
        ("method.name=math:nothing", "has no 'nothing'"),
        ("method.name=math:pi", "no atoll Method"),
        ("train", "not of the form key=value"),
        ("seed.deep=1", "seed"),
    ],
)
def test_bad_settings(setting, sentence):
    with pytest.raises(UserError, match=sentence):
        load_recipe("digits-ssd", [setting])


def test_settings_and_axes():
    recipe = load_recipe(
        "digits-ssd",
        ["train.rounds=3", "method.terms=['pd']", "options.pd.kind=mse", "method.objective=simclr"],
    )
    method = recipe.composed
    assert recipe.train.rounds == 3
    assert [term.name for term in method.terms] == ["pd"]
    assert method.terms[0].kind == "mse"
    assert method.objective.name == "simclr"


def test_a_file_that_is_not_toml(tmp_path):
    path = tmp_path / "r.toml"
    path.write_text("a = [1")
    with pytest.raises(UserError, match="not valid TOML"):
        load_recipe(path)


def test_no_such_recipe():
    with pytest.raises(UserError, match=r"neither a preset nor a \.toml file; did you mean 'digits-ssd'"):
        load_recipe("digit-ssd")
