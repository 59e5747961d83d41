"""Every table and figure of the five papers by name, and whether it can run on this machine."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache

from atoll.data.options import DataOptions
from atoll.data.sources import why_missing
from atoll.papers.images import image_changes
from atoll.papers.reproduction import find_table, image_names, images_of, missing_images
from atoll.papers.rows import Row
from atoll.papers.tables import figure_names, listed, table_names

HERE = "runnable here"


@dataclass(frozen=True)
class Entry:
    """A table or a figure of a paper.

    Attributes:
        name: Its name, as ``atoll reproduce`` takes it.
        title: Its content.
        runs: Number of its rows; 0 if it has none.
        images: The images that it needs, in words.
        state: ``"runnable here"``, with which images it is, or why it is not.
        marks: How the images on this machine differ from the paper's.
    """

    name: str
    title: str
    runs: int
    images: str
    state: str
    marks: tuple[str, ...] = ()


def inventory() -> list[Entry]:
    """All tables and figures of the papers, in the papers' order. Nothing is downloaded or decoded."""
    files = [*table_names(), *figure_names()]
    missing = cache(lambda data: why_missing(data))
    entries, used = [], set()
    for name, about in listed().items():
        parts = [file for file in files if re.fullmatch(rf"{name}[a-z]?(-.*)?", file)]
        for part in parts:
            if part not in used:
                entries.append(_runnable(part, missing))
                used.add(part)
        if not parts:
            why = about.get("why") or f"there is no recipe for it yet, no figures/{name}.toml"
            entries.append(Entry(name, about["title"], 0, "", f"not runnable: {why}"))
    return entries


def _runnable(name: str, missing: Callable[[DataOptions], str]) -> Entry:
    job = find_table(name)
    sources = dict.fromkeys(_source(data) for data in images_of(job.rows))
    marks = [f"{key}: {words}" for data in sources for key, words in image_changes(data).items()]
    state = _state(job.rows, missing)
    return Entry(name, job.table.title, len(job.rows), image_names(job.rows), state, tuple(marks))


def _state(rows: Iterable[Row], missing: Callable[[DataOptions], str]) -> str:
    rows = list(rows)
    absent = [missing_images(row, lambda data: missing(_source(data))) for row in rows]
    here = sum(not found for found in absent)
    needed = dict.fromkeys(words for found in absent for words in found)
    if here == len(rows):
        return HERE
    wanted = f"with {', '.join(needed)}"
    return f"{here} of {len(rows)} rows {HERE}; the others {wanted}" if here else f"runnable {wanted}"


def _source(data: DataOptions) -> DataOptions:
    """The options that name the images, without those of their size and decoding."""
    return DataOptions(source=data.source, path=data.path, test_split=data.test_split)
