"""The description of recipes that is read before PyTorch: up to date, a JSON schema, and the classes' own rules."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from types import MappingProxyType

import jsonschema
import numpy as np
import pytest
import torch

from atoll.core.errors import UserError
from atoll.methods.registry import COMPONENTS, METHODS
from atoll.recipe import generate
from atoll.recipe.recipe import load_recipe, make_recipe, presets
from atoll.recipe.table import catalogue, complete_table, read_table

SCHEMA = catalogue()["schema"]


def test_the_catalogue_is_what_the_code_says() -> None:
    assert catalogue() == json.loads(json.dumps(generate.catalogue())), "run python -m atoll.recipe.generate"


def test_it_knows_all_methods_and_components() -> None:
    assert {one["name"] for family in catalogue()["methods"].values() for one in family} == set(METHODS)
    assert set(SCHEMA["properties"]["options"]["properties"]) == set(COMPONENTS)


def test_it_is_a_schema_of_the_draft_that_it_names() -> None:
    assert SCHEMA["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("name", sorted(presets()))
def test_every_preset_is_valid_as_it_stands_and_complete(name: str) -> None:
    validator = jsonschema.Draft202012Validator(SCHEMA)
    validator.validate(tomllib.loads(presets()[name]))
    validator.validate(tomllib.loads(load_recipe(name).to_toml()))


BAD = [
    (
        {"engine": {"channels_last": "yes"}},
        """engine.channels_last = 'yes' is not true or false or "auto\"""",
    ),
    ({"engine": {"devices": "cuda:0"}}, """engine.devices = 'cuda:0' is not a list or "auto\""""),
    ({"engine": {"devices": ["cuda:0", 3]}}, "engine.devices = 3 is not a text"),
    ({"train": {"lrr": 1}}, "unknown key 'train.lrr'; did you mean 'train.lr'"),
    ({"train": {"lr": -1}}, "train.lr is -1; it must be above 0"),
    ({"train": {"rounds": "ten"}}, "train.rounds = 'ten' is not a whole number"),
    ({"train": {"optimizer": "sdg"}}, "train.optimizer is 'sdg'; did you mean 'sgd'"),
    ({"rounds": 3}, "unknown key 'rounds'; did you mean 'train.rounds'"),
    ({"model": {"rounds": 3}}, "unknown key 'model.rounds'; did you mean 'train.rounds'?"),
    ({"train": {"alpha": 0.5}}, "unknown key 'train.alpha'; did you mean 'partition.alpha'?"),
    ({"train": {"seed": 1}}, "unknown key 'train.seed'; did you mean 'seed'?"),
    ({"data": {"batch_size": 8}}, "did you mean 'train.batch_size' or 'evaluation.batch_size'?"),
    ({"method": {"temperature": 0.5}}, "unknown key 'method.temperature'; known: method.aggregation, "),
    ({"train.rounds": 3}, "unknown key 'train.rounds'; write 'rounds' in the table 'train'"),
    ({"train": 3}, "train = 3 is not a table; set keys of it, such as train.rounds"),
    ({"views": {"crop_scale": [0.5]}}, "views.crop_scale needs 2 values"),
    ({"views": {"crop_scale": [0.5, 2.0]}}, "views.crop_scale is"),
    ({"model": {"encoder": "resnet8"}}, "model.encoder is 'resnet8'"),
    (
        {"options": {"dsr": {"scal": 3}}},
        "unknown key 'options.dsr.scal'; did you mean 'options.dsr.scale'",
    ),
    ({"options": {"pd": {"temperature": 0}}}, "options.pd.temperature is 0; it must be above 0"),
    ({"method": {"name": "sdd"}}, "unknown method 'sdd'; did you mean 'ssd'"),
    ({"method": {"terms": ["dsr", "nothing"]}}, "unknown term 'nothing'"),
    ({"method": {"terms": "dsr"}}, 'write method.terms = ["dsr"]'),
]
OBJECTS = {
    "model.weights.conv1 is array(": {"model": {"weights": {"conv1": np.zeros((300, 300))}}},
    "method.objective is <class 'pathlib": {"method": {"objective": Path}},
    "evaluation.at_end is {'knn'}, and": {"evaluation": {"at_end": {"knn"}}},
    "train.schedule is <function": {"train": {"schedule": lambda round: 0.1}},
}


