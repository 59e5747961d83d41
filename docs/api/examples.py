"""Let the API reference show ``Example:`` in a docstring as an example, as Griffe shows ``Examples:`` alone."""

from __future__ import annotations

from typing import Any

from griffe import Extension, Object


class Examples(Extension):
    """Rename the section while the docstrings are read."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        """Called for every module, class, function and attribute."""
        if obj.docstring:
            obj.docstring.value = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
