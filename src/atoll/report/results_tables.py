"""The page's tables of results, with the protocols of the evaluation."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Any
from urllib.parse import quote

from atoll.core.run_folder import SITES_OWN
from atoll.evaluation.client_tests import by_client
from atoll.evaluation.metrics import KNN, Metric, constants
from atoll.report.comparison import result_cells
from atoll.report.folders import Folder
from atoll.report.formats import csv_table, latex_table
from atoll.report.groups import Group, Row, have_other_seeds, result_columns, seed_words, untrained_rows
from atoll.report.html import Html, folded, join, table, tag
from atoll.report.numbers import UNMEASURED, Spread, best
from atoll.report.same_images import of_a_model, other_baseline, other_images
from atoll.report.wording import either, show

GEOMETRY_NOTE = (
    "−uniformity is the negative logarithm of the mean Gaussian potential between representations on the sphere. "
    "The effective rank estimates how many dimensions they use. Both describe a shape; a higher value is not "
    "necessarily better."
)

LONG_NAME = 12  # characters


def method_label(line: int, label: str, *more: str) -> Html:
    """A method's name after its mark in the figures, with smaller lines below."""
    mark = tag("i", class_=f"key k{'u' if line < 0 else line % 8}", aria_hidden="true")
    # Where it is too wide, a long name breaks between its words.
    parts = re.split(r"(?<=[_.:])|(?<=[a-z])(?=[A-Z])", label) if len(label) > LONG_NAME else [label]
    words = [part for word in parts for part in (Html("<wbr>"), word)]
    below = (tag("small", text) for text in more if text)
    return join([tag("span", mark, tag("span", *words[1:]), class_="method"), *below])


def results_table(groups: Sequence[Group], rows: Sequence[Row]) -> Html:
    """Table that compares the results of the encoders."""
    columns = result_columns(rows)
    spreads = [[row.spread(metric) for row in rows] for metric in columns]
    results = [result for row in rows for result in row.results]
    alike = [same_protocol(results, metric) for metric in columns]
    marks = [
        best(column) if metric.better == "higher" else [False] * len(column)
        for metric, column in zip(columns, spreads, strict=True)
    ]
    other = (other_images(groups) or other_baseline(groups)) if any(map(any, marks)) else ""
    marks = [
        mark if same and not other else [False] * len(rows) for mark, same in zip(marks, alike, strict=True)
    ]
    most, named = max((len(row.results) for row in rows), default=0), have_other_seeds(rows)
    body = [
        [
            method_label(row.line, row.label, _facts(row, most, named)),
            *(
                _cell(column[i], metric, _place(column, i) if mark[i] else "")
                for metric, column, mark in zip(columns, spreads, marks, strict=True)
            ),
        ]
        for i, row in enumerate(rows)
    ]
    whole = table("Results by method", ["method", *(metric.title for metric in columns)], body, "results")
    seeded = any(value is not None and value.count > 1 for column in spreads for value in column)
    accuracies = [value.mean for row in rows if (value := row.spread(KNN))]
    notes = [
        other or (_meaning_of_bold(seeded) if any(map(any, marks)) else ""),
        "" if other else _other_protocols(columns, alike),
        _standard_error(groups, accuracies),
        GEOMETRY_NOTE if any(metric.key.startswith("geometry/") for metric in columns) else "",
    ]
    return join([whole, _downloads(rows), *(tag("p", note, class_="muted") for note in notes if note)])


def _downloads(rows: Sequence[Row]) -> Html:
    """Links that save the table; the files are in the page."""
    header, cells = result_cells(rows)
    files = {
        "CSV": ("results.csv", "text/csv", csv_table(header, cells)),
        "LaTeX": ("results.tex", "text/x-tex", latex_table(header, cells)),
    }
    links = [
        tag("a", f"Save as {name}", href=f"data:{kind};charset=utf-8,{quote(text)}", download=file)
        for name, (file, kind, text) in files.items()
    ]
    return tag("p", links[0], " · ", links[1], class_="muted")


def _facts(row: Row, most: int, named: bool) -> str:
    """What a row's values are; one seed is told where another row has more, and which they are if they differ."""
    seeds = len(row.results)
    words = f"{seeds} seeds" if seeds > 1 else "one seed"
    models = max((len(result.get("by_model", ())) for result in row.results), default=0)
    facts = [
        f"mean ± std of {words}" if seeds > 1 else words if seeds == 1 < most else "",
        seed_words(row.seeds) if named and row.seeds else "",
        f"mean of {models} models, weighted by their clients" if models else "",
    ]
    return "; ".join(fact for fact in facts if fact)


