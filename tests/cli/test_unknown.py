"""A recipe that names code: three commands never run it, and a run looks for it in few places."""

import hashlib
import json
import os
import re
import subprocess
import sys
import tomllib

import pytest
from torch import nn

from atoll.cli.main import main
from atoll.commands.check import check_run
from atoll.commands.compare import by_method
from atoll.commands.evaluate import evaluate_run
from atoll.core.errors import UserError
from atoll.models import Encoder, build_encoder, load_encoder, save_encoder
from atoll.models.external import ExternalEncoder
from atoll.papers.reproduction import find_table
from atoll.recipe.recipe import load_recipe, read_recipe
from tests.harness import TINY, run_tiny

CODE = """\
from pathlib import Path
from atoll.methods.ssd import METHOD
Path("it-ran").touch()
"""
ENCODER = """\
from torch import nn
class Net(nn.Sequential):
    default_cfg = {"input_size": (3, 48, 48), "mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
encoder = lambda: Net(nn.AdaptiveAvgPool2d(1), nn.Flatten())
"""
SETTINGS = [f"--set={text}" for text in TINY]


@pytest.fixture
def module(tmp_path, monkeypatch, request):
    """A module in a recipe's folder, with a name that no other test has; the working folder is another one."""
    name = f"foreign_{abs(hash(request.node.name))}"
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / f"{name}.py").write_text(CODE)
    (theirs / "recipe.toml").write_text(f'base = "digits-ssd"\n[method]\nname = "{name}:METHOD"\n')
    mine = tmp_path / "mine"
    mine.mkdir()
    monkeypatch.chdir(mine)
    monkeypatch.setattr("sys.path", list(sys.path))
    return name


@pytest.mark.parametrize("command", ["egress", "data", "init"])
def test_commands_that_look_import_nothing(command, module, tmp_path, capsys):
    recipe = str(tmp_path / "theirs" / "recipe.toml")
    arguments = {
        "egress": ["egress", recipe],
        "data": ["data", recipe, "-o", "x.svg", *SETTINGS],
        "init": ["federate", "init", "app", "--recipe", recipe],
    }[command]
    if command == "init":
        pytest.importorskip("flwr", reason="the extra atoll[flower] is not installed")
    assert main(arguments) == (2 if command == "egress" else 0)
    path = tmp_path / "theirs" / f"{module}.py"
    error = capsys.readouterr().err
    assert f"{module}:METHOD ({path}, SHA-256 {hashlib.sha256(CODE.encode()).hexdigest()})" in error
    assert "it was not imported, so what it does and what it sends is unknown" in error
    assert not (tmp_path / "mine" / "it-ran").exists()
    assert module not in sys.modules
    if command == "init":
        assert f'name = "{module}:METHOD"' in (tmp_path / "mine" / "app" / "recipe.toml").read_text()


