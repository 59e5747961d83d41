"""The form of a figure: the ``[figure]`` part of a file in ``figures``, which has the form of a table.

[figure]
says = "…"                       # what the paper says that its figure shows
[[figure.panels]]
kind = "points"                  # see `Panel`
y = "LP acc %"
x = "α"
places = { a001 = 0.01, a5 = 5 } # the place of a choice on the x axis
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from atoll.core.config import build
from atoll.core.errors import UserError
from atoll.papers.rows import Row
from atoll.papers.tables import PaperTable

CURVES = ("", "losses", "measures", "evaluation")  # parts of metrics.jsonl whose numbers a curve may show
UNTRAINED = ("clients", "classes")  # kinds that show partitions, which need no runs


@dataclass(frozen=True)
class Panel:
    """A part of a figure, from the runs of some rows.

    ``points`` and ``bars`` show a column over the places of a choice, with a line or a colour for each other one; a
    row without a place is a horizontal line. ``scatter`` shows two columns. ``curves`` show a key of
    ``metrics.jsonl`` by round. ``boxes`` show the measured angles and ``layers`` the cosine of each layer, by round
    and row. ``map`` shows t-SNE of the held-out images' representations by kept models, ``landscape`` the loss
    around the last of them. ``clients`` shows the images by client and class as a grid, ``classes`` as bars.

    Attributes:
        kind: What is shown.
        title: Title of the panel.
        rows: Names or patterns of the rows.
        x: Label of the x axis; for ``scatter`` the column; for ``curves`` ``"round"`` or ``"MB"``.
        y: The column, or the key: ``loss``, ``angular_divergence``, or ``losses``, ``measures`` or ``evaluation``
            with a name after a colon.
        label: Label of the y axis; by default ``y``.
        times: Factor of a key's values.
        places: Number or text of each choice that has a place on the x axis.
        pooled: Choices that are repetitions, as seeds are.
        log: Logarithmic x axis.
        targets: Values of ``curves`` for which the first round and the traffic until then are reported.
        note: Column in brackets behind a name of ``scatter``.
        models: Kept models of the last round that a ``map`` shows, together on one map.
        colour: Colour of a ``map``'s points.
        classes: Numbers of the classes that have a colour; others are grey. All if empty.
        resolution: Points on each axis of a ``landscape``.
    """

    kind: Literal[
        "points", "bars", "scatter", "curves", "boxes", "layers", "map", "landscape", "clients", "classes"
    ]
    title: str = ""
    rows: tuple[str, ...] = ("*",)
    x: str = ""
    y: str = ""
    label: str = ""
    times: float = 1.0
    places: dict[str, Any] | None = None
    pooled: tuple[str, ...] = ()
    log: bool = False
    targets: tuple[float, ...] = ()
    note: str = ""
    models: tuple[str, ...] = ("global",)
    colour: Literal["class", "model"] = "class"
    classes: tuple[int, ...] = ()
    resolution: int = 13

    def choose(self, rows: Sequence[Row]) -> list[Row]:
        """Return the panel's rows among those that are run."""
        return [row for row in rows if any(fnmatchcase(row.name, pattern) for pattern in self.rows)]

    def place(self, row: Row) -> Any:
        """Return the row's place on the x axis; None if it has none."""
        places = self.places or {}
        return next((places[choice] for choice in row.choices if choice in places), None)

    def series(self, rows: Sequence[Row], table: PaperTable) -> list[str]:
        """Label each row by the choices that distinguish it, without its place and without repetitions."""
        dropped = {*(self.places or {}), *self.pooled}
        made = [[choice for choice in row.choices if choice not in dropped] for row in rows]
        common = set(made[0]).intersection(*made) if len(made) > 1 else set()
        if made and all(set(one) <= common for one in made):
            common = set()
        return [", ".join(table.choices[one].title for one in names if one not in common) for names in made]


@dataclass(frozen=True)
class Figure:
    """The ``[figure]`` part of a figure's file.

    Attributes:
        says: What the paper says that its figure shows.
        panels: The parts of the figure.
    """

    says: str
    panels: tuple[Panel, ...]

    @property
    def trains(self) -> bool:
        """Whether the figure shows results of runs."""
        return any(panel.kind not in UNTRAINED for panel in self.panels)


def figure_of(table: PaperTable) -> Figure | None:
    """Return a file's figure; None if it is a table.

    Raises:
        UserError: A panel names a column or a choice that the file does not have, or its axes do not fit.
    """
    if not table.figure:
        return None
    figure = build(Figure, table.figure, "figure")
    for panel in figure.panels:
        columns = [panel.y] if panel.kind in ("points", "bars") else []
        columns += [panel.x, panel.y, *filter(None, [panel.note])] if panel.kind == "scatter" else []
        for column in columns:
            if column not in table.columns:
                raise UserError(
                    f"figure: a panel shows {column!r}, which is none of the columns {table.columns}"
                )
        part, _, name = panel.y.rpartition(":")
        if panel.kind == "curves" and (panel.x not in ("round", "MB") or part not in CURVES or not name):
            raise UserError(
                f"figure: curves show {panel.y!r} by {panel.x!r}, and need x = 'round' or 'MB', and as y a key of "
                "metrics.jsonl, or one of losses, measures or evaluation after a colon, such as 'measures:norms/h'"
            )
        places = list((panel.places or {}).values())
        numbers = [place for place in places if isinstance(place, int | float)]
        if numbers and len(numbers) < len(places):
            raise UserError(f"figure: the places {places} mix numbers and texts; use one kind")
        if panel.log and not (numbers and min(numbers) > 0):
            raise UserError(f"figure: a logarithmic axis needs places above 0, and has {places}")
        for choice in [*(panel.places or {}), *panel.pooled]:
            if choice not in table.choices:
                raise UserError(f"figure: a panel names the choice {choice!r}, which the file does not have")
    return figure
