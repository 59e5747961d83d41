"""The page's tables and sentences: every number with the recipe, seed and protocol that made it."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from atoll.report.folders import Folder
from atoll.report.groups import EXPECTED, Group, differences, show
from atoll.report.html import Html, bullets, join, table, tag
from atoll.report.numbers import (
    ALIGNMENT,
    CLIENTS,
    GEOMETRY,
    Column,
    Spread,
    best,
    columns,
    constants,
    megabytes,
    number,
    spread,
)

Untrained = Sequence[tuple[str, list[dict[str, Any]]]]

MAX_LISTED = 20  # refused and lost updates that are named one by one
MAX_CELLS = 2000  # of a partition's table


def plural(count: int, word: str) -> str:
    """A count and its noun."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def key(line: int) -> Html:
    """The mark that a method has in every figure."""
    return tag("i", class_=f"key k{'u' if line < 0 else line % 8}", aria_hidden="true")


def _method(line: int, label: str, *more: str) -> Html:
    said = (tag("small", text) for text in more if text)
    # On a phone a long name breaks between its words.
    words = [
        part for word in re.split(r"(?<=_)|(?<=[a-z])(?=[A-Z])", label) for part in (Html("<wbr>"), word)
    ]
    return join([tag("span", key(line), tag("span", *words[1:]), class_="method"), *said])


# Results.


def results_table(groups: Sequence[Group], untrained: Untrained) -> Html:
    """Methods side by side, the untrained encoder first."""
    rows = [(_method(-1, label, _seeds(len(found))), found) for label, found in untrained]
    rows += [(_method(i, group.label, _group_facts(group)), group.results) for i, group in enumerate(groups)]
    heads = columns([result for _, found in rows for result in found])
    spreads = [[spread(column.values(found)) for _, found in rows] for column in heads]
    marks = [
        best(line) if column.ranks else [False] * len(line)
        for column, line in zip(heads, spreads, strict=True)
    ]
    body = [
        [
            label,
            *(
                _cell(line[i], column, mark[i])
                for column, line, mark in zip(heads, spreads, marks, strict=True)
            ),
        ]
        for i, (label, _) in enumerate(rows)
    ]
    whole = table("Methods side by side", ["method", *(column.heading for column in heads)], body, "results")
    seeded = any(value is not None and value.count > 1 for line in spreads for value in line)
    return join([whole, _reading(heads, spreads, marks, groups, seeded)])


def _seeds(count: int) -> str:
    return f"mean ± std of {count} seeds" if count > 1 else ""


def _group_facts(group: Group) -> str:
    models = max((len(result.get("by_model", ())) for result in group.results), default=0)
    facts = [_seeds(len(group.results)), f"mean of {models} models, by their clients" if models else ""]
    return "; ".join(fact for fact in facts if fact)


def _cell(value: Spread | None, column: Column, marked: bool = False) -> Html:
    if value is None:
        return tag("td", "–")
    shown = [tag("span", number(value.mean, column.digits), class_="value")]
    if value.std is not None:
        shown.append(tag("span", f" ± {number(value.std, column.digits)}", class_="std"))
    if marked:
        shown.append(tag("span", " highest", class_="unseen"))
    return tag("td", *shown, class_="best" if marked else "")


def _reading(
    heads: Sequence[Column],
    spreads: Sequence[Sequence[Spread | None]],
    marks: Sequence[Sequence[bool]],
    groups: Sequence[Group],
    seeded: bool,
) -> Html:
    """How to read the table, no further than it goes."""
    said = []
    if any(map(any, marks)):
        within = (
            ", and what lies within the standard deviations of it"
            if seeded
            else ". One seed cannot tell a better method from a lucky one"
        )
        said.append(f"Bold: the highest accuracy of the column{within}.")
    results = [result for group in groups for result in group.results]
    tested = {
        (result["knn/test_images"], result["split"]) for result in results if "knn/test_images" in result
    }
    accuracies = [value.mean / 100 for column, line in zip(heads, spreads, strict=True) for value in line
                  if value is not None and column.key == "knn/accuracy"]  # fmt: skip
    if len(tested) == 1 and accuracies:
        ((images, split),) = tested
        top = max(accuracies)
        error = 100 * math.sqrt(top * (1 - top) / images)
        said.append(
            f"With {images:,} {split} images the standard error of an accuracy of {100 * top:.0f} % is "
            f"{error:.1f} points."
        )
    if any(column in GEOMETRY for column in heads):
        said.append(
            "−uniformity is the negative logarithm of the mean Gaussian potential between representations on the "
            "sphere, and the effective rank says how many dimensions they fill: both describe a shape, and more of "
            "them is not by itself better."
        )
    return join(tag("p", sentence, class_="quiet") for sentence in said)


