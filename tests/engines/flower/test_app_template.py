"""The Flower app folder."""

import subprocess
import sys
import tomllib

import pytest

pytest.importorskip("flwr", reason="the extra atoll[flower] is not installed")

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from atoll.cli.main import main
from atoll.core.errors import UserError
from atoll.engines.flower.app_options import FlowerOptions
from atoll.engines.flower.app_template import write_app
from atoll.recipe.recipe import load_recipe
from tests.harness import tiny


def test_the_app_holds_the_complete_recipe_and_no_code(tmp_path):
    recipe = tiny("method.name=ssd")
    write_app(tmp_path / "app", recipe, 3, tmp_path / "run")
    assert {path.name for path in (tmp_path / "app").iterdir()} == {"pyproject.toml", "recipe.toml"}
    assert load_recipe(tmp_path / "app" / "recipe.toml").to_toml() == recipe.to_toml()
    app = tomllib.loads((tmp_path / "app" / "pyproject.toml").read_text())
    options = FlowerOptions.read(app["tool"]["flwr"]["app"]["config"])
    assert options.sites == 3
    assert options.out == str(tmp_path / "run")
    assert app["project"]["dependencies"] == []  # Flower would install them, from wherever


def test_the_app_holds_the_code_beside_the_recipe(tmp_path, monkeypatch, capsys):
    """It was left to the user, whose run then failed at every site."""
    here = tmp_path / "here"
    (here / "mine").mkdir(parents=True)
    files = {"one.py": "METHOD = 3\n", "mine/__init__.py": "", "mine/views.py": "def crop(image): ..."}
    for name, text in {**files, "other.py": "", "mine/notes.txt": ""}.items():
        (here / name).write_text(text)
    recipe = here / "own.toml"
    recipe.write_text('base = "digits"\nmethod.name = "one:METHOD"\nviews.transform = "mine.views:crop"\n')
    monkeypatch.chdir(tmp_path)
    assert main(["federate", "init", "app", "--recipe", str(recipe), "--sites", "2"]) == 0
    app = tmp_path / "app"
    written = {str(file.relative_to(app)): file for file in app.rglob("*") if file.is_file()}
    assert written.keys() == {"pyproject.toml", "recipe.toml", *files}
    assert {name: written[name].read_text() for name in files} == files
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in printed if line.startswith("code: ")] == [f"code: app/{name}" for name in files]
    assert main(["federate", "init", str(here), "--recipe", str(recipe), "--sites", "2"]) == 0
    (tmp_path / "next").mkdir()
    (tmp_path / "next" / "one.py").write_text("another")
    capsys.readouterr()
    assert main(["federate", "init", "next", "--recipe", str(recipe), "--sites", "2"]) == 2
    assert "next already contains a one.py; choose another folder" in capsys.readouterr().err
    assert not (tmp_path / "next" / "recipe.toml").exists()


def test_flower_accepts_the_app(tmp_path):
    from flwr.cli.config_utils import load_and_validate

    write_app(tmp_path / "app", tiny(), 2, tmp_path / "run")
    load_and_validate(tmp_path / "app" / "pyproject.toml")


def test_the_run_may_not_lie_in_the_app_that_sites_are_sent(tmp_path):
    with pytest.raises(UserError, match="sent to every site"):
        write_app(tmp_path / "app", tiny(), 2, tmp_path / "app" / "run")


def test_files_of_the_coordinator_are_checked_where_they_are(tmp_path, capsys):
    keys = tmp_path / "sites.toml"
    arguments = ["federate", "init", "--recipe", "digits-ssd", "--sites", "2", "--keys", str(keys)]
    with pytest.warns(UserWarning, match="does not exist here") as found:
        assert main([*arguments, str(tmp_path / "app"), "--images", str(tmp_path / "none")]) == 0
    named = [str(one.message).partition(" does not")[0] for one in found]
    assert named == [f"--keys {keys}", f"--images {tmp_path / 'none'}"]
    keys.write_text("[keys\n")
    assert main([*arguments, str(tmp_path / "broken")]) == 2
    assert "is not valid TOML" in capsys.readouterr().err
    east, west, north = (public_key() for _ in range(3))
    keys.write_text(f'[keys]\neast = "{east}"\nwest = "{west}"\n[revoked]\nwest = "lost"\n')
    assert main([*arguments, str(tmp_path / "few")]) == 2
    assert "allows 1 of 2 sites (--sites)" in capsys.readouterr().err
    assert not (tmp_path / "few").exists()
    keys.write_text(keys.read_text().replace("[revoked]", f'north = "{north}"\n[revoked]'))
    assert main([*arguments, str(tmp_path / "enough")]) == 0
    assert not capsys.readouterr().err


def test_a_folder_in_place_of_the_keys_is_refused(tmp_path, capsys):
    arguments = ["federate", "init", str(tmp_path / "app"), "--recipe", "digits-ssd", "--sites", "2"]
    assert main([*arguments, "--keys", str(tmp_path)]) == 2
    assert f"cannot read {tmp_path}: Is a directory" in capsys.readouterr().err


def public_key():
    key = ec.generate_private_key(ec.SECP384R1()).public_key()
    return key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()


def test_a_second_app_does_not_overwrite_the_first(tmp_path, capsys):
    arguments = ["federate", "init", str(tmp_path / "app"), "--recipe", "digits-ssd", "--sites", "2"]
    assert main(arguments) == 0
    assert main(arguments) == 2
    assert "already contains" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "nodes"),
    [
        (("--sites", "2"), ""),
        ((), ' local --federation-config "num-supernodes=10"'),
        (("--set", "partition.kind=natural"), ' local --federation-config "num-supernodes=CLIENTS"'),
        (("--set", "partition.kind=centralised"), ' local --federation-config "num-supernodes=1"'),
    ],
)
def test_the_command_says_how_to_run_the_app(tmp_path, capsys, settings, nodes):
    app = tmp_path / "my app"
    assert main(["federate", "init", str(app), "--recipe", "digits-ssd", *settings]) == 0
    assert f"flwr run '{app}'{nodes} --stream" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("site", 4),
        ("sites", "4"),
        ("sites", -1),
        ("deadline", 0.0),
        ("other-environment", 1),
        ("sites", True),
    ],
)
def test_a_mistaken_configuration_gets_a_sentence(key, value):
    with pytest.raises(UserError):
        FlowerOptions.read({key: value})


def test_without_flower_the_command_says_how_to_get_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "flwr", None)
    assert main(["federate", "init", str(tmp_path / "app"), "--recipe", "digits-ssd"]) == 2
    assert "pip install '.[flower]'" in capsys.readouterr().err


def test_atoll_does_not_import_flower():
    modules = "atoll.cli.main, atoll.commands.run, atoll.commands.egress"
    code = f"import sys, {modules}; sys.exit('flwr' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
