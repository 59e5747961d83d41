"""Executes the notebooks. ``python -m tests.notebooks [NAME …]`` writes them again with small outputs.

It needs nbclient, ipykernel, ipywidgets and, for the four hospitals, timm, peft, and PACS and the weights that
``examples/solar_cells/export.py`` writes in ``$ATOLL_DATA``.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

NOTEBOOKS = sorted((Path(__file__).parents[1] / "examples" / "notebooks").glob("*.ipynb"))
LARGEST_HTML = 10_000  # characters; larger outputs, such as pictures of somebody's images, stay as text


def execute(path: Path, folder: Path) -> Any:
    """Run all cells of a notebook in a folder; return the notebook with their outputs."""
    import nbclient
    import nbformat

    before = os.environ["PATH"]
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{before}"  # for `!atoll`
    try:
        book = nbformat.read(path, as_version=4)
        return nbclient.NotebookClient(
            book, timeout=900, resources={"metadata": {"path": str(folder)}}
        ).execute()
    finally:
        os.environ["PATH"] = before


def tidy(book: Any) -> None:
    """Keep results and printed text alone: no progress, no warnings with paths, no times, no large pictures."""
    book.metadata.pop("widgets", None)
    for cell in book.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [found for one in cell.outputs if (found := _tidied(one)) is not None]


def _tidied(output: Any) -> Any:
    if output.output_type == "stream":
        return output if output.name == "stdout" else None
    data = output.data
    text = data.get("text/plain", "")
    if output.output_type == "display_data":  # a bar, and what was printed beside it
        return None if "images/s" in text or text in ("", "Output()") else _printed(text)
    if len(data.get("text/html", "")) > LARGEST_HTML:
        del data["text/html"]
    return output


def _printed(text: str) -> Any:
    import nbformat

    return nbformat.v4.new_output("stream", name="stdout", text=text)


if __name__ == "__main__":
    import nbformat

    executed = {}
    for notebook in NOTEBOOKS:
        if len(sys.argv) == 1 or notebook.stem in sys.argv[1:]:
            with tempfile.TemporaryDirectory() as place:
                executed[notebook] = execute(notebook, Path(place))
    for notebook, book in executed.items():  # at the end, so that no result names a changed checkout
        tidy(book)
        nbformat.write(book, notebook)
