import re
import tomllib
from dataclasses import dataclass
from typing import Literal

import pytest
import torch

from atoll.core.config import build, describe
from atoll.core.errors import UserError
from atoll.data.options import DataOptions
from atoll.recipe.recipe import Recipe, give, load_recipe, presets


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
        ({"m": 1}, "unknown key 'm'"),
        ({"inner": {"y": 1}}, "unknown key 'inner.y'"),
        ({"n": 1.5}, "n = 1.5 is not a whole number"),
        ({"n": True}, "n = True is not a whole number"),
        ({"on": 1}, "on = 1 is not true or false"),
        ({"pair": [1]}, "needs 2 values"),
        (
            {"names": "a"},
            """names = 'a' is not a list; write names = ["a"] in a file, --set 'names=["a"]' in a shell""",
        ),
        ({"names": "[a, b]"}, 'write names = ["a", "b"] in a file'),
        ({"pair": 0.5}, "pair = 0.5 is not a list; write pair = [0.5] in"),
        ({"kind": "gren"}, "did you mean 'green'"),
    ],
)
def test_mistakes_get_a_sentence(table, sentence):
    with pytest.raises(UserError, match=re.escape(sentence)):
        build(Outer, table)


@pytest.mark.parametrize("name", sorted(presets()))
def test_every_preset_is_valid_and_its_complete_form_means_the_same(name):
    recipe = load_recipe(name)
    again = tomllib.loads(recipe.to_toml())
    from atoll.recipe.recipe import Recipe

    complete = build(Recipe, again)
    assert complete.composed == recipe.composed
    assert complete.to_toml() == recipe.to_toml()


def test_options_of_a_base_that_do_not_fit_another_method_are_left_out_as_the_sentence_says():
    other = "method.name=fed_barlow"
    with pytest.raises(
        UserError, match=r"options\.simclr belongs to .* add --set options\.simclr= \("
    ) as refused:
        load_recipe("digits-simclr", [other])
    assert "; known: " in str(refused.value)
    assert load_recipe("digits-simclr", [other, "options.simclr="]).composed.objective.name == "barlow_twins"


def test_misspelt_key_names_the_right_one():
    with pytest.raises(UserError, match=r"train\.ronds.*did you mean 'train\.rounds'"):
        load_recipe("digits-ssd", ["train.ronds=3"])


@pytest.mark.parametrize("name", ["my_method", "my_method.py", "my_method.METHOD"])
def test_a_module_without_its_attribute_is_recognised(tmp_path, monkeypatch, name):
    (tmp_path / "my_method.py").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        UserError, match=rf"unknown method '{name}'; .*; for your my_method\.py, write my_method:ATT"
    ):
        load_recipe("digits-ssd", [f"method.name={name}"])


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("train.rounds=-1", "train.rounds is -1"),
        ("train.lr=0", "train.lr is 0"),
        ("train.participation=1.5", "train.participation"),
        ("method.name=sdd", "unknown method 'sdd'; did you mean 'ssd'"),
        ("method.terms=['dsr','nothing']", "unknown term 'nothing'"),
        ("options.dsr.scal=3", "options.dsr.scal.*did you mean 'options.dsr.scale'"),
        ("options.simclr.temperature=3", "options.simclr belongs to no component"),
        ("method.name=nowhere:X", "no module 'nowhere'"),
        ("method.name=numpy:nothing", "has no 'nothing'"),
        ("method.name=numpy:pi", "not an atoll Method or Objective"),
        ("method.name=math:pi", "module 'math' is Python's own"),
        ("method.name=:METHOD", "cannot be imported"),
        ("method.name=.own:METHOD", "without folder and suffix, such as own:METHOD"),
        ("method.terms=['pd','dsr','pd']", "names 'pd' twice"),
        ("train.momentum=-1", "train.momentum is -1"),
        ("train.momentum=1.5", "train.momentum is 1.5"),
        ("train.weight_decay=-0.1", "train.weight_decay is -0.1"),
        ("train.decay=0.0", "train.decay is 0.0; it must be above 0"),
        ("train.decay=nan", "train.decay is nan"),
        ("engine.device=meta", "use auto, cpu or cuda"),
        ("engine.device=nonsense", "use auto, cpu or cuda"),
        ("engine.devices=['cpu', 'meta']", "engine.devices is 'meta'; use auto, cpu or cuda"),
        ("engine.devices=['auto']", 'write engine.devices = "auto"'),
        ("engine.devices=nonsense", "engine.devices = 'nonsense' is not a list"),
        ("train", "not of the form key=value"),
        ("seed=1\ntitle='x'", "--set seed: another key follows"),
        ("seed.deep=1", "seed"),
        ("method.terms=dsr", r"write method\.terms = \[\"dsr\"\] in a file"),
        *(
            (f"name={name}", r"^name = .* cannot name a run's folder; give it a short word")
            for name in ("x" * 300, "'../x'", "a/b", "'a\\b'", "..", "'  '", "''", '"a\\u0000"')
        ),
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


