"""Data of the figures that the page's script draws: curves, spectra, partitions, maps and their thumbnails."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atoll.core.files import hash_bytes
from atoll.core.tree import Tree
from atoll.evaluation.metrics import (
    ALIGNMENT,
    BYTES_DOWN,
    BYTES_UP,
    LOSS,
    MEASURES,
    SINGULAR_VALUES,
    Metric,
    measured,
)
from atoll.report.folders import Folder, compact
from atoll.report.groups import Group, Row, untrained_rows
from atoll.report.numbers import spread
from atoll.report.pictures import data_uri
from atoll.report.run_tables import distinct_partitions

MAX_CLIENTS = 40  # rows in the picture of a partition
SPRITE_COLUMNS = 32
MAP_SIDE = 1000  # number of grid steps on which a map's points are placed
SMALLEST = 1e-6  # share of the largest singular value below which a value is a rounding error

Points = dict[int, float]  # y by x


def figures(groups: Sequence[Group]) -> dict[str, Any]:
    """Compute the data of all figures."""
    untrained = untrained_rows(groups)
    return {
        "lines": [group.label for group in groups],
        "untrained": [row.label for row in untrained],
        "curves": _curves(groups),
        "measures": _measures(groups),
        "traffic": _traffic(groups),
        "spectrum": _spectrum(groups, untrained),
        "partitions": [
            {"label": label, **_picture(partition)} for label, partition in distinct_partitions(groups)
        ],
        **_maps(groups),
    }


def _panel(title: str, lines: Iterable[tuple[int, Sequence[Points]]], **more: Any) -> dict[str, Any]:
    """A chart. A line is the mean over seeds, with the standard deviation if there are several."""
    series = []
    for line, runs in lines:
        xs = sorted({x for run in runs for x in run})
        spreads = [spread([run[x] for run in runs if x in run]) for x in xs]
        if not xs:
            continue
        series.append(
            {
                "line": line,
                "x": xs,
                "y": [compact(found.mean) if found else None for found in spreads],
                "s": [None if found is None or found.std is None else compact(found.std) for found in spreads]
                if len(runs) > 1
                else None,
            }
        )
    return {"title": title, "series": series, **more}


def _curves(groups: Sequence[Group]) -> list[dict[str, Any]]:
    panels = []
    for objective in dict.fromkeys(map(_objective, groups)):
        lines = [
            (i, [_points(run.metrics, LOSS) for run in group.runs])
            for i, group in enumerate(groups)
            if _objective(group) == objective
        ]
        panels.append(_panel(f"{_capitalised(LOSS.title)} ({objective})", lines, digits=LOSS.digits))
    during = [line["evaluation"] for group in groups for run in group.runs for line in _evaluated(run)[1:]]
    metrics = measured(during)
    metrics += [metric for metric in measured(during, ALIGNMENT.place) if metric == ALIGNMENT]
    for metric in metrics:
        lines = [(i, [_curve(run, metric) for run in group.runs]) for i, group in enumerate(groups)]
        panels.append(_panel(_capitalised(metric.title), lines, digits=metric.digits))
    return [panel for panel in panels if panel["series"]]


def _capitalised(title: str) -> str:
    """A column's heading as a figure's title; a name such as kNN is unchanged."""
    return title if title[1:2].isupper() else title[:1].upper() + title[1:]


def _objective(group: Group) -> str:
    # Losses of different objectives are different quantities, so they do not share an axis.
    return str(group.recipe.get("method", {}).get("objective") or group.label)


def _evaluated(run: Folder) -> list[dict[str, Any]]:
    return [line for line in run.metrics if line.get("evaluation")]


def _curve(run: Folder, metric: Metric) -> Points:
    lines = [{"round": line["round"], **line["evaluation"]} for line in _evaluated(run)]
    if run.results and run.rounds not in (line["round"] for line in lines):
        lines.append({**run.results, "round": run.rounds})
    return _points(lines, metric)


def _points(lines: Iterable[Mapping[str, Any]], metric: Metric) -> Points:
    """The finite values of a metric by round."""
    return {line["round"]: value[0] for line in lines if (value := metric.values([line]))}


def _measures(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Each loss of a method that has several, and each of the recipe's measures, by round."""
    losses: dict[str, Metric] = {}
    for line in (line for group in groups for run in group.runs for line in run.metrics):
        for name in line.get("losses", {}):
            if name != LOSS.key and len(line["losses"]) > 2:
                losses[name] = replace(LOSS, key=name, heading=f"loss term {name}")
    panels = []
    for where, metrics in (("losses", losses.values()), ("measures", MEASURES)):
        for metric in metrics:
            lines = [
                (i, [_nested(run, where, metric) for run in group.runs]) for i, group in enumerate(groups)
            ]
            panels.append(_panel(_capitalised(metric.title), lines, digits=metric.digits))
    return [panel for panel in panels if panel["series"]]


