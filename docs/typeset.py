"""Build step of the documentation: KaTeX's own files beside the pages, so that no page fetches anything.

The Python package djangocms-katex contains KaTeX as it was released, with its fonts and its licence; ``make docs``
installs that package alone, without Django.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

NEEDED = ("katex.min.js", "katex.min.css", "LICENSE", "fonts/*.woff2")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files under ``katex/``."""
    found = find_spec("djangocms_katex")
    if found is None or found.origin is None:
        raise PluginError("KaTeX is not installed; build the documentation by `make docs`")
    folder = Path(found.origin).parent / "static" / "djangocms_katex" / "vendor" / "katex"
    for path in (path for pattern in NEEDED for path in sorted(folder.glob(pattern))):
        place = f"katex/{path.relative_to(folder).as_posix()}"
        files.append(File.generated(config, place, abs_src_path=str(path)))
    return files