@pytest.mark.parametrize("sentence", OBJECTS)
def test_an_object_that_no_file_can_hold_is_refused_in_a_short_sentence(sentence: str) -> None:
    with pytest.raises(UserError) as refused:
        complete_table(OBJECTS[sentence])
    said = str(refused.value)
    assert sentence in said
    assert "name code of your own in a file as 'module:attribute'" in said
    assert "encoder=…, data=…, transform=…" in said
    assert len(said) < 400
    assert "\n" not in said


@pytest.mark.parametrize("widths", [np.array([16, 8]), (16, np.int64(8)), range(16, 7, -8)])
def test_a_row_of_numbers_is_a_list(widths: object) -> None:
    found = complete_table({"model": {"projector_hidden": widths}})["model"]["projector_hidden"]
    assert found == [16, 8]
    assert {type(width) for width in found} == {int}


def test_the_folders_of_clients_are_the_clients_unless_the_recipe_or_its_base_says_otherwise() -> None:
    folders = {"data": {"source": "clients", "path": "scans"}, "partition": {"clients_per_value": 2}}
    assert complete_table(folders)["partition"] == {"kind": "natural", "clients_per_value": 2}
    assert tomllib.loads(make_recipe(folders).to_toml())["partition"]["kind"] == "natural"
    assert complete_table(folders, ["partition.kind=iid"])["partition"]["kind"] == "iid"
    assert complete_table({"base": "digits", **folders})["partition"]["kind"] == "dirichlet"
    assert "kind" not in complete_table({"partition": {"clients": 3}})["partition"]


@pytest.mark.parametrize(("table", "sentence"), BAD)
def test_what_we_refuse_an_editor_refuses(table: dict[str, object], sentence: str) -> None:
    with pytest.raises(UserError) as refused:
        complete_table(table)
    assert sentence in str(refused.value)
    assert not jsonschema.Draft202012Validator(SCHEMA).is_valid(table)


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("options.simclr.temperature=3", "options.simclr belongs to no component"),
        (
            "options.simclr.temperature=3",
            r"compare RECIPE --methods NAME does so by itself\)",
        ),
        ("train.milestones=[60,80]", "each must be above 0 and below 1 .a share of the rounds, not a round"),
        ("data.path=2024", "data.path = 2024 is not a text; put it in quotes"),
        ("train.lr=.1", "train.lr = '.1' is not a number as TOML writes it, such as 0.1"),
        ("method.terms=['pd','dsr','pd']", "names 'pd' twice"),
        ("options.simclr.temperatur=3", "did you mean 'options.simclr.temperature'"),
    ],
)
def test_what_is_wrong_says_what_to_do(setting: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        read_table("digits-ssd", [setting])


@pytest.mark.parametrize(
    "settings",
    [
        ["method.name=mine:METHOD", "options.my_part.anything=1"],
        ["method.terms=['mine:Term','pd']", "options.my_part.anything=[1, 2]"],
        ["method.merge=mine:Merge"],
    ],
)
def test_a_users_own_components_are_left_to_the_real_check(settings: list[str]) -> None:
    table = read_table("digits-align-uniform", settings)
    assert jsonschema.Draft202012Validator(SCHEMA).is_valid(table)


HEAVY = ("torch", "numpy", "rich", "PIL", "sklearn")


def ran(*arguments: str) -> tuple[int, str, list[str]]:
    """The command's exit code, what it said, and which heavy packages it imported."""
    code = (
        "import sys\n"
        "from atoll.cli.main import main\n"
        "try: status = main(sys.argv[1:])\n"
        "except SystemExit as left: status = left.code\n"
        f"print([name for name in {HEAVY} if name in sys.modules])\n"
        "sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    return done.returncode, done.stderr, json.loads(done.stdout.splitlines()[-1].replace("'", '"'))


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["run", "--help"], ["schema"], ["methods", "--json"]]
)
def test_what_needs_no_pytorch_does_not_import_it(arguments: list[str]) -> None:
    code, said, heavy = ran(*arguments)
    assert (code, said) == (0, "")
    assert set(heavy) <= (set() if arguments == ["schema"] else {"rich"})  # the help is in colour


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["run", "digits-ssd", "--set", "train.lrr=1"], "train.lrr"),
        (["run", "digits-ssd", "--set", "train.lr=-1"], "train.lr is -1"),
        (["run", "digits-ssd", "--set", "options.dsr.scal=3"], "options.dsr.scal"),
        (["run", "digits-ssd", "--set", "method.name=sdd"], "unknown method 'sdd'"),
        (["run", "digit-ssd"], "no recipe 'digit-ssd'"),
        (["compare", "digits-ssd", "digits-sdd"], "no recipe 'digits-sdd'"),
    ],
)
def test_a_recipes_mistake_is_told_before_pytorch_is_imported(arguments: list[str], sentence: str) -> None:
    code, said, heavy = ran(*arguments)
    assert code == 2
    assert said.startswith("atoll: ")
    assert sentence in said
    assert heavy == []


