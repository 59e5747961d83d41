"""What a reader of the pages in docs/ would type, open or typeset works: recipes, commands, equations, paths."""

from __future__ import annotations

import ast
import importlib.util
import json
import pkgutil
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from atoll.cli.parser import make_parser
from atoll.core.tree import load
from atoll.engines.federation import Federation
from atoll.engines.flower.policy import Policy
from atoll.recipe.recipe import load_recipe, presets
from tests.harness import run_tiny, tiny
from tests.pages import PAGES, ROOT, fences, tables


@pytest.mark.parametrize(
    "snippet",
    [one for one in fences("toml") if not one.values[0].startswith(("[superlink]", "# sites.toml"))],
)
def test_a_recipe_or_a_policy_on_a_page_is_valid(snippet: str, tmp_path: Path) -> None:
    file = tmp_path / "page.toml"
    file.write_text(snippet)
    if snippet.startswith("# policy.toml"):
        Policy.read(file)
        return
    recipe = load_recipe(file)
    if recipe.data.source == "digits" and recipe.method.aggregation != "private_fedavg":
        few = replace(recipe, data=replace(recipe.data, limit=500))
        Federation(few)  # refuses components and networks that do not fit


@pytest.mark.parametrize("block", fences("console"))
def test_a_command_on_a_page_exists(block: str) -> None:
    lines = block.replace("\\\n", " ").splitlines()
    commands = [line.removeprefix("$ ") for line in lines if line.startswith("$ atoll")]
    assert commands
    for command in commands:
        options = make_parser().parse_args(shlex.split(command, comments=True)[1:])
        preset = getattr(options, "recipe", None)
        if preset in presets() and ":" not in command:
            load_recipe(preset, options.set)


@pytest.mark.parametrize("equation", fences("math"))
def test_an_equation_can_be_typeset(equation: str) -> None:
    node, carrier = shutil.which("node"), importlib.util.find_spec("djangocms_katex")
    if node is None or carrier is None or carrier.origin is None:
        pytest.skip("typesets with Node.js, and with KaTeX, which `make test` installs")
    katex = Path(carrier.origin).parent / "static" / "djangocms_katex" / "vendor" / "katex" / "katex.min.js"
    script = (
        f"require({json.dumps(str(katex))}).renderToString({json.dumps(equation)}, {{ displayMode: true }})"
    )
    subprocess.run([node, "-e", script], check=True)


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert [page for page in PAGES if f" {page}\n" not in navigation] == []


@pytest.mark.parametrize("page", sorted(PAGES))
def test_a_file_or_a_test_that_a_page_names_exists(page: str) -> None:
    for name, test in re.findall(
        r"`((?:atoll|benchmarks|examples|src|tests)/[\w/.-]+\.\w+)(?:::(\w+))?", PAGES[page]
    ):
        path = ROOT / ("src" if name.startswith("atoll/") else "") / name
        assert path.is_file(), name
        assert f"def {test}(" in path.read_text() or not test, f"{name}::{test}"


@pytest.mark.parametrize(
    ("page", "module"),
    [("l_dawa", "ldawa"), ("ssd", "ssd"), ("fedca", "fedca"), ("featarc", "featarc"), ("fedquad", "fedquad")],
)
def test_the_code_that_a_page_names_for_an_equation_exists(page: str, module: str) -> None:
    text = (ROOT / "docs" / "methods" / f"{page}.md").read_text()
    paragraph = re.search(r"^In the code.*?(?=\n\n)", text, re.DOTALL | re.MULTILINE)
    assert paragraph is not None
    names = re.findall(r"`([\w./]+)`", paragraph[0])
    assert len(names) > 2
    for name in names:
        if name.endswith(".py"):
            assert (ROOT / "src" / "atoll" / name).is_file(), name
        else:
            where = "atoll" if name.startswith("functional.") else f"atoll.methods.{module}"
            assert pkgutil.resolve_name(f"{where}:{name}" if where != "atoll" else f"atoll.{name}"), name


def test_the_casts_that_the_contract_lists_stand_where_it_says() -> None:
    (rows,) = (rows for _, header, rows in tables(PAGES["contract.md"]) if header == ["where", "what", "why"])
    for where, what, _ in rows:
        file, name = re.findall(r"`([^`]+)`", where)
        text = (ROOT / "src" / "atoll" / file).read_text()
        lines = [
            line
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.FunctionDef) and node.name == name
            for line in text.splitlines()[node.lineno : node.end_lineno]
        ]
        assert any(what.strip("`").rstrip("…)") in line for line in lines), where


def test_the_aggregation_on_the_page_of_your_own_method_weighs_as_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs" / "your-own-method.md").read_text()
    code = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "calm.py").write_text(code[0])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    settings = ("method.name=calm:METHOD", "train.rounds=1", "train.keep_local_models=[1]")
    run = run_tiny(tmp_path / "run", *settings, "train.keep_models_every=1")
    folder = run.folder / "models"
    before = load(folder / "round-000000/global.safetensors")
    after = load(folder / "round-000001/global.safetensors")
    sizes = Federation(tiny(*settings)).setting.sizes
    local = [load(folder / f"round-000001/client-{k}.safetensors") for k in range(len(sizes))]
    floats = [name for name, weight in before.items() if weight.is_floating_point()]
    moved = [sum(float(((one[n] - before[n]).double() ** 2).sum()) for n in floats) ** 0.5 for one in local]
    shares = [size / (1 + distance) for size, distance in zip(sizes, moved, strict=True)]
    for name in floats:
        mean = sum(share / sum(shares) * one[name].double() for share, one in zip(shares, local, strict=True))
        torch.testing.assert_close(after[name].double(), mean, rtol=1e-5, atol=1e-7)