def _place(column: Sequence[Spread | None], i: int) -> str:
    """Say of a bold value, to readers who do not see that it is bold, whether it is the highest."""
    means = [value.mean if value else -math.inf for value in column]
    return "highest" if means[i] == max(means) else "within the deviations of the highest"


def _cell(value: Spread | None, metric: Metric, place: str = "") -> Html:
    if value is None:
        return tag("td", UNMEASURED)
    mean, std = value.words(metric.digits)
    shown = [tag("span", mean, class_="value")]
    if std:
        shown.append(tag("span", std, class_="std"))
    if place:
        shown.append(tag("span", f" {place}", class_="visually-hidden"))
    return tag("td", *shown, class_="best" if place else "")


def _meaning_of_bold(seeded: bool) -> str:
    if seeded:
        return "Bold: the highest accuracy of the column, and every accuracy within the standard deviations of it."
    return "Bold: the highest accuracy of the column. One seed cannot distinguish a better method from a lucky one."


def same_protocol(results: Iterable[Mapping[str, Any]], metric: Metric) -> bool:
    """Whether all results that have a metric have it under the same constants, so that they can be compared."""
    protocol = metric.key.partition("/")[0]
    found = [_settings(result).get(protocol) for result in results if metric.key in result]
    return all(one == found[0] for one in found)


