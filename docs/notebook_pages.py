"""Build step of the documentation: a page for each notebook of ``examples/notebooks``, with its outputs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

NOTEBOOKS = Path(__file__).parents[1] / "examples" / "notebooks"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages under ``notebooks/``."""
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=page(path)))
    return files


def page(path: Path) -> str:
    """A notebook as Markdown."""
    cells = json.loads(path.read_text("utf-8"))["cells"]
    parts = [f"The notebook is `examples/notebooks/{path.name}` in the repository."]
    for cell in cells:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            text = text.replace("](../../docs/", "](../")
            text = re.sub(r"\[(.*?)\]\(\.\./\.\./.*?\)", r"\1", text)  # other files are not in the pages
            parts.append(text)
        else:
            parts += [f"```python\n{text}\n```", *map(output, cell["outputs"])]
    parts[:2] = parts[1::-1]  # the first cell has the heading
    return "\n\n".join(parts) + "\n"


def output(found: dict[str, Any]) -> str:
    """An output of a cell: HTML as it is, or else its text."""
    data = found.get("data", {})
    if "text/html" in data:
        return f"<div>{''.join(data['text/html'])}</div>"
    return "```text\n{}\n```".format("".join(data.get("text/plain", found.get("text", []))).rstrip())