@pytest.mark.parametrize("encoding", ["utf-16", "latin-1"])
def test_a_file_in_another_encoding_says_which_to_save_it_in(encoding, tmp_path):
    (tmp_path / "mine.toml").write_text('base = "digits" # größer\n', encoding=encoding)
    with pytest.raises(UserError, match=r"mine\.toml is not UTF-8, as TOML is; save it in this encoding"):
        load_recipe(tmp_path / "mine.toml")


def test_no_such_recipe():
    with pytest.raises(UserError, match=r"neither a preset nor a \.toml file; did you mean 'digits-ssd'"):
        load_recipe("digit-ssd")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("x = (\n", r"SyntaxError: .*module_0\.py, line 1"),
        ("\nfrom math import nothing\n", r"ImportError: cannot import name 'nothing'.*module_1\.py, line 2"),
        ("import math\nmath.nothing\n", r"AttributeError: .*module_2\.py, line 2"),
        ("import no_such_library\n", "no module 'no_such_library'"),
        ("METHOD = int\n", "not an atoll Method or Objective"),
        (
            "from dataclasses import dataclass\nfrom atoll.components.base import Objective\n"
            "@dataclass(frozen=True)\nclass METHOD(Objective):\n    size: int\n",
            "cannot be constructed without options.*'size'",
        ),
    ],
)
def test_a_mistake_in_the_users_own_module(text, sentence, tmp_path, monkeypatch, request):
    name = f"module_{request.node.callspec.indices['text']}"
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=sentence):
        load_recipe("digits-ssd", [f"method.name={name}:METHOD"])