def _settings(result: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Constants of a result's protocols, without the numbers of images and labels.

    How many there were depends on the seed's partition, not on the protocol.
    """
    return {
        protocol: {name: value for name, value in values.items() if not name.endswith(("images", "labels"))}
        for protocol, values in constants(of_a_model(result)).items()
    }


def _other_protocols(columns: Sequence[Metric], alike: Sequence[bool]) -> str:
    """A sentence that names the columns in which no value is bold because of their protocols; or nothing."""
    found = [
        metric.title
        for metric, same in zip(columns, alike, strict=True)
        if metric.better == "higher" and not same
    ]
    if not found:
        return ""
    return (
        f"No value of {', '.join(found)} is bold, because the runs were evaluated under different protocols."
    )


def _standard_error(groups: Sequence[Group], accuracies: Sequence[float]) -> str:
    results = [result for group in groups for result in group.results]
    tested = {(found["knn/test_images"], found["split"]) for found in results if "knn/test_images" in found}
    if len(tested) != 1 or not accuracies:
        return ""
    ((images, split),) = tested
    top = max(accuracies) / KNN.factor
    error = KNN.factor * math.sqrt(top * (1 - top) / images)
    tests = f"{images:,} images of the sites" if split == SITES_OWN else f"{images:,} {split} images"
    return (
        f"With {tests}, the standard error of an accuracy of {KNN.factor * top:.0f} % is {error:.1f} points."
    )


def geometry_table(rows: Sequence[Row]) -> Html:
    """Table of alignment, and of uniformity within and between clients; empty if nothing was measured."""
    columns = result_columns(rows, "geometry")
    if not columns:
        return Html("")
    body = [
        [method_label(row.line, row.label), *(_cell(row.spread(metric), metric) for metric in columns)]
        for row in rows
    ]
    caption = "Alignment of two views (lower is closer), and −uniformity of the clients’ images"
    heads = ["method", *(metric.title for metric in columns)]
    return folded("More geometry", table(caption, heads, body))


def evaluations_table(groups: Sequence[Group]) -> Html:
    """Table of what `atoll evaluate` measured, a row for each measure, and its constants; empty without any."""
    found: dict[str, tuple[int, list[dict[str, Any]]]] = {}
    for i, group in enumerate(groups):
        for run in group.runs:
            for record in run.evaluations:
                key = repr((i, record["protocol"], record.get("data"), record.get("fingerprints")))
                found.setdefault(key, (i, []))[1].append(record | {"seed": run.seed})
    if not found:
        return Html("")
    body: list[list[str | Html]] = []
    for i, records in found.values():
        first = records[0]
        seeds = f"{len(records)} seeds" if len(records) > 1 else f"seed {first['seed']}"
        row = Row(groups[i].label, records, i, len(records))
        where = _images_words(first.get("data", {}), groups[i].recipe.get("data", {}))
        about = [method_label(i, row.label, seeds), where, first["split"]]
        body += [
            [*about, metric.title, _cell(row.spread(metric), metric)] for metric in result_columns([row])
        ]
    used = _together([constants(of_a_model(record)) for _, records in found.values() for record in records])
    words = (tag("p", f"{protocol}: {constants_words(values)}") for protocol, values in used.items())
    heads = ["method", "images", "split", "measure", "value"]
    whole = table("Measured after the run, by atoll evaluate", heads, body)
    return join([whole, folded("Constants of these measures", *words)])


def _images_words(found: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    """Name the images of an evaluation by what is not as in the recipe."""
    other = {key: value for key, value in found.items() if value != own.get(key)}
    words = [
        PurePath(value).name if key == "path" else f"{key} = {show(value)}" for key, value in other.items()
    ]
    return ", ".join(words) or "the recipe’s"


def models_table(groups: Sequence[Group]) -> Html:
    """Table of each model's results, for runs that end with several models."""
    found = [
        (i, run, name, run.results.get("clients_by_model", {}).get(name), numbers)
        for i, group in enumerate(groups)
        for run in group.runs
        for name, numbers in run.results.get("by_model", {}).items()
    ]
    caption = "Results of each model, for runs that end with several models"
    return folded("Each model", _named(caption, ("model", "clients"), groups, found)) if found else Html("")


def sites_table(groups: Sequence[Group]) -> Html:
    """Table of each site's results on its local held-out images."""
    found = [
        (i, run, name, numbers.get("geometry/of_test_images", numbers.get("knn/test_images")), numbers)
        for i, group in enumerate(groups)
        for run in group.runs
        for name, numbers in run.results.get("sites", {}).items()
    ]
    caption = "Results of each site on its local held-out images"
    return folded("Each site", _named(caption, ("site", "images"), groups, found)) if found else Html("")


def clients_table(groups: Sequence[Group]) -> Html:
    """Table of each client's accuracy on its share of the test images; empty if none was measured."""
    found = [
        (i, run, f"{client:g}", numbers.pop("images"), numbers)
        for i, group in enumerate(groups)
        for run in group.runs
        for client, numbers in by_client(run.results).items()
    ]
    caption = "Accuracy of each client on its share of the test images, with its model"
    return folded("Each client", _named(caption, ("client", "images"), groups, found)) if found else Html("")


def _named(
    caption: str,
    headings: tuple[str, str],
    groups: Sequence[Group],
    found: Sequence[tuple[int, Folder, str, int | None, dict[str, Any]]],
) -> Html:
    """Table of results by a name within a run, with a count next to the name."""
    rows = [Row(name, [numbers], i, 1) for i, _, name, _, numbers in found]
    columns = result_columns(rows)
    body = [
        [
            method_label(i, groups[i].label, f"seed {run.seed}"),
            name,
            UNMEASURED if count is None else f"{count:,}",
            *(_cell(row.spread(metric), metric) for metric in columns),
        ]
        for row, (i, run, name, count, _) in zip(rows, found, strict=True)
    ]
    return table(caption, ["method", *headings, *(metric.title for metric in columns)], body)


def protocols(groups: Sequence[Group]) -> Html:
    """Split and constants of the protocols, listed once if all runs share them."""
    sets: dict[str, tuple[list[str], str, list[dict[str, dict[str, Any]]]]] = {}
    measured = [(group.label, result) for group in groups for result in group.results]
    measured = measured or [(row.label, result) for row in untrained_rows(groups) for result in row.results]
    for label, result in measured:
        if not any("/" in key for key in result):  # the recipe names no protocol
            continue
        split = str(result.get("split", "unknown"))
        labels, _, constants_of = sets.setdefault(repr((split, _settings(result))), ([], split, []))
        constants_of.append(constants(of_a_model(result)))
        if label not in labels:
            labels.append(label)
    blocks = []
    for labels, split, constants_of in sets.values():
        if len(sets) > 1:
            blocks.append(tag("h4", ", ".join(labels)))
        on = f"Measured on the {split} images."
        if split == "train":
            on = "Measured on the training images, because there are no held-out images."
        entries = [
            tag(
                "div", tag("dt", "kNN, cosine" if name == "knn" else name), tag("dd", constants_words(values))
            )
            for name, values in _together(constants_of).items()
        ]
        blocks.append(join([tag("p", on), tag("dl", *entries, class_="constants")]))
    if len(sets) > 1:
        warning = "The runs were evaluated under different protocols. Compare their results with care."
        blocks.insert(0, tag("p", warning, class_="note"))
    return join(blocks) if blocks else tag("p", "Nothing has been measured yet.")


def _together(runs: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Constants of several runs by protocol; one that differs, such as a count, as all its values."""
    values: dict[str, dict[str, dict[str, None]]] = {}
    for run in runs:
        for protocol, found in run.items():
            for name, value in found.items():
                if value not in ("", None):
                    values.setdefault(protocol, {}).setdefault(name, {})[show(value)] = None
    return {
        protocol: {name: either(list(shown)) for name, shown in of_protocol.items()}
        for protocol, of_protocol in values.items()
    }


def constants_words(values: Mapping[str, Any]) -> str:
    """List a protocol's constants in one line."""
    return " · ".join(
        f"{name.replace('_', ' ')} {show(value)}" for name, value in values.items() if value not in ("", None)
    )