def geometry_table(groups: Sequence[Group], untrained: Untrained) -> Html:
    """Alignment, and uniformity within and between clients; empty where nothing was measured."""
    rows = [(_method(-1, label), found) for label, found in untrained]
    rows += [(_method(i, group.label), group.results) for i, group in enumerate(groups)]
    heads = [
        column for column in (ALIGNMENT, *CLIENTS) if column.values(r for _, found in rows for r in found)
    ]
    if not heads:
        return Html("")
    body = [
        [label, *(_cell(spread(column.values(found)), column) for column in heads)] for label, found in rows
    ]
    caption = "Alignment of two views (lower is closer), and −uniformity of the clients' images"
    return _folded("More geometry", table(caption, ["method", *(column.heading for column in heads)], body))


def models_table(groups: Sequence[Group]) -> Html:
    """Each model of the runs that have several."""
    found = [
        (i, run, name, run.results.get("clients_by_model", {}).get(name), numbers)
        for i, group in enumerate(groups)
        for run in group.runs
        for name, numbers in run.results.get("by_model", {}).items()
    ]
    caption = "The models of the runs that have several"
    return _folded("Each model", _named(caption, ("model", "clients"), groups, found)) if found else Html("")


def sites_table(groups: Sequence[Group]) -> Html:
    """What each site of a real federation measured on its own held-out images."""
    found = [
        (i, run, name, numbers.get("geometry/of_test_images", numbers.get("knn/test_images")), numbers)
        for i, group in enumerate(groups)
        for run in group.runs
        for name, numbers in run.results.get("sites", {}).items()
    ]
    caption = "What each site measured on its own held-out images"
    return _folded("Each site", _named(caption, ("site", "images"), groups, found)) if found else Html("")


def _named(
    caption: str,
    headings: tuple[str, str],
    groups: Sequence[Group],
    found: Sequence[tuple[int, Folder, str, int | None, dict[str, Any]]],
) -> Html:
    """Numbers by a name within a run, with a count beside the name."""
    heads = columns([numbers for *_, numbers in found])
    body = [
        [
            _method(i, groups[i].label, f"seed {run.seed}"),
            name,
            "–" if count is None else f"{count:,}",
            *(_cell(spread(column.values([numbers])), column) for column in heads),
        ]
        for i, run, name, count, numbers in found
    ]
    return table(caption, ["method", *headings, *(column.heading for column in heads)], body)


def _folded(summary: str, *content: str) -> Html:
    return tag("details", tag("summary", summary), *content)


def protocols(groups: Sequence[Group], untrained: Untrained) -> Html:
    """Split and constants, once if all runs share them."""
    sets: dict[str, tuple[list[str], str, dict[str, dict[str, Any]]]] = {}
    measured = [(group.label, result) for group in groups for result in group.results]
    measured = measured or [(label, result) for label, found in untrained for result in found]
    for label, result in measured:
        found = constants(next(iter(result.get("by_model", {}).values()), result))
        split = str(result.get("split", "unknown"))
        labels = sets.setdefault(repr((split, found)), ([], split, found))[0]
        if label not in labels:
            labels.append(label)
    blocks = []
    for labels, split, found in sets.values():
        if len(sets) > 1:
            blocks.append(tag("h4", ", ".join(labels)))
        on = f"Measured on the {split} images."
        if split == "train":
            on = "There are no held-out images: measured on the training images."
        entries = [
            tag("div", tag("dt", "kNN, cosine" if name == "knn" else name), tag("dd", _listed(values)))
            for name, values in found.items()
        ]
        blocks.append(join([tag("p", on), tag("dl", *entries, class_="constants")]))
    if len(sets) > 1:
        warning = "Not all runs were measured in the same way, so their numbers compare with care."
        blocks.insert(0, tag("p", warning, class_="note"))
    return join(blocks) if blocks else tag("p", "Nothing has been measured yet.")