def _nested(run: Folder, where: str, metric: Metric) -> Points:
    lines = [{"round": line["round"], **line[where]} for line in run.metrics if line.get(where)]
    return _points(lines, metric)


def _traffic(groups: Sequence[Group]) -> list[dict[str, Any]]:
    panels = []
    for metric in (BYTES_UP, BYTES_DOWN):
        lines = [(i, [_points(run.metrics, metric) for run in group.runs]) for i, group in enumerate(groups)]
        panels.append(_panel(_capitalised(metric.title), lines, digits=metric.digits, zero=True))
    return [panel for panel in panels if panel["series"]]


def _spectrum(groups: Sequence[Group], untrained: Sequence[Row]) -> dict[str, Any]:
    lines = [(i, _spectra(group.results)) for i, group in enumerate(groups)]
    lines += [(row.line, _spectra(row.results)) for row in untrained]
    return _panel(SINGULAR_VALUES.title, lines, log=True, digits=SINGULAR_VALUES.digits, x="i")


def _spectra(results: Iterable[Mapping[str, Any]]) -> list[Points]:
    """Singular values as shares of the largest, because only their decay is of interest, not their scale.

    Those of a run with several models are the mean over its models, weighted by their clients.
    """
    spectra = [spectrum for result in results if len(spectrum := _spectrum_of(result))]
    # Cut to the shortest, because a mean over a decreasing number of seeds would jump.
    return [dict(zip(range(1, min(map(len, spectra)) + 1), values, strict=False)) for values in spectra]


def _spectrum_of(result: Mapping[str, Any]) -> list[float]:
    models = result.get("by_model", {"": result})
    found = {
        name: model[SINGULAR_VALUES.key] for name, model in models.items() if SINGULAR_VALUES.key in model
    }
    shares = {
        name: [value / values[0] for value in values if value > SMALLEST * values[0]]
        for name, values in found.items()
        if values and values[0] > 0
    }
    clients = [result.get("clients_by_model", {}).get(name, 1) for name in shares]
    return [fmean(values, clients) for values in zip(*shares.values(), strict=False)]


# The partition.


def _picture(partition: Mapping[str, Any]) -> dict[str, Any]:
    clients = partition["clients"]
    shown = clients
    if len(clients) > MAX_CLIENTS:  # evenly from the largest to the smallest
        by_size = sorted(clients, key=lambda client: -client["size"])
        shown = [by_size[round(i * (len(clients) - 1) / (MAX_CLIENTS - 1))] for i in range(MAX_CLIENTS)]
    return {
        "classes": list(partition.get("classes") or ()),
        "clients": [
            {"name": str(client["name"]), "size": client["size"], "counts": client.get("label_counts")}
            for client in shown
        ],
        "of": len(clients),
    }


# The map.


def _maps(groups: Sequence[Group]) -> dict[str, Any]:
    """A map for each method, from its first seed with a map; equal thumbnails are stored once."""
    maps: list[dict[str, Any]] = []
    sprites: dict[str, dict[str, Any]] = {}
    for i, group in enumerate(groups):
        run = next((run for run in group.runs if run.map is not None), None)
        if run is None or not len(run.map["points"]):
            continue
        thumbnails = run.map["thumbnails"]
        key = hash_bytes(thumbnails.numpy().tobytes() + str(tuple(thumbnails.shape)).encode())
        if key not in sprites:
            sprites[key] = _sprite(thumbnails)
        maps.append({"line": i, "seed": run.seed, "sprite": list(sprites).index(key), **_placed(run.map)})
    return {"maps": maps, "sprites": list(sprites.values())}


def _placed(picture: Tree) -> dict[str, Any]:
    points = np.nan_to_num(picture["points"].double().numpy())
    low, high = points.min(0), points.max(0)
    scale = float((high - low).max()) or 1.0
    placed = (MAP_SIDE * (0.5 + (points - (low + high) / 2) / scale)).round().astype(int)
    labels = picture["labels"]
    classes = [str(name) for name in picture["classes"]]
    if labels is not None:
        classes += [str(i) for i in range(len(classes), int(labels.max()) + 1)]
    return {
        "x": placed[:, 0].tolist(),
        "y": placed[:, 1].tolist(),
        "labels": None if labels is None else labels.tolist(),
        "classes": classes,
    }


def _sprite(thumbnails: Tensor) -> dict[str, Any]:
    """All thumbnails in one PNG, row by row."""
    n, channels, height, width = thumbnails.shape
    rows = -(-n // SPRITE_COLUMNS)
    padded = torch.zeros(rows * SPRITE_COLUMNS, channels, height, width, dtype=torch.uint8)
    padded[:n] = thumbnails
    tiles = padded.reshape(rows, SPRITE_COLUMNS, channels, height, width).permute(0, 3, 1, 4, 2)
    uri = data_uri(tiles.reshape(rows * height, SPRITE_COLUMNS * width, channels))
    return {"uri": uri, "columns": SPRITE_COLUMNS, "rows": rows, "width": width, "height": height}