def test_a_site_that_has_read_the_code_gets_the_list_and_the_digest(module, tmp_path, capsys):
    path = tmp_path / "theirs" / "recipe.toml"
    assert main(["egress", str(path), "--run-code", "--json", *SETTINGS]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "weights.encoder.conv1.weight" in {item["name"] for item in found["up"]}
    text = load_recipe(path, TINY).to_toml()
    assert f"{module}:METHOD" in text
    assert found["recipe"] == hashlib.sha256(text.encode()).hexdigest()


def test_an_app_has_the_size_that_the_recipes_own_encoder_was_made_for(module, tmp_path, capsys):
    pytest.importorskip("flwr", reason="the extra atoll[flower] is not installed")
    theirs = tmp_path / "theirs"
    (theirs / f"{module}.py").write_text(ENCODER)
    (theirs / "recipe.toml").write_text(f'[model]\nencoder = "{module}:encoder"\n')
    init = ["federate", "init", "app", "--recipe", str(theirs / "recipe.toml")]
    assert main(init) == 2
    assert "so the size of its images is unknown; set data.image_size" in capsys.readouterr().err
    assert main([*init, "--run-code"]) == 0
    written = tomllib.loads((tmp_path / "mine" / "app" / "recipe.toml").read_text())
    assert (written["data"]["image_size"], written["views"]["mean"]) == (48, [0.5] * 3)


def test_a_run_imports_from_the_recipes_own_folder(module, tmp_path):
    assert load_recipe(tmp_path / "theirs" / "recipe.toml").composed.title == "SSD"
    assert (tmp_path / "mine" / "it-ran").exists()


def test_a_base_in_another_folder_has_its_own_code(module, tmp_path):
    mine = tmp_path / "mine" / "mine.toml"
    mine.write_text('base = "../theirs/recipe.toml"\nseed = 3\n')
    assert load_recipe(mine).composed.title == "SSD"


def test_what_a_file_names_is_not_taken_from_the_working_folder(module, tmp_path):
    os.rename(tmp_path / "theirs" / f"{module}.py", tmp_path / "mine" / f"{module}.py")
    with pytest.raises(UserError, match=f"no module '{module}' in {tmp_path / 'theirs'} or the environment"):
        load_recipe(tmp_path / "theirs" / "recipe.toml")
    sys.path.insert(0, "")  # as in an interactive session
    with pytest.raises(UserError, match=f"no module '{module}'"):
        load_recipe(tmp_path / "theirs" / "recipe.toml")
    assert sys.path[0] == ""
    assert not (tmp_path / "mine" / "it-ran").exists()
    typed = load_recipe(tmp_path / "theirs" / "recipe.toml", [f"method.name={module}:METHOD"])
    assert typed.composed.title == "SSD"


TABLE = """
title = "Theirs"
recipe = "{recipe}"
columns = ["rank"]
rows = [[["one"]]]
[measures]
"rank" = {{ of = "geometry/effective_rank" }}
[choices.one]
title = "One"
changes.method.name = "{module}:METHOD"
"""


@pytest.mark.parametrize("recipe", ["recipe.toml", "digits-ssd"])
def test_a_tables_code_is_taken_from_its_own_folder_alone(recipe, module, tmp_path):
    table = tmp_path / "theirs" / "table.toml"
    table.write_text(TABLE.format(recipe=recipe, module=module))
    code = tmp_path / "theirs" / f"{module}.py"
    os.rename(code, tmp_path / "mine" / code.name)
    with pytest.raises(UserError, match=f"no module '{module}' in {tmp_path / 'theirs'}"):
        find_table(str(table))
    assert not (tmp_path / "mine" / "it-ran").exists()
    os.rename(tmp_path / "mine" / code.name, code)
    (row,) = find_table(str(table)).rows
    assert row.recipe.composed.title == "SSD"


def test_a_comparison_of_methods_takes_a_files_code_from_its_folder(module, tmp_path):
    theirs = tmp_path / "theirs"
    (theirs / f"{module}.py").write_text("from torch import nn\nencoder = lambda: nn.Flatten()\n")
    (tmp_path / "mine" / f"{module}.py").write_text("raise RuntimeError('the working folder')\n")
    (theirs / "recipe.toml").write_text(
        f'[data]\nchannels = 1\nimage_size = 8\n[model]\nencoder = "{module}:encoder"\n'
        "[views]\nmean = [0.5]\nstd = [0.5]\n"
    )
    recipe = load_recipe(theirs / "recipe.toml")
    sys.modules.pop(module, None)
    for made in by_method(recipe, ["ssd", "fed_simclr"]):
        assert isinstance(build_encoder(made.model, 1, 8), Encoder)


def test_a_recipe_from_a_coordinator_imports_from_pythons_path_alone(module, tmp_path, monkeypatch):
    text = f'[method]\nname = "{module}:METHOD"\n'
    monkeypatch.chdir(tmp_path / "theirs")
    with pytest.raises(UserError, match=f"no module '{module}'"):
        _ = read_recipe(text).composed
    sys.path.insert(0, str(tmp_path / "theirs"))
    assert read_recipe(text).composed.title == "SSD"


def test_reading_a_run_from_elsewhere_imports_nothing(module, tmp_path, monkeypatch):
    """Its recipe may name a file that lies in the working folder, because both came in one archive."""
    run = run_tiny(tmp_path / "run", "data.limit=40", "partition.clients=2", "train.rounds=1")
    named = re.sub(
        r'\[method\]\nname = "\w+"', f'[method]\nname = "{module}:METHOD"', run.read("recipe.toml")
    )
    assert f"{module}:METHOD" in named
    run.write("recipe.toml", named)
    monkeypatch.chdir(tmp_path / "theirs")
    assert check_run(run).damaged == []
    assert 0 <= evaluate_run(run, "knn")["knn/accuracy"] <= 1
    assert main(["report", str(run.folder)]) == 0
    assert not (tmp_path / "theirs" / "it-ran").exists()
    assert main(["resume", str(run.folder)]) == 2
    assert not (tmp_path / "theirs" / "it-ran").exists()
    assert module not in sys.modules


def encoder_file(path, name):
    """An encoder's file as someone else may send it."""
    encoder = ExternalEncoder(nn.Flatten(), name, (1, 8, 8))
    encoder.spec = {"encoder": name, "channels": 1, "image_size": 8}
    save_encoder(path, encoder, {})
    return path


def test_an_encoder_from_elsewhere_imports_from_pythons_path_alone(module, tmp_path, monkeypatch):
    theirs = tmp_path / "theirs"
    monkeypatch.chdir(theirs)
    (theirs / f"{module}.py").write_text(CODE + "from torch import nn\nNet = nn.Flatten\n")
    path = encoder_file(theirs / "encoder.safetensors", f"{module}:Net")
    with pytest.raises(
        UserError, match=f"no module '{module}' in the environment; .*set PYTHONPATH"
    ) as error:
        load_encoder(path)
    assert "damaged" not in str(error.value)
    assert load_encoder(path, nn.Flatten).dim == 64
    assert not (theirs / "it-ran").exists()
    sys.path.append(str(theirs))
    assert load_encoder(path).dim == 64
    assert (theirs / "it-ran").exists()


def test_an_encoders_file_calls_nothing_of_pythons_own(tmp_path):
    path = encoder_file(tmp_path / "encoder.safetensors", "http.server:test")  # serves the working folder
    with pytest.raises(UserError, match=r"'http\.server:test': module 'http\.server' is Python's own"):
        load_encoder(path)


def test_the_documented_example_works_from_its_folder(module, tmp_path):
    """A name that is typed is found in the working folder, by worker processes too."""
    command = [
        sys.executable,
        "-c",
        "from atoll.cli.main import main; raise SystemExit(main())",
        "run",
        "digits-ssd",
    ]
    settings = ["--set", *TINY, f"method.name={module}:METHOD", "engine.workers=2", "train.rounds=1"]
    done = subprocess.run(
        [*command, *settings, "--out", str(tmp_path / "run")],
        cwd=tmp_path / "theirs", env={**os.environ, "PYTHONSAFEPATH": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "theirs" / "it-ran").exists()
