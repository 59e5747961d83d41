"""Lists of recipes and components: complete, and each with its meaning."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from atoll.cli.console import make_console, results_table
from atoll.cli.main import main
from atoll.methods.registry import COMPONENTS
from atoll.recipe.table import presets


def rows(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, list[str]]:
    """The printed rows by their first cell; a row may go on in lines without one."""
    assert main(arguments) == 0
    found: dict[str, list[str]] = {}
    for line in capsys.readouterr().out.splitlines():
        name, *cells = (cell.strip() for cell in line.split("│"))
        if cells and name:
            found[name] = cells
    return found


def test_presets_are_listed_with_their_content(capsys: pytest.CaptureFixture[str]) -> None:
    found = rows(["presets"], capsys)
    assert set(found) == set(presets())
    assert all(content for _, content in found.values())
    assert found["ssd-paper"][0] == "ssd"
    assert found["l-dawa-paper"][1].startswith("L-DAWA as its released code trains SimCLR")


def test_components_are_listed_with_their_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    found = rows(["components"], capsys)
    assert set(found) == set(COMPONENTS)
    for name, (_, meaning) in found.items():
        assert meaning.split()[0] == (COMPONENTS[name].__doc__ or "").split()[0].replace("`", "`")


def test_commands_that_only_list_and_write_do_not_import_pytorch(tmp_path: Path) -> None:
    lists = ["presets", "components", "methods", "methods --json", "schema", "completion bash"]
    writes = ["new recipe mine.toml", "new method mine.py"]
    commands = [command.split() for command in (*lists, *writes)]
    program = f"""if True:
        import sys
        from atoll.cli.main import main
        assert [main(command) for command in {commands}] == {[0] * len(commands)}
        assert "torch" not in sys.modules"""
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_evaluation_is_printed_in_the_report_s_units(capsys: pytest.CaptureFixture[str]) -> None:
    found = {
        "protocol": "knn",
        "knn/accuracy": 0.74087,
        "knn/k": 20,
        "geometry/uniformity": -1.2584,
        "curve": [1],
    }
    make_console().print(results_table(found))
    lines = [[cell.strip() for cell in line.split("│")] for line in capsys.readouterr().out.splitlines()]
    assert lines == [["protocol", "knn"], ["kNN %", "74.09"], ["knn/k", "20"], ["−uniformity", "1.258"]]