def _listed(values: Mapping[str, Any]) -> str:
    return " · ".join(
        f"{name.replace('_', ' ')} {show(value)}" for name, value in values.items() if value not in ("", None)
    )


def recipe_differences(groups: Sequence[Group]) -> Html:
    """What else than the method differs between the recipes, so that nobody takes it for the method's doing."""
    if len(groups) < 2:
        return Html("")
    apart = differences([group.recipe for group in groups], EXPECTED)
    if not apart:
        said = "The recipes differ in their method and its options alone, and share everything else."
        return tag("p", said)
    body = [[name, *map(show, values)] for name, values in apart.items()]
    caption = "What else than the method differs between the recipes"
    return table(caption, ["recipe key", *(group.label for group in groups)], body)


def provenance(groups: Sequence[Group]) -> Html:
    """Each run, and each recipe in full."""
    body = [
        [
            _method(i, group.label),
            run.name,
            str(run.seed),
            f"{run.rounds} of {run.asked}",
            tag("td", tag("code", run.digest)),
            str(run.results.get("version", "–")),
        ]
        for i, group in enumerate(groups)
        for run in group.runs
    ]
    head = ["method", "folder", "seed", "rounds", "recipe", "Atoll"]
    recipes = (_folded(f"Recipe of {group.label}", tag("pre", group.runs[0].recipe_text)) for group in groups)
    return join([table("The runs, each with the digest of its recipe.toml (SHA-256)", head, body), *recipes])


# Traffic.


def traffic_table(groups: Sequence[Group]) -> Html:
    """Bytes up and down, and the updates that did not count."""
    body = []
    for i, group in enumerate(groups):
        completed_rounds = [[line for line in run.metrics if "bytes_up" in line] for run in group.runs]
        completed_rounds = [lines for lines in completed_rounds if lines]
        if not completed_rounds:
            continue
        cells = []
        for name in ("bytes_up", "bytes_down"):
            totals = [sum(line[name] for line in lines) for lines in completed_rounds]
            rounds = [total / len(lines) for total, lines in zip(totals, completed_rounds, strict=True)]
            cells += [megabytes(statistics.fmean(rounds)), megabytes(statistics.fmean(totals))]
        uncounted = [
            str(sum(len(line.get(name, ())) for lines in completed_rounds for line in lines))
            for name in ("refused", "lost")
        ]
        seconds = statistics.median(line.get("seconds", 0.0) for lines in completed_rounds for line in lines)
        runs = f"mean of {len(completed_rounds)} seeds" if len(completed_rounds) > 1 else ""
        body.append([_method(i, group.label, runs), *cells, *uncounted, f"{seconds:.1f} s"])
    if not body:
        return tag("p", "No round has been run yet.")
    head = [
        "method",
        "up a round",
        "up in all",
        "down a round",
        "down in all",
        "refused",
        "lost",
        "time a round",
    ]
    seeded = "; with several seeds bytes are means over them, and refused and lost are counted over all"
    several = any(len(group.runs) > 1 for group in groups)
    caption = (
        f"What went over the wire, of all clients together, and the median time{seeded if several else ''}"
    )
    return table(caption, head, body)


def uncounted(groups: Sequence[Group]) -> Html:
    """Refused and lost updates by name."""
    said = [
        f"{group.label}, seed {run.seed}, round {line['round']}: client {client}’s update was {name} ({reason})"
        for group in groups
        for run in group.runs
        for line in run.metrics
        for name in ("refused", "lost")
        for client, reason in line.get(name, {}).items()
    ]
    if not said:
        return tag("p", "No update was refused or lost.", class_="quiet")
    more = len(said) - MAX_LISTED
    listed = said[:MAX_LISTED] + ([f"and {more:,} more, which metrics.jsonl names"] if more > 0 else [])
    return bullets(listed)