@pytest.mark.parametrize(
    ("settings", "key", "default"),
    [
        (["data.limit="], "data.limit", None),
        (["train.rounds=3", "train.rounds="], "train.rounds", 100),
        (["model="], "model.width", None),
        (["options.align_uniform.t=3", "options.align_uniform.t= "], "options", {"align_uniform": {}}),
        (['title="a title"', "title="], "title", ""),
    ],
)
def test_a_setting_without_a_value_resets_what_the_base_sets(settings, key, default) -> None:
    recipe = load_recipe("board-short", settings)
    found = recipe
    for name in key.split("."):
        found = getattr(found, name)
    assert found == default


def test_none_resets_a_key_in_a_table() -> None:
    assert make_recipe({"base": "board-short", "train": {"rounds": None}}).train.rounds == 100


def test_a_table_may_hold_what_python_code_computes() -> None:
    """Mappings that are no dicts, as configuration libraries have, numbers of NumPy and PyTorch, and paths."""
    given = {
        "base": Path("board-short"),
        "seed": np.int64(3),
        "data": {"path": Path("some") / "images", "labels": np.bool_(True)},
        "partition": MappingProxyType({"alpha": np.float32(0.5), "clients": np.arange(9)[7]}),
        "views": {"mean": (np.float32(0.25), 0.5, torch.tensor(0.75))},
    }
    written = {
        "base": "board-short",
        "seed": 3,
        "data": {"path": os.path.join("some", "images"), "labels": True},
        "partition": {"alpha": 0.5, "clients": 7},
        "views": {"mean": [0.25, 0.5, 0.75]},
    }
    assert make_recipe(given).to_toml() == make_recipe(written).to_toml()


@pytest.mark.parametrize("table", [{3: 4}, {"train": {3: 4}}, {"options": {3: {}}}, {None: 4}])
def test_a_key_that_is_no_text_gets_a_sentence(table: dict[str, object]) -> None:
    with pytest.raises(UserError, match=r"a recipe has the key .*; its keys are texts"):
        make_recipe(table)


def test_a_recipe_that_nests_too_deeply_gets_a_sentence(tmp_path: Path) -> None:
    """tomllib reads dotted names of any length; each function that follows them is recursive."""
    keys = ".".join("a" * 3000)
    (tmp_path / "deep.toml").write_text(f"[{keys}]\nb = 1\n")
    for read in (lambda: read_table(tmp_path / "deep.toml"), lambda: complete_table({}, [f"{keys}=1"])):
        with pytest.raises(UserError, match="a recipe nests at most 50 levels deep"):
            read()


def test_a_key_that_does_not_exist_cannot_be_reset() -> None:
    with pytest.raises(UserError, match=r"unknown key 'data.limitt'; did you mean 'data.limit'"):
        load_recipe("board-short", ["data.limitt="])
