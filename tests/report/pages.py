"""A strict reader of pages: it follows every element, and knows what loads something from elsewhere."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from atoll.report import write_report

VOID = {"meta", "br", "img", "link", "hr", "input", "wbr"}


class Page(HTMLParser):
    """A parsed page.

    Attributes:
        tables: by caption: rows of cells' texts, the head first.
        loads: addresses that the page refers to, other than places in itself.
        tags: all elements' names in order.
        text: all text outside scripts and styles.
        data: what the page's script reads.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.loads: list[str] = []
        self.tags: list[str] = []
        self.ids: set[str] = set()
        self.anchors: list[str] = []
        self.text = ""
        self.data: dict[str, Any] = {}
        self._open: list[str] = []
        self._rows: list[list[str]] = []
        self._caption = ""
        self._raw = ""
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        assert not self._open, f"unclosed: {self._open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        found = dict(attrs)
        for name in ("src", "href", "data", "action", "srcset", "poster"):
            value = found.get(name)
            if value and value.startswith("#"):
                self.anchors.append(value[1:])
            elif value and not ("download" in found and value.startswith("data:")):
                self.loads.append(value)
        if "id" in found:
            assert found["id"] not in self.ids
            self.ids.add(found["id"])
        assert not any(name.startswith("on") for name in found)
        if tag not in VOID:
            self._open.append(tag)
        if tag == "table":
            self._rows, self._caption = [], ""
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("td", "th"):
            self._rows[-1].append("")
        elif tag in ("script", "style"):
            self._raw = ""

    def handle_endtag(self, tag):
        assert self._open[-1:] == [tag], f"</{tag}> closes {self._open}"
        self._open.pop()
        if tag == "table":
            self.tables[self._caption] = self._rows
        if tag == "script" and self._raw.startswith("{"):
            self.data = json.loads(self._raw)

    def handle_data(self, data):
        if self._open and self._open[-1] in ("script", "style"):
            self._raw += data
            return
        self.text += data
        if "caption" in self._open:
            self._caption += data
        elif self._rows and self._rows[-1] and {"td", "th"} & set(self._open):
            self._rows[-1][-1] += data


RESULTS = "Results by method"


def report(tmp_path, *folders):
    """The page of these runs."""
    return Page(write_report(folders, tmp_path / "report.html"))


def row(page, label, caption=RESULTS):
    """The only row of a table that begins so."""
    (found,) = [cells for cells in page.tables[caption] if cells[0].startswith(label)]
    return found
