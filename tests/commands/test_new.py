"""Files to begin with: a new recipe says what its base says, and a new method runs."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from atoll.cli.main import main
from atoll.commands.new import recipe_text, write_new, write_site
from atoll.components.base import Component
from atoll.core.config import describe, flatten
from atoll.core.errors import UserError
from atoll.engines.flower.local_privacy import LocalPrivacy
from atoll.engines.flower.policy import Policy
from atoll.recipe.recipe import load_recipe
from atoll.recipe.table import catalogue, presets
from tests.harness import run_tiny


@pytest.mark.parametrize("base", sorted(presets()))
def test_a_new_recipe_is_its_base_written_out(base: str, tmp_path: Path) -> None:
    path = write_new("recipe", tmp_path / "mine.toml", base)
    mine, theirs = (describe(load_recipe(one).completed()) for one in (path, base))
    assert {**mine, "name": ""} == {**theirs, "name": ""}


def test_a_new_recipe_keeps_the_options_of_a_component_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(write_new("method", tmp_path / "own_method.py"), tmp_path / "kept.py")
    monkeypatch.chdir(tmp_path)
    plain = load_recipe("digits", ["method.name=own_method:METHOD"]).completed()
    (name, options) = next((name, table) for name, table in plain.options.items() if table)
    key, value = next((key, value) for key, value in options.items() if isinstance(value, float))
    text = plain.to_toml().replace(f"{key} = {value}", f"{key} = {value + 3}")
    (tmp_path / "base.toml").write_text(text)
    mine = load_recipe(write_new("recipe", tmp_path / "mine.toml", "base.toml")).completed()
    assert mine.options[name][key] == value + 3


def test_the_hint_for_a_new_method_in_another_folder_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    assert main(["new", "method", "sub/hinted.py"]) == 0
    assert "run it: cd sub && atoll run digits-ssd --set method.name=hinted:METHOD" in capsys.readouterr().out
    assert main(["new", "recipe", "my run.toml"]) == 0
    assert "run it: atoll run 'my run.toml'" in capsys.readouterr().out


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


def test_the_hooks_that_a_new_method_lists_are_called_so(tmp_path: Path) -> None:
    listed = re.findall(r"# def (\w+)\((.*?)\)", write_new("method", tmp_path / "near_method.py").read_text())
    assert len(listed) == 7
    for name, parameters in listed:
        assert parameters == ", ".join(inspect.signature(getattr(Component, name)).parameters), name


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


# A site's folder.


@pytest.fixture
def site(tmp_path: Path) -> Path:
    return write_site(tmp_path / "our site" / "east")


def test_a_new_policy_restricts_nothing(site: Path) -> None:
    assert Policy.read(site / "policy.toml") == Policy()


def test_a_new_policy_shows_every_key_with_a_valid_value(site: Path) -> None:
    path = site / "policy.toml"
    path.write_text(re.sub(r"^# (\w+ = |\[)", r"\1", path.read_text(), flags=re.MULTILINE))
    policy, table = Policy.read(path), tomllib.loads(path.read_text())
    assert set(table) == {field.name for field in dataclasses.fields(Policy)}
    assert set(table["privacy"]) == {field.name for field in dataclasses.fields(LocalPrivacy)}
    unlimited = {field.name for field in dataclasses.fields(Policy) if getattr(policy, field.name) is None}
    assert unlimited == set()


@pytest.mark.parametrize("tool", ["bash -n", "shellcheck"])
def test_the_start_script_is_valid(tool: str, site: Path) -> None:
    beside = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    program = shutil.which(tool.split()[0], path=beside)
    if program is None:
        pytest.skip(f"{tool} is not installed")
    subprocess.run([program, *tool.split()[1:], site / "start.sh"], check=True)


def started(site: Path, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """Run the start script with a `flower-supernode` that prints its arguments as JSON."""
    node = tmp_path / "bin" / "flower-supernode"
    node.parent.mkdir(exist_ok=True)
    node.write_text("#!/usr/bin/env python3\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    node.chmod(0o755)
    script = site / "start.sh"  # its own line puts this Python's folder first, where Flower is
    script.write_text(re.sub(r'PATH="[^:]*:', f'PATH="{node.parent}:', script.read_text()))
    return subprocess.run([script], capture_output=True, text=True, cwd="/")


def test_the_start_script_starts_the_node_as_the_documentation_does(site: Path, tmp_path: Path) -> None:
    script, images = site / "start.sh", tmp_path / "our images"
    images.mkdir()
    filled = script.read_text().replace('coordinator=""', 'coordinator="HOST:9092"')
    script.write_text(filled.replace('images=""', f'images="{images}"'))
    for name in ("atoll-node", "ca.crt"):
        (site / name).write_text("")
    call = started(site, tmp_path)
    assert call.returncode == 0, call.stderr
    arguments = json.loads(call.stdout)
    options = dict(zip(arguments[::2], arguments[1::2], strict=True))
    assert options.pop("--node-config").split('" ') == [
        'site="east',
        f'data="{images}',
        'source="images',
        f'state="{site}/state',
        f'policy="{site}/policy.toml"',
    ]
    assert options == {
        "--superlink": "HOST:9092",
        "--root-certificates": f"{site}/ca.crt",
        "--auth-supernode-private-key": f"{site}/atoll-node",
    }


def test_a_start_script_that_is_not_filled_in_says_so(site: Path, tmp_path: Path) -> None:
    call = started(site, tmp_path)
    assert call.returncode == 2
    assert call.stderr == f"fill in coordinator and images at the top of {site}/start.sh\n"


def test_a_sites_folder_is_its_owners(site: Path) -> None:
    assert os.access(site / "start.sh", os.X_OK)
    assert (site / "state").stat().st_mode & 0o777 == 0o700
    unit = (site / "atoll-site.service").read_text()
    assert f'ExecStart="{site}/start.sh"' in unit
    assert f'ReadWritePaths="{site}/state"' in unit
    for path in site.glob("*.*"):
        assert not re.search("SITE|ENVIRONMENT|UNIT_FOLDER", path.read_text()), path


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("there", "there exists and is not an empty folder"),
        ("-east", "'-east' cannot be a site's name"),
        ("a$b/east", r"'\$' in a path does not fit a script"),
    ],
)
def test_a_sites_folder_that_cannot_be_written_is_a_mistake(name: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "policy.toml").write_text("withdrawn = true")
    with pytest.raises(UserError, match=sentence):
        write_site(tmp_path / name)
    assert (tmp_path / "there" / "policy.toml").read_text() == "withdrawn = true"


def test_the_command_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new", "site", str(tmp_path / "east")]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/east\nwhat to do: {tmp_path}/east/README.md\n"
