"""Data of a paper's figure, panel by panel, from the runs of its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from atoll.commands.figure_models import landscape, representation_maps
from atoll.core.run_folder import Run
from atoll.engines.federation import Federation
from atoll.papers.figures import Figure, Panel
from atoll.papers.rows import Row
from atoll.papers.tables import PaperTable
from atoll.report.numbers import spread

Drawn = dict[str, Any]
BOX = ("p5", "p25", "p50", "p75", "p95")


@dataclass(frozen=True)
class Results:
    """What a figure is drawn from.

    Attributes:
        table: The figure's file.
        rows: The selected rows.
        runs: Finished runs of each row, by name.
        values: The record of each row's columns, by name.
    """

    table: PaperTable
    rows: Sequence[Row]
    runs: Mapping[str, Sequence[Run]]
    values: Mapping[str, Mapping[str, Any]]


def figure_data(figure: Figure, results: Results) -> Drawn:
    """Compute what a figure's panels show.

    Args:
        figure: The figure.
        results: The results of its rows.

    Returns:
        Plain values: the paper's statement, panels for `atoll.report.plots.figure_svg`, and the names of panels of
        which the rows have no result.
    """
    panels: list[Drawn] = []
    empty: list[str] = []
    for panel in figure.panels:
        rows = panel.choose(results.rows)
        drawn = [made for made in PANELS[panel.kind](panel, rows, results) if made] if rows else []
        panels += drawn
        empty += [] if drawn else [panel.title or panel.label or panel.y or panel.kind]
    return {"says": figure.says, "panels": panels, "empty": empty}


def _frame(panel: Panel, kind: str, title: str = "", **more: Any) -> Drawn:
    titles = ": ".join(filter(None, (panel.title, title)))
    return {
        "kind": kind,
        "title": titles,
        "x": panel.x,
        "y": panel.label or panel.y,
        "log": panel.log,
        **more,
    }


def _grouped(panel: Panel, rows: Sequence[Row], results: Results) -> dict[str, dict[Any, list[float]]]:
    """Values of a column by series and place."""
    found: dict[str, dict[Any, list[float]]] = {}
    for row, label in zip(rows, panel.series(rows, results.table), strict=True):
        values = results.values.get(row.name, {}).get(panel.y, {}).get("ours", [])
        if values:
            found.setdefault(label, {}).setdefault(panel.place(row), []).extend(values)
    return found


def _summary(values: Iterable[Sequence[float]]) -> dict[str, list[float | None]]:
    spreads = [spread(list(one)) for one in values]
    return {
        "y": [one.mean if one else None for one in spreads],
        "s": [one.std if one else None for one in spreads],
    }


def _points(panel: Panel, rows: Sequence[Row], results: Results) -> list[Drawn]:
    series, levels = [], []
    for label, by_place in _grouped(panel, rows, results).items():
        if None in by_place:
            levels.append({"label": label, **_summary([by_place.pop(None)])})
        xs = sorted(by_place)
        if xs:
            series.append({"label": label, "x": xs, **_summary(by_place[x] for x in xs)})
    return [_frame(panel, "lines", series=series, levels=levels)] if series or levels else []


def _bars(panel: Panel, rows: Sequence[Row], results: Results) -> list[Drawn]:
    grouped = _grouped(panel, rows, results)
    if not panel.places:  # a bar for each row
        grouped = {"": {label: by_place[None] for label, by_place in grouped.items()}}
    groups = list(dict.fromkeys(place for by_place in grouped.values() for place in by_place))
    series = [
        {"label": label, **_summary(by_place.get(group, []) for group in groups)}
        for label, by_place in grouped.items()
    ]
    return [_frame(panel, "bars", groups=[str(group) for group in groups], series=series)] if groups else []


def _scatter(panel: Panel, rows: Sequence[Row], results: Results) -> list[Drawn]:
    points = []
    for row, label in zip(rows, panel.series(rows, results.table), strict=True):
        columns = results.values.get(row.name, {})
        x, y = (spread(columns.get(column, {}).get("ours", [])) for column in (panel.x, panel.y))
        note = spread(columns.get(panel.note, {}).get("ours", [])) if panel.note else None
        if x and y:
            points.append(
                {"label": label + (f" ({note.mean:.1f})" if note else ""), "x": x.mean, "y": y.mean}
            )
    return [_frame(panel, "scatter", points=points)] if points else []


def metric_curve(run: Run, key: str, x: str = "round") -> dict[int, tuple[float, float]]:
    """By round, where on the x axis it stands (round, or megabytes so far), and a key's value in the run's metrics.

    The last round has the final evaluation's value if the metrics have none.
    """
    section, _, name = key.rpartition(":")
    lines = run.metrics
    traffic = list(accumulate(1e-6 * (line.get("bytes_up", 0) + line.get("bytes_down", 0)) for line in lines))
    found = {}
    for line, megabytes in zip(lines, traffic, strict=True):
        values = line.get(section, {}) if section else line
        if section == "evaluation" and line is lines[-1] and name not in values:
            values = run.read_json("evaluation.json") or {}
        if isinstance(value := values.get(name), int | float):
            found[line["round"]] = (line["round"] if x == "round" else megabytes, float(value))
    return found


def _curves(panel: Panel, rows: Sequence[Row], results: Results) -> list[Drawn]:
    series, reached = [], []
    for row, label in zip(rows, panel.series(rows, results.table), strict=True):
        curves = [metric_curve(run, panel.y, panel.x) for run in results.runs.get(row.name, ())]
        rounds = sorted(set().union(*curves))  # a run may lack some, and traffic differs from run to run
        steps = [[curve[round] for curve in curves if round in curve] for round in rounds]
        if not steps:
            continue
        scaled = _summary([panel.times * y for _, y in step] for step in steps)
        series.append(
            {"label": label, "x": [sum(x for x, _ in step) / len(step) for step in steps], **scaled}
        )
        for target in panel.targets:
            places = [_first(curve, target / panel.times) for curve in curves]
            known = [place for place in places if place is not None]
            words = ", ".join(map(_four_digits, known)) + f" {panel.x}" if known else "not reached"
            missed = f" ({len(places) - len(known)} of {len(places)} runs do not reach it)" if known else ""
            reached.append(f"{label} reaches {target:g}: {words}{missed if len(known) < len(places) else ''}")
    return [_frame(panel, "lines", series=series, levels=[], remarks=reached)] if series else []


def _four_digits(place: float) -> str:
    """Round to four digits, without an exponent."""
    return f"{float(f'{place:.4g}'):,.15g}"


def _first(curve: Mapping[int, tuple[float, float]], target: float) -> float | None:
    return next((x for _, (x, y) in sorted(curve.items()) if y >= target), None)


def _first_runs(panel: Panel, rows: Sequence[Row], results: Results) -> Iterator[tuple[str, Run]]:
    """The label and the first run of each row, for what has no mean over seeds."""
    for row, label in zip(rows, panel.series(rows, results.table), strict=True):
        for run in results.runs.get(row.name, ())[:1]:
            yield label, run


def _boxes(panel: Panel, rows: Sequence[Row], results: Results) -> list[Drawn]:
    made = []
    for label, run in _first_runs(panel, rows, results):
        boxes = [
            (line["round"], [line["measures"][f"angles/{mark}"] for mark in BOX])
            for line in run.metrics
            if f"angles/{BOX[0]}" in line.get("measures", {})
        ]
        at, shown = [at for at, _ in boxes], [box for _, box in boxes]
        made += [_frame(panel, "boxes", label, at=at, boxes=shown)] if boxes else []
    return made


def _layers(panel: Panel, rows: Sequence[Row], results: Results) -> list[Drawn]:
    made = []
    for label, run in _first_runs(panel, rows, results):
        lines = [line for line in run.metrics if line.get("layers")]
        names = list(lines[0]["layers"]) if lines else []
        values = [[line["layers"][name] for line in lines] for name in names]
        at = [str(line["round"]) for line in lines]
        made += [_frame(panel, "heat", label, rows=names, columns=at, values=values)] if names else []
    return made


def _clients(panel: Panel, rows: Sequence[Row], results: Results) -> list[Drawn]:
    made = []
    for row, label in zip(rows, panel.series(rows, results.table), strict=True):
        partition = Federation(row.recipe).partition
        if partition.counts is None:
            continue
        distance = f" (label distance {partition.label_distance:.2f})"
        made.append(
            _frame(
                panel,
                {"clients": "heat", "classes": "stacked"}[panel.kind],
                label + distance,
                rows=partition.names,
                columns=list(partition.classes),
                values=partition.counts.tolist(),
            )
        )
    return made


def _maps(panel: Panel, rows: Sequence[Row], results: Results) -> list[Drawn]:
    made = []
    for label, run in _first_runs(panel, rows, results):
        content = representation_maps(run, panel.models, panel.colour, panel.classes)
        made += [_frame(panel, "map", label, **content)] if content else []
    return made


def _landscapes(panel: Panel, rows: Sequence[Row], results: Results) -> list[Drawn]:
    made = []
    for label, run in _first_runs(panel, rows, results):
        content = landscape(run, panel.resolution)
        made += [_frame(panel, "landscape", label, **content)] if content else []
    return made


PANELS: dict[str, Callable[[Panel, Sequence[Row], Results], list[Drawn]]] = {
    "points": _points,
    "bars": _bars,
    "scatter": _scatter,
    "curves": _curves,
    "boxes": _boxes,
    "layers": _layers,
    "map": _maps,
    "landscape": _landscapes,
    "clients": _clients,
    "classes": _clients,
}