def test_a_method_of_your_own_keeps_what_it_does_not_share(tmp_path, monkeypatch):
    (tmp_path / "partly.py").write_text(
        "from atoll.methods.method import Method\nfrom atoll.objectives.simclr import SimCLR\n"
        "METHOD = Method(objective=SimCLR(), share=('encoder.*',))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    recipe = load_recipe("digits-ssd", ["method.name=partly:METHOD"])
    assert recipe.composed.share == recipe.completed().method.share == ("encoder.*",)
    other = load_recipe("digits-ssd", ["method.name=partly:METHOD", "method.share=['*']"])
    assert other.composed.share == ("*",)


def test_a_protocol_of_your_own_is_code_but_does_not_train():
    protocol = "evaluation.at_end=['knn', 'mine:measure']"
    recipe = load_recipe("digits-ssd", [protocol])
    assert (recipe.own_code, recipe.own_training_code) == (("mine:measure",), ())
    assert not recipe.trains_with_own_code
    both = load_recipe("digits-ssd", [protocol, "method.name=atoll.methods.ssd:METHOD"])
    assert both.own_training_code == ("atoll.methods.ssd:METHOD",)
    assert both.trains_with_own_code


def test_a_run_is_called_after_its_recipe(tmp_path):
    assert load_recipe("cifar10-table").name == "cifar10-table"  # and not after its base
    plain, named = tmp_path / "mine.toml", tmp_path / "other.toml"
    plain.write_text('base = "digits"')
    named.write_text('name = "own"\nbase = "digits"')
    assert load_recipe(plain).name == "mine"
    assert load_recipe(named).name == "own"
    assert load_recipe(named, ["name=set"]).name == "set"


def test_a_base_is_looked_for_beside_its_file(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/ours.toml").write_bytes("\ufefftitle = 'Größe'\nbase = 'digits'\n".encode())
    (tmp_path / "deep/mine.toml").write_text("base = 'ours.toml'\n[train]\nrounds = 3\n")
    recipe = load_recipe(tmp_path / "deep/mine.toml")
    assert (recipe.title, recipe.train.rounds, recipe.data.image_size) == ("Größe", 3, 16)


def test_a_circle_of_bases_is_a_mistake(tmp_path):
    (tmp_path / "a.toml").write_text("base = 'b.toml'\n")
    (tmp_path / "b.toml").write_text("base = 'a.toml'\n")
    with pytest.raises(UserError, match="is its own base"):
        load_recipe(tmp_path / "a.toml")


def test_a_circle_of_bases_over_folders_is_a_mistake(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "a.toml").write_text("base = 'deep/b.toml'\n")
    (tmp_path / "deep/b.toml").write_text("base = '../a.toml'\n")
    with pytest.raises(UserError, match="is its own base"):
        load_recipe(tmp_path / "a.toml")


def test_a_base_that_does_not_exist_names_the_file_that_wants_it(tmp_path):
    for base in ("other.toml", "digits-sdd"):
        (tmp_path / "a.toml").write_text(f"base = {base!r}\n")
        with pytest.raises(UserError, match=rf"{base}'?, the base of {tmp_path / 'a.toml'}"):
            load_recipe(tmp_path / "a.toml")


def test_base_is_no_setting():
    with pytest.raises(UserError, match="base stands in a recipe's file alone"):
        load_recipe("digits", ["base=digits-ssd"])


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"seed": "x"}, "seed = 'x' is not a whole number"),
        ({"train": None}, "train = None is not a table"),
        ({"data": {"limt": 5}}, "unknown key 'data.limt'; did you mean 'data.limit'"),
        ({"options": {"dsr": 5}}, "options.dsr = 5 is not a table"),
    ],
)
def test_a_recipe_that_code_makes_is_checked_like_a_file(wrong, sentence):
    with pytest.raises(UserError, match=re.escape(sentence)):
        Recipe(**wrong)
    assert Recipe(data={"limit": 5}).data == DataOptions(limit=5)


@pytest.mark.parametrize(
    ("method", "option"),
    [
        ("fed_align_uniform", "align_uniform.t"),
        ("fed_simclr", "simclr.temperature"),
        ("fed_moco", "moco.temperature"),
        ("fed_moco", "moco.queue"),
        ("supcon", "supcon.temperature"),
        ("supcon", "supcon.base_temperature"),
        ("moon", "moon.temperature"),
        ("ssd", "pd.temperature"),
        ("fedx", "fedx.temperature"),
        ("fedx", "fedx.target_temperature"),
        ("orchestra", "orchestra.temperature"),
        ("orchestra", "orchestra.global_clusters"),
        ("orchestra", "orchestra.local_clusters"),
        ("orchestra", "orchestra.memory"),
        ("fedca", "fedca_dictionary.temperature"),
        ("fedu2", "fur.projections"),
    ],
)
def test_an_option_that_must_be_above_0(method, option):
    with pytest.raises(UserError, match=rf"options\.{option} is 0.*; it must be above 0"):
        load_recipe("digits", [f"method.name={method}", f"options.{option}=0"])


@pytest.mark.parametrize(
    ("method", "setting"),
    [
        ("fed_byol", "byol.momentum=99"),
        ("fed_moco", "moco.momentum=7"),
        ("orchestra", "orchestra.momentum=-2"),
        ("orchestra", "orchestra.server_steps=-4"),
        ("fedema", "fedema.tau=-5"),
        ("fedca", "fedca_alignment.size=1"),
    ],
)
def test_an_option_without_meaning_is_refused(method, setting):
    key = setting.partition("=")[0]
    with pytest.raises(UserError, match=rf"options\.{key} is -?\d+(\.0)?; it must be"):
        load_recipe("digits", [f"method.name={method}", f"options.{setting}"])


def test_a_given_encoder_without_a_size_is_named_by_its_class():
    with pytest.raises(
        UserError, match=r"^the encoder Conv2d does not say .*such as \{\"data\": \{\"image_size\""
    ):
        give({"data": {"channels": 3}}, torch.nn.Conv2d(3, 4, 3), None, None)
