"""HTML elements as strings; text is escaped unless it is marked as HTML."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any


class Html(str):
    """Text that is already HTML; all other text is escaped when it is inserted into a page."""

    __slots__ = ()


def tag(name: str, *children: str, **attributes: str) -> Html:
    """Make an element: ``class_`` becomes ``class``, other underscores hyphens; empty attributes are dropped."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"'
        for key, value in attributes.items()
        if value
    )
    return Html(f"<{name}{written}>{join(children)}</{name}>")


def join(children: Iterable[str]) -> Html:
    """Concatenate children."""
    return Html("".join(child if isinstance(child, Html) else escape(child) for child in children))


def table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]], class_: str = "") -> Html:
    """Make a table with a heading for every column, and for every row in its first cell.

    Its box scrolls horizontally if the window is narrow.
    """
    header = tag("tr", *(tag("th", cell, scope="col") for cell in head))
    body = (
        tag(
            "tr",
            tag("th", row[0], scope="row"),
            *(cell if _is_cell(cell) else tag("td", cell) for cell in row[1:]),
        )
        for row in rows
    )
    whole = tag(
        "table",
        tag("caption", tag("span", caption), class_="muted"),
        tag("thead", header),
        tag("tbody", *body),
        class_=class_,
    )
    return tag("div", whole, class_="scroll", tabindex="0", role="region", aria_label=caption)


def _is_cell(cell: str) -> bool:
    return isinstance(cell, Html) and cell.startswith("<td")


def bullets(items: Sequence[str]) -> Html:
    """Make a list."""
    return tag("ul", *(tag("li", item) for item in items))


def folded(summary: str, *content: str) -> Html:
    """Make content that is hidden until the reader opens it."""
    return tag("details", tag("summary", summary), *content)


def json_for_script(value: Any) -> Html:
    """Serialise a value as JSON for a ``<script>`` element; no text in it can end the element."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # A JSON parser reads the escapes as the same three characters.
    return Html(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))
