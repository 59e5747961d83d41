"""What the package says of itself: its dependencies, its version, its public names and their examples."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import atoll
from atoll import functional
from atoll.core.version import VERSION

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# What a distribution is imported as, where that is not its own name.
IMPORTED_AS = {
    "pillow": "PIL",
    "protobuf": "google",
    "scikit-learn": "sklearn",
}
STUBS = {"_typeshed"}  # the type checker's own
OPTIONAL = (
    "hub",
    "flower",
    "dp",
    "onnx",
    "detect",
    "figures",
    "timm",
    "hf",
    "peft",
    "pandas",
)  # extras that the code imports


def declared(requirements: list[str]) -> set[str]:
    """What may be imported if these are installed."""
    names = [re.match(r"[\w.-]+", text) for text in requirements]
    return {IMPORTED_AS.get(name[0], name[0].replace("-", "_")) for name in names if name is not None}


def imported(folder: Path) -> dict[str, set[str]]:
    """The libraries that a folder's code imports, wherever in a file, with the files that do."""
    found: dict[str, set[str]] = {}
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [str(node.module)]
            for name in names:
                top = name.split(".")[0]
                if top not in sys.stdlib_module_names and top not in {"atoll", *STUBS}:
                    found.setdefault(top, set()).add(path.relative_to(folder).as_posix())
    return found


def test_every_import_is_declared_and_every_dependency_is_imported() -> None:
    extras = PROJECT["optional-dependencies"]
    always, found = declared(PROJECT["dependencies"]), imported(ROOT / "src")
    optional = declared([one for name in OPTIONAL for one in extras[name]])
    assert set(found) - always - optional == set()
    assert always - set(found) == set()


def test_a_library_of_an_extra_is_not_imported_with_the_package() -> None:
    extras = PROJECT["optional-dependencies"]
    optional = declared([one for name in OPTIONAL for one in extras[name]])
    for path in (ROOT / "src").rglob("*.py"):
        relative = path.relative_to(ROOT / "src" / "atoll").as_posix()
        if relative.startswith("engines/flower/") or relative == "commands/flower_server_app.py":
            continue  # these are imported by Flower alone, or after `require_flower`
        for node in ast.parse(path.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            assert {name.split(".")[0] for name in names} & optional == set(), relative


def test_the_constraints_pin_what_is_declared() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {re.split("==", line)[0].lower().replace("_", "-") for line in lines if "==" in line}
    extras = PROJECT["optional-dependencies"]
    tested = [
        *PROJECT["dependencies"],
        *(one for name in ("dev", "dp", "flower", "docs") for one in extras[name]),
    ]
    names = [re.match(r"[\w.-]+", text) for text in tested]
    assert {name[0] for name in names if name is not None} - pinned == set()


def test_every_file_that_is_not_a_module_is_packaged() -> None:
    package = ROOT / "src" / "atoll"
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    packaged = {path for pattern in setuptools["package-data"]["atoll"] for path in package.glob(pattern)}
    made = {package / "core" / "commit.txt"}  # by a build
    files = {path for path in package.rglob("*.*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert files - made == packaged - made


def test_the_version_is_stated_once() -> None:
    assert atoll.__version__ == VERSION
    assert "version" not in PROJECT
    assert PROJECT["dynamic"] == ["version"]
    files = [*(ROOT / "src").rglob("*.py"), ROOT / "pyproject.toml"]
    stated = [path.name for path in files if re.search(rf'"{re.escape(VERSION)}"', path.read_text())]
    assert stated == ["version.py"]


def test_the_classifiers_name_the_python_that_tests_run_on() -> None:
    versions = [line.rsplit(" ", 1)[1] for line in PROJECT["classifiers"] if "Python :: 3." in line]
    assert f"{sys.version_info.major}.{sys.version_info.minor}" in versions


def test_the_links_of_the_readme_work_on_a_package_index() -> None:
    text = (ROOT / PROJECT["readme"]).read_text()
    links = re.findall(r"\]\(([^)]*)\)", text)
    assert links
    assert [link for link in links if not link.startswith("https://")] == []
    named = re.findall(r"`((?:docs|examples)/[\w/.-]+|[A-Z]+\.\w+)`", text)
    assert len(named) > 5
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_citation_names_this_version() -> None:
    text = (ROOT / "CITATION.cff").read_text()
    assert re.search(r"^cff-version: 1\.2\.0$", text, re.MULTILINE)
    assert re.search(r'^title: "?Atoll', text, re.MULTILINE)
    assert f"\nlicense: {PROJECT['license']}\n" in text


@pytest.mark.parametrize("name", sorted(functional.__all__))
def test_an_equation_has_an_example(name: str) -> None:
    equation = getattr(functional, name)
    if not inspect.isclass(equation):
        lines = inspect.getdoc(equation).partition("Example:\n")[2].splitlines()
        assert 3 <= len([line for line in lines if line.strip()]) <= 9
        assert f"    >>> from atoll.functional import {name}" in lines


@pytest.mark.parametrize("name", sorted(atoll.__all__))
def test_a_public_name_has_an_example(name: str) -> None:
    assert "Example:\n    >>> " in inspect.getdoc(getattr(atoll, name))


def test_dir_shows_the_public_names() -> None:
    assert set(atoll.__all__) <= set(dir(atoll))


def resolve(path: str) -> object:
    """The module or the attribute of a module that a dotted path names."""
    module, _, attribute = path.rpartition(".")
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        return getattr(resolve(module), attribute)


@pytest.mark.parametrize("page", sorted(path.name for path in (ROOT / "docs" / "api").glob("*.md")))
def test_the_api_reference_names_what_exists(page: str) -> None:
    names = re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api" / page).read_text(), re.MULTILINE)
    assert names
    for name in names:
        assert inspect.getdoc(resolve(name)), name


def test_the_changelog_names_new_paths_that_exist() -> None:
    rows = re.findall(r"^  \| .* \| (.*) \|$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    paths = [path for row in rows for path in re.findall(r"`(atoll[\w.]+)`", row)]
    assert len(paths) > 30
    for path in paths:
        resolve(path)


@pytest.mark.slow
def test_a_type_checker_finds_misspelt_names(tmp_path: Path) -> None:
    lines = [
        "import atoll",
        'run = atoll.simulate("digits")',
        "run.encoder()",
        'atoll.simulat("digits")',
        "run.encoders()",
    ]
    (tmp_path / "program.py").write_text("\n".join(lines))
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "program.py"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    errors = [line.split(":")[1] for line in checked.stdout.splitlines() if "[attr-defined]" in line]
    assert errors == ["4", "5"], checked.stdout
