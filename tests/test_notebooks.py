"""The notebooks run from the first cell to the last, and are committed small and without traces of a machine."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.notebooks import NOTEBOOKS, execute

ROOT = Path(__file__).parents[1]
MOST_BYTES = 100_000


def outputs(path: Path) -> list[dict[str, Any]]:
    """All outputs of a notebook."""
    cells = json.loads(path.read_text("utf-8"))["cells"]
    return [one for cell in cells if cell["cell_type"] == "code" for one in cell["outputs"]]


def test_the_notebooks_are_there() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["first-steps", "four-hospitals", "own-method"]
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert all(f"notebooks/{path.stem}.md" in navigation for path in NOTEBOOKS)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_small_and_names_no_machine(path: Path) -> None:
    text = path.read_text("utf-8")
    assert len(text.encode()) < MOST_BYTES
    assert not re.search(r"/(home|Users|root|tmp|work)/", text)
    assert all(one["output_type"] != "error" for one in outputs(path))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path) -> None:
    for library in ("nbclient", "ipykernel"):
        pytest.importorskip(library, reason=f"{library} is not installed")
    data = Path(os.environ.get("ATOLL_DATA", ""))
    for name in re.findall(r'DATA / \\"([\w.-]+)\\"', path.read_text()):
        if not (data / name).exists():
            pytest.skip(f"needs {name} in the folder that ATOLL_DATA names")
    book = execute(path, tmp_path)
    assert list(tmp_path.glob("runs/*/encoder.safetensors"))
    assert all(cell.execution_count for cell in book.cells if cell.cell_type == "code")
