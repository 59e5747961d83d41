"""The code keeps to its layout: who may import whom, how long a file may be, where its tests lie.

Everything is read from the source's syntax trees, so imports inside functions count as well.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
TESTS = ROOT / "tests"

# The layers, each above all that it may import. Layers on one level do not import each other.
FLOORS = """
    atoll                       the public names, and the old name of the components' base
    cli
    commands
    papers
    report
    engines.flower
    engines
    recipe
    methods
    objectives    aggregation
    components
    evaluation
    data          models
    functional
    core
"""

# Imports that go up on purpose, and why.
MAY_IMPORT_UP = {
    ("atoll.engines.flower.server_app", "atoll.commands.flower_server_app"): (
        "Flower apps of 0.1 name the old module; it goes with 0.3"
    ),
}

TOP_MODULES = 3
LONGEST_FILE = 350

# Files that are still longer, and why. An entry that is no longer needed must go, too.
STILL_TOO_LONG: dict[str, str] = {}

# Tests that are about more than one module, and what they are about.
ABOUT_MORE = {
    "aggregation/test_sums.py": "every aggregation's arithmetic",
    "commands/test_any_encoder.py": "whole runs with encoders of other libraries",
    "commands/test_comparisons_again.py": "comparisons that continue their runs, or start them again",
    "commands/test_damaged_runs.py": "damage in a run's folder, and what is done about it",
    "cli/test_bad_input.py": "every command's bad input",
    "components/test_compat.py": "components and folders of 0.1",
    "data/test_given_runs.py": "whole runs on images that Python code gives",
    "engines/test_client_weights.py": "with which weights a client begins, and which it keeps",
    "engines/test_sharing.py": "what trains, travels and is stored",
    "engines/test_loss_checks.py": "the losses in updates",
    "engines/test_kills.py": "whole runs that are killed or stopped",
    "engines/test_damage.py": "whole runs on damaged and full disks",
    "engines/flower/test_deployment.py": "a federation of real processes",
    "engines/flower/test_deployment_files.py": "the Dockerfile and the manifests",
    "engines/flower/test_flower_simulation.py": "Flower's simulation against ours",
    "engines/flower/test_policy_modules.py": "the modules that a site's policy allows",
    "engines/flower/test_secure_round_stages.py": "a secure round with clients in one process",
    "engines/flower/test_run_sh.py": "examples/deployment",
    "engines/flower/test_site_results.py": "what sites measure, and what the coordinator makes of it",
    "engines/flower/test_site_starts.py": "how a run of sites starts, and starts again",
    "engines/flower/test_sites.py": "sites and the coordinator together",
    "methods/test_fedu2_fold.py": "the slow reference of FedU²'s aggregation",
    "methods/test_hook_results.py": "what components' hooks return",
    "methods/test_ldawa_fold.py": "the slow reference of L-DAWA's aggregation",
    "methods/test_resume.py": "every method that keeps client state",
    "papers/test_partitions.py": "the partition of every row of the papers' tables and figures",
    "report/test_browser.py": "the page in a browser",
    "report/test_palette.py": "the page's colours",
    "test_architecture.py": "the layout",
    "test_board.py": "benchmarks/",
    "test_board_runs.py": "benchmarks/board.py",
    "test_claims.py": "benchmarks/claims.py",
    "test_detection_table.py": "benchmarks/detection.py",
    "test_coming_from.py": "docs/from-*.md",
    "test_docs.py": "docs/",
    "test_docs_examples.py": "code blocks and paths in docs/",
    "test_every_method.py": "all methods",
    "test_every_option.py": "all options",
    "test_elsewhere.py": "benchmarks/elsewhere.py",
    "test_flagship_log.py": "benchmarks/flagship.py",
    "test_gpu_session.py": "benchmarks/gpu.sh",
    "test_hostile.py": "benchmarks/hostile.py",
    "test_kept_values.py": "what every version keeps",
    "test_matrix.py": "all components beside each other",
    "test_notebooks.py": "examples/notebooks",
    "test_packaging.py": "pyproject.toml and the public names",
    "test_random_recipes.py": "whole runs of random recipes",
    "test_solar_cells.py": "examples/solar_cells and benchmarks/solar_cells.py",
    "test_simulated_gpu.py": "every method on a device other than the CPU",
}


@dataclass(frozen=True)
class Import:
    """One import of another module of ours."""

    importer: str
    imported: str
    line: int
    for_types: bool

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported}"


def modules(source: Path = SOURCE) -> dict[str, Path]:
    """All modules by their dotted name; a package is its ``__init__``."""
    found = {}
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def _names(node: ast.AST, known: dict[str, Path]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute"
        for alias in node.names:
            submodule = f"{node.module}.{alias.name}"
            yield submodule if submodule in known else str(node.module)
    elif isinstance(node, ast.Call) and "import_module" in (
        getattr(node.func, "attr", ""),
        getattr(node.func, "id", ""),
    ):
        yield from (arg.value for arg in node.args if isinstance(arg, ast.Constant))


@cache
def imports(source: Path = SOURCE) -> list[Import]:
    """Every import of ours by ours, wherever it stands in a file."""
    known, found = modules(source), []
    for importer, path in known.items():
        tree = ast.parse(path.read_text())
        for_types = {
            id(inner)
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            for inner in ast.walk(node)
        }
        for node in ast.walk(tree):
            for name in _names(node, known):
                if name.split(".")[0] == "atoll":
                    found.append(Import(importer, name, node.lineno, id(node) in for_types))
    return found


@cache
def levels() -> dict[str, int]:
    """Each layer's level, counted from the ground."""
    lines = FLOORS.strip().splitlines()
    layers = {}
    for level, line in enumerate(reversed(lines)):
        names = line.split()
        for name in names[:1] if names[0] == "atoll" else names:
            layers[name] = level
    return layers