def egress_table(groups: Sequence[Group]) -> Html:
    """What left each client, and what it kept to itself."""
    body = []
    for i, group in enumerate(groups):
        known = next((result for result in group.results if "egress" in result), None)
        lists = [None, None] if known is None else [known["egress"], known.get("keeps", [])]
        cells = (
            tag("td", "not recorded in this run" if items is None else bullets(items) if items else "nothing")
            for items in lists
        )
        body.append([_method(i, group.label), *cells])
    return table(
        "What left each client, and what each client kept",
        ["method", "left the client", "stayed with the client from round to round"],
        body,
        "words",
    )


# The partition.


def partition_facts(partitions: Sequence[tuple[str, Mapping[str, Any]]]) -> Html:
    """How the training images were dealt."""
    body = []
    for label, partition in partitions:
        sizes = [client["size"] for client in partition["clients"]]
        held, distance = sum(sizes), partition.get("label_distance")
        body.append(
            [
                label,
                f"{len(sizes):,}",
                partition_kind(partition),
                f"{held:,} of {partition.get('num_samples', held):,}",
                f"{min(sizes):,} – {max(sizes):,}",
                "no labels" if distance is None else f"{distance:.3f}",
            ]
        )
    head = ["runs", "clients", "partition", "training images held", "smallest – largest", "label distance"]
    words = (
        "The label distance is the mean L1 distance between a client’s label distribution and the overall one: 0 "
        "if all are alike, at most 2."
    )
    return join([table("How the training images were dealt", head, body), tag("p", words, class_="quiet")])


TELLING = {
    "dirichlet": ("alpha", "variant"),
    "skew": ("beta",),
    "shards": ("classes_per_client",),
    "natural": ("column",),
}


def partition_kind(partition: Mapping[str, Any]) -> str:
    """The kind of partition with the parameters that shape it."""
    options = partition.get("options", {})
    kind = str(options.get("kind", "unknown"))
    said = (
        f"{name.replace('_', ' ')} {show(options[name])}"
        for name in TELLING.get(kind, ())
        if options.get(name) is not None
    )
    return " ".join([kind, *(f"({text})" for text in [", ".join(said)] if text)])


def setting_words(recipe: Mapping[str, Any]) -> str:
    """The images of a run, its clients and how they were dealt, as its recipe says."""
    return f"{images_words(recipe)}, {partition_kind({'options': recipe.get('partition', {})})}"


def images_words(recipe: Mapping[str, Any]) -> str:
    """The images of a run and its clients."""
    data, partition = recipe.get("data", {}), recipe.get("partition", {})
    said = [source_words(data)]
    if data.get("limit"):
        said.append(f"at most {plural(data['limit'], 'image')}")
    if "clients" in partition and partition.get("kind") not in ("natural", "centralised"):
        said.append(plural(partition["clients"], "client"))
    return ", ".join(said)


def source_words(data: Mapping[str, Any]) -> str:
    """Where images come from, as a ``[data]`` section says."""
    source = str(data.get("source", "unknown images"))
    return f"{data['path']} ({source})" if data.get("path") and source != "digits" else source


def partition_tables(partitions: Sequence[tuple[str, Mapping[str, Any]]]) -> Html:
    """The pictures as tables, those that are small enough to be read."""
    found = [whole for label, partition in partitions if (whole := _partition_table(label, partition))]
    return _folded("In numbers", *found) if found else Html("")


def _partition_table(label: str, partition: Mapping[str, Any]) -> Html:
    clients, classes = partition["clients"], [str(name) for name in partition.get("classes") or ()]
    counted = all(client.get("label_counts") for client in clients)
    width = max(len(client["label_counts"]) for client in clients) if counted else 0
    heads = [*classes, *(str(i) for i in range(len(classes), width))][:width]
    if len(clients) * (width + 1) > MAX_CELLS:
        return Html("")
    body = [
        [str(client["name"]), f"{client['size']:,}", *(map(str, client["label_counts"]) if counted else ())]
        for client in clients
    ]
    caption = f"Images by client{' and class' if counted else ''}: {label}"
    return table(caption, ["client", "images", *heads], body)
