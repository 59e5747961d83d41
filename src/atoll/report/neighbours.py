"""Nearest neighbours of some images, as pictures on the page and as a table in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group as Lines

from atoll.core.tree import Tree
from atoll.report.client_pictures import strip
from atoll.report.groups import Group
from atoll.report.html import Html, join, table, tag
from atoll.report.terminal import terminal_table

WORDS = (
    "Each row shows an image and the images whose representations are most similar to its own, by cosine, with the "
    "clients that hold them. No labels are used."
)


def measures_words(record: Tree) -> list[str]:
    """Sentences about the measures that need no labels."""
    found = record["measures"]
    words = []
    if "retrieval" in found:
        words.append(
            f"Retrieval: the nearest of {found['retrieval_images']:,} views is another view of the same image for "
            f"{100 * found['retrieval']:.1f} % of them (chance {100 / found['retrieval_images']:.2g} %)."
        )
    words.append(f"Effective rank: {found['effective_rank']:.1f} of {found['width']} dimensions.")
    if "same_client" in found:
        words.append(
            f"Neighbours from the same client: {100 * found['same_client']:.1f} % (chance "
            f"{100 * found['same_client_chance']:.1f} %)."
        )
    return words


def neighbours_lines(record: Tree) -> Lines:
    """The table for a terminal: the neighbours of each image, nearest first, one to a line."""
    known = bool(record["clients"])
    rows = []
    for query, names, owners, similar in zip(
        record["queries"],
        record["names"],
        record["clients"] or record["names"],
        record["similarity"],
        strict=True,
    ):
        for rank, (name, owner, cosine) in enumerate(zip(names, owners, similar, strict=True)):
            rows.append([str(query) if rank == 0 else "", str(name), *([owner] * known), f"{cosine:.3f}"])
    header = ["image", "neighbour", *(["client"] * known), "cosine"]
    return terminal_table(header, rows, measures_words(record), numbers=False)


def neighbours_tables(groups: Sequence[Group]) -> Html:
    """Tables with pictures, one for each run that has neighbours; empty if none has."""
    found: list[Html] = []
    for group in groups:
        for run in group.runs:
            if run.neighbours is not None:
                found.append(_table(run.neighbours, f"{group.label}, seed {run.seed}"))
    if not found:
        return Html("")
    return join([tag("h3", "Nearest neighbours"), tag("p", WORDS, class_="muted"), *found])


def _table(record: Tree, label: str) -> Html:
    words = [tag("p", word) for word in measures_words(record)]
    return join([neighbours_table(record, f"Nearest neighbours: {label}"), *words])


def neighbours_table(record: Tree, caption: str) -> Html:
    """Make a table with pictures of some images and their neighbours."""
    rows = [
        [
            str(query),
            _picture(record["query_pictures"][i : i + 1], f"image {query}"),
            _picture(record["pictures"][i], f"neighbours of {query}"),
            ", ".join(record["clients"][i] if record["clients"] else record["names"][i]),
            "{:.2f} to {:.2f}".format(*(record["similarity"][i][place] for place in (0, -1))),
        ]
        for i, query in enumerate(record["queries"])
    ]
    whose = "their clients" if record["clients"] else "their names"
    return table(caption, ["image", "picture", "neighbours, nearest first", whose, "cosine"], rows)


def _picture(pictures: Any, words: str) -> Html:
    return tag("td", tag("img", src=strip(pictures), alt=words, height="48"))
