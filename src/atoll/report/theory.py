"""The picture of ``atoll theory``: which directions each source's features represent, and how this depends on d."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from atoll.core.text import plural
from atoll.report.html import Html, join, tag
from atoll.report.svg import INK, MUTED, picture, text

CELL = 46
WIDTH, HEIGHT = 900, 640
SELF, SUPERVISED = (14, 116, 144), (194, 65, 12)


def theory_picture(rows: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> str:
    """Draw the measurements of `atoll.commands.theory.measure` as SVG, above their summary by dimension."""
    dim = max(row["d"] for row in rows)
    shown = [row for row in rows if row["d"] == dim]
    parts = [
        text(20, 28, f"Dec-SSL's linear theory, d = {dim:,}, mean of {plural(len(shown), 'seed')}", size=17),
        _grid(20, 80, "Self-supervised: representability of e_j", _self_supervised(shown), SELF),
        _grid(470, 80, "Supervised: correlation of the features with e_j", _supervised(shown), SUPERVISED),
        _chart(
            70,
            400,
            "Self-supervised: mean loss of representability",
            {
                "source, j ≠ k": _points(summary, "loss_local"),
                "global": _points(summary, "loss_global"),
            },
            lambda d: summary["c"] * d**-0.8,
            f"{summary['c']:.2f}·d^(−4/5)",
            SELF,
        ),
        _chart(
            520,
            400,
            "Supervised: mean correlation with e_j, j ≠ k",
            {"source, j ≠ k": _points(summary, "cross_correlation")},
            lambda d: summary["c_supervised"] * d**-0.1,
            f"{summary['c_supervised']:.2f}·d^(−1/10)",
            SUPERVISED,
        ),
    ]
    return picture(WIDTH, HEIGHT, parts)


Grid = list[tuple[str, list[float]]]


def _mean(tables: Sequence[Sequence[float]]) -> list[float]:
    return [sum(column) / len(tables) for column in zip(*tables, strict=True)]


def _self_supervised(rows: Sequence[Mapping[str, Any]]) -> Grid:
    return [*_by_source(rows, "local", "noise"), ("global", _mean([row["global"] for row in rows]))]


def _supervised(rows: Sequence[Mapping[str, Any]]) -> Grid:
    return _by_source(rows, "supervised", "supervised_noise")


def _by_source(rows: Sequence[Mapping[str, Any]], name: str, rest: str) -> Grid:
    """Means over seeds: a row for each source, with the mean over the other directions in its last column."""
    return [
        (f"source {k + 1}", _mean([[*row[name][k], row[rest][k]] for row in rows]))
        for k in range(rows[0]["sources"])
    ]


def _points(summary: Mapping[str, Any], name: str) -> dict[int, float]:
    return {int(dim): one[name] for dim, one in summary["dims"].items()}


def _grid(x: float, y: float, title: str, rows: Grid, colour: tuple[int, int, int]) -> Html:
    """Table of values from 0 to 1, each on its shade."""
    columns = max(len(values) for _, values in rows)
    heads = [*(f"e_{j + 1}" for j in range(columns - 1)), "rest"]
    parts = [text(x, y - 14, title, 14)]
    left, top = x + 80, y + 22
    for j, head in enumerate(heads):
        parts.append(text(left + (j + 0.5) * CELL, top - 7, head, 12, "middle", MUTED))
    for i, (name, values) in enumerate(rows):
        parts.append(text(x, top + (i + 0.6) * CELL, name, 13))
        for j, value in enumerate(values):
            share = min(1.0, max(0.0, value))
            shade = ",".join(str(round(255 + share * (part - 255))) for part in colour)
            box = {"x": f"{left + j * CELL:.1f}", "y": f"{top + i * CELL:.1f}"}
            parts.append(tag("rect", **box, width=str(CELL - 2), height=str(CELL - 2), fill=f"rgb({shade})"))
            light = "#ffffff" if share > 0.6 else INK
            middle = left + (j + 0.5) * CELL - 1
            parts.append(text(middle, top + (i + 0.58) * CELL, f"{value:.2f}", 12, "middle", light))
    return join(parts)


def _chart(
    x: float,
    y: float,
    title: str,
    series: Mapping[str, Mapping[int, float]],
    bound: Any,
    bound_name: str,
    colour: tuple[int, int, int],
) -> Html:
    """Chart with logarithmic axes: mean values by dimension, and the bound of the largest as a dashed line."""
    width, height = 340, 170
    dims = sorted({dim for points in series.values() for dim in points})
    values = [value for points in series.values() for value in points.values() if value > 0]
    # The bound of a single dimension is drawn over a decade.
    span = dims if len(dims) > 1 else [dims[0], 10 * dims[0]]
    values += [bound(dim) for dim in span]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    first, last = math.log10(span[0]), math.log10(span[-1])

    def place(dim: float, value: float) -> tuple[float, float]:
        across = (math.log10(dim) - first) / (last - first)
        up = (math.log10(value) - low) / max(1, high - low)
        return x + across * width, y + height * (1 - up)

    stroke = f"rgb({','.join(map(str, colour))})"
    parts = [text(x - 50, y - 26, title, 14)]
    for power in range(low, high + 1):
        level = place(dims[0], 10.0**power)[1]
        ends = {"x1": f"{x}", "x2": f"{x + width}", "y1": f"{level:.1f}", "y2": f"{level:.1f}"}
        parts.append(tag("line", **ends, stroke="#d8dee2"))
        parts.append(text(x - 8, level + 4, f"{10.0**power:g}", 11, "end", MUTED))
    for dim in dims:
        parts.append(text(place(dim, values[0])[0], y + height + 18, f"d = {dim:,}", 11, "middle", MUTED))
    line = " ".join("{:.1f},{:.1f}".format(*place(dim, bound(dim))) for dim in span)
    parts.append(tag("polyline", points=line, fill="none", stroke=MUTED, stroke_dasharray="5 4"))
    parts.append(text(x + width, y - 8, f"- - bound of all: {bound_name}", 12, "end", MUTED))
    for place_of, (name, points) in enumerate(series.items()):
        dashes = "" if place_of == 0 else "2 3"
        line = " ".join("{:.1f},{:.1f}".format(*place(dim, value)) for dim, value in points.items())
        parts.append(
            tag(
                "polyline", points=line, fill="none", stroke=stroke, stroke_width="2", stroke_dasharray=dashes
            )
        )
        for dim, value in points.items():
            cx, cy = place(dim, value)
            inside = stroke if place_of == 0 else "#ffffff"
            parts.append(tag("circle", cx=f"{cx:.1f}", cy=f"{cy:.1f}", r="3.5", fill=inside, stroke=stroke))
        mark = "—●—" if place_of == 0 else "··○··"
        parts.append(text(x + 150 * place_of, y + height + 40, f"{mark} {name}", 12, fill=stroke))
    return join(parts)