def layer(module: str) -> str:
    """The layer that a module lies in."""
    inside = module.split(".")[1:]
    if ".".join(inside[:2]) in levels():
        return ".".join(inside[:2])
    return inside[0] if inside and inside[0] in levels() else "atoll"


def upward(found: list[Import]) -> list[Import]:
    """Imports of a layer that does not lie below."""
    level = levels()
    return [
        one
        for one in found
        if layer(one.importer) != layer(one.imported)
        and level[layer(one.imported)] >= level[layer(one.importer)]
    ]


def circle(found: list[Import]) -> list[str]:
    """A circle of modules that import each other; empty if there is none."""
    graph: dict[str, set[str]] = {}
    for one in found:
        if not one.for_types and one.imported != one.importer:
            graph.setdefault(one.importer, set()).add(one.imported)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_every_layer_has_a_level() -> None:
    folders = {
        path.parent.relative_to(SOURCE / "atoll").as_posix()
        for path in (SOURCE / "atoll").glob("*/__init__.py")
    }
    assert folders == {name for name in levels() if "." not in name} - {"atoll"}


def test_no_import_goes_up() -> None:
    faults = [one for one in upward(imports()) if (one.importer, one.imported) not in MAY_IMPORT_UP]
    assert [str(one) for one in faults] == []


def test_every_exception_is_still_needed() -> None:
    used = {(one.importer, one.imported) for one in upward(imports())}
    assert set(MAY_IMPORT_UP) - used == set()


def test_no_modules_import_each_other_in_a_circle() -> None:
    # Imports for the type checker alone run nothing; they may look at a neighbour, but not up.
    assert circle(imports()) == []


def test_few_modules_lie_at_the_top() -> None:
    top = sorted(path.name for path in (SOURCE / "atoll").glob("*.py"))
    assert len(top) <= TOP_MODULES, top


def test_no_file_is_long() -> None:
    lengths = {
        path.relative_to(SOURCE).as_posix(): len(path.read_text().splitlines())
        for path in SOURCE.rglob("*.py")
    }
    too_long = {name: lines for name, lines in lengths.items() if lines > LONGEST_FILE}
    assert {name: lines for name, lines in too_long.items() if name not in STILL_TOO_LONG} == {}
    assert set(STILL_TOO_LONG) - set(too_long) == set(), "these are short now: take them out of the list"


def test_casts_and_ignores_around_the_contract_are_listed() -> None:
    """In the layers where messages have named types; each stands in the page's table, with its reason."""
    found = []
    for room_ in ("engines", "components"):
        for path in sorted((SOURCE / "atoll" / room_).rglob("*.py")):
            text = path.read_text()
            calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
            casts = sum(isinstance(call.func, ast.Name) and call.func.id == "cast" for call in calls)
            name = path.relative_to(SOURCE / "atoll").as_posix()
            found += [name] * (casts + text.count("# type: ignore"))
    page = (ROOT / "docs" / "contract.md").read_text().partition("Casts and ignores there:")[2]
    table = page.partition("\n## ")[0]
    listed = [line.split("`")[1] for line in table.splitlines() if line.startswith("| `")]
    assert found == sorted(listed)
    assert len(listed) <= 10


def test_tests_lie_where_their_modules_do() -> None:
    alone = []
    for path in TESTS.rglob("test_*.py"):
        inside = path.relative_to(TESTS)
        module = SOURCE / "atoll" / inside.with_name(inside.name.removeprefix("test_"))
        if not module.exists():
            alone.append(inside.as_posix())
    assert sorted(alone) == sorted(ABOUT_MORE)


# The readers themselves.


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """A small package that breaks every rule once."""
    files = {
        "core/__init__.py": "",
        "core/tree.py": "def f():\n    from atoll.engines import server\n",
        "engines/__init__.py": "",
        "engines/server.py": "import atoll.core.tree\n",
        "objectives/__init__.py": "from importlib import import_module\nimport_module('atoll.aggregation.x')\n",
        "aggregation/x.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from atoll.cli import main\n",
        "cli/main.py": "",
    }
    for name, text in files.items():
        path = tmp_path / "atoll" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_imports_in_functions_by_name_and_for_types_are_seen(house: Path) -> None:
    assert [str(one) for one in upward(imports(house))] == [
        "atoll.aggregation.x:3 imports atoll.cli.main",
        "atoll.core.tree:2 imports atoll.engines.server",
        "atoll.objectives:2 imports atoll.aggregation.x",
    ]


def test_a_circle_is_seen(house: Path) -> None:
    assert set(circle(imports(house))) == {"atoll.core.tree", "atoll.engines.server"}
