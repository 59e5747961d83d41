"""The report: one self-contained page about runs, with results, curves, partitions, traffic and recipes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from atoll.core.environment import in_words
from atoll.core.errors import UserError
from atoll.core.files import write_whole
from atoll.core.text import plural
from atoll.report import results_tables, run_tables
from atoll.report.detection import detection_table
from atoll.report.figures import figures
from atoll.report.folders import Folder, edited_files_named, read_folder
from atoll.report.groups import Group, group_runs, result_rows
from atoll.report.html import Html, bullets, join, json_for_script, tag
from atoll.report.neighbours import neighbours_tables
from atoll.report.paired import differences_table
from atoll.report.wording import images_words, partition_words, without_folders

NOTHING = Html("")


def write_report(
    folders: Sequence[Path],
    out: Path,
    failures: Iterable[str] = (),
    comparison: Html = NOTHING,
    title: str = "",
) -> Path:
    """Write a page that compares runs. The page needs no network, and the same runs give the same page.

    Args:
        folders: Folders of finished or unfinished runs; runs that differ only in their seed become one row.
        out: The page's file, which is written atomically.
        failures: Sentences about failed runs, which the page shows.
        comparison: What the page shows above the results, such as a comparison with a paper.
        title: The page's title; by default the recipes'.

    Returns:
        ``out``.

    Raises:
        UserError: There are no folders, a folder holds no run, or the page cannot be written.
    """
    write_whole(out, read_and_page(folders, failures, comparison, title)[1].encode(errors="replace"))
    return out


def read_and_page(
    folders: Sequence[Path], failures: Iterable[str] = (), comparison: Html = NOTHING, title: str = ""
) -> tuple[list[Folder], str]:
    """Read the folders of runs, and make the page's text.

    Raises:
        UserError: See `read_folders` and `edited_files_named`.
    """
    with edited_files_named(folders):
        runs = read_folders(folders)
        return runs, page(runs, failures, comparison, title)


def read_folders(folders: Sequence[Path]) -> list[Folder]:
    """Read the folders of runs, each once.

    Raises:
        UserError: There are no folders, or a folder holds no run.
    """
    if not folders:
        raise UserError("a report needs the folder of at least one run")
    distinct = {Path(folder).resolve(): Path(folder) for folder in folders}
    return [read_folder(folder) for folder in distinct.values()]


def page(
    runs: Sequence[Folder], failures: Iterable[str] = (), comparison: Html = NOTHING, title: str = ""
) -> str:
    """Make the page's text."""
    groups = group_runs(runs)
    rows = result_rows(groups)
    drawn = figures(groups)
    no_round = "No round has been completed yet."
    return Template(_file("page.html")).substitute(
        title=join([title or _title(groups)]),
        style=_file("page.css"),
        islands=_islands(runs),
        lead=join([_lead(groups)]),
        facts=_facts(groups),
        notices=_notices(runs, failures),
        comparison=comparison,
        results=join(
            [
                results_tables.results_table(groups, rows),
                differences_table(groups, rows),
                results_tables.geometry_table(rows),
            ]
        ),
        models=join(
            [
                results_tables.models_table(groups),
                results_tables.sites_table(groups),
                results_tables.clients_table(groups),
            ]
        ),
        evaluations=results_tables.evaluations_table(groups),
        detection=detection_table(groups),
        protocols=results_tables.protocols(groups),
        differences=run_tables.recipe_differences(groups),
        curves=join(
            [
                _figure("curves", drawn["curves"], no_round, _curve_words(groups, drawn["curves"])),
                _figure("measures", drawn["measures"], "", MEASURE_WORDS),
            ]
        ),
        traffic=run_tables.traffic_table(groups),
        traffic_curves=_figure("traffic", drawn["traffic"], "", ""),
        failed_updates=run_tables.failed_updates(groups),
        partition=_partition(run_tables.distinct_partitions(groups), run_tables.sampled_clients(groups)),
        map=_figure("map", drawn["maps"], _no_map(runs), _measured(MAP_WORDS, runs) + _largest(groups)),
        spectrum=_figure(
            "spectrum",
            drawn["spectrum"]["series"],
            "No singular values have been measured yet.",
            _measured(SPECTRUM_WORDS, runs),
        ),
        neighbours=neighbours_tables(groups),
        egress=run_tables.egress_table(groups),
        provenance=run_tables.provenance(groups),
        data=json_for_script(drawn),
        script="\n".join(map(_file, SCRIPTS)),
    )


# In this order, because each uses the previous ones.
SCRIPTS = ("elements.js", "charts.js", "partition.js", "map.js", "save.js", "page.js")
RING = 34  # radius of the atoll in the heading, whose box is 100 wide
MAX_ISLANDS = 36
MAX_NAMES = 5  # largest number of methods whose names are in the first sentence
MAP_WORDS = (
    "Each mark is one of the {split} images. t-SNE places images with similar representations near each other. "
    "Groups are meaningful; distances between groups, sizes and directions are not."
)
MEASURE_WORDS = "The terms of the losses, and what evaluation.measures takes of the models, by round."
SPECTRUM_WORDS = (
    "Singular values of the {split} images’ representations as shares of the largest, on a logarithmic axis. A "
    "representation whose curve falls early uses few dimensions. The curve of a run with several models is their "
    "mean, weighted by their clients."
)


def _file(name: str) -> str:
    return (resources.files("atoll.report") / name).read_text(encoding="utf-8")


def _measured(words: str, runs: Sequence[Folder]) -> str:
    """Insert the split of the runs' evaluations into a sentence."""
    splits = dict.fromkeys(str(run.results["split"]) for run in runs if "split" in run.results)
    return words.format(
        split=" or ".join({"train": "training"}.get(split, split) for split in splits) or "test"
    )


def _title(groups: Sequence[Group]) -> str:
    titles = {str(group.recipe.get("title") or _images(group)) for group in groups}
    return titles.pop() if len(titles) == 1 else f"Comparison of {len(groups)} recipes"


def _images(group: Group) -> str:
    run = group.runs[0]
    if run.of_sites:  # which have images of their own, and not the recipe's
        return f"Images of {plural(len(run.partition['clients']), 'site')}"
    words = images_words(group.recipe)
    return words if group.recipe.get("data", {}).get("path") else words[:1].upper() + words[1:]


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _lead(groups: Sequence[Group]) -> str:
    labels = (
        _listed([group.label for group in groups]) if len(groups) <= MAX_NAMES else f"{len(groups)} methods"
    )
    runs = [run for group in groups for run in group.runs]
    clients = sorted({len(run.partition["clients"]) for run in runs if run.partition.get("clients")})
    over = f" over {plural(clients[-1], 'client')}" if len(clients) == 1 else ""
    rounds = sorted({run.rounds for run in runs})
    span = plural(rounds[0], "round") if len(rounds) == 1 else f"{rounds[0]} to {rounds[-1]} rounds"
    return (
        f"{labels}: visual representations learned{over} in {span}, from images that never left their owners."
    )


def _facts(groups: Sequence[Group]) -> Html:
    runs = [run for group in groups for run in group.runs]
    found: dict[str, list[str]] = {
        "Federation": ["real sites" if run.of_sites else "simulation" for run in runs],
        "Data": [
            "sites' local folders"
            if run.of_sites or "sites" in run.results
            else str(run.recipe.get("data", {}).get("source", ""))
            for run in runs
        ],
        "Partition": [partition_words(run.partition) for run in runs if run.partition],
        "Training images": [
            f"{run.partition['num_samples']:,}" for run in runs if "num_samples" in run.partition
        ],
        "Encoder": [str(run.recipe.get("model", {}).get("encoder", "")) for run in runs],
        "Privacy of a client": [
            "ε {epsilon:.3g} at δ {delta:g}".format(**spent)
            for run in runs
            if run.metrics and (spent := run.metrics[-1].get("privacy"))
        ],
        "Seed": [str(seed) for seed in sorted({run.seed for run in runs})],
        "Computed with": [
            "; then ".join(in_words(one["environment"]) for one in run.results.get("environments", []))
            for run in runs
        ],
        "Time of all rounds": [
            _seconds([run.results["seconds"] for run in runs if "seconds" in run.results])
        ],
        "Atoll": [str(run.results["version"]) for run in runs if "version" in run.results],
    }
    entries = (
        tag("div", tag("dt", name), tag("dd", ", ".join(values)))
        for name, texts in found.items()
        if (values := [text for text in dict.fromkeys(texts) if text])
    )
    return tag("dl", *entries, class_="facts")


def _seconds(times: Sequence[float]) -> str:
    if not times:
        return ""
    least, most = f"{min(times):,.0f}", f"{max(times):,.0f}"
    return f"{most} s" if least == most else f"{least} to {most} s a run"


def _notices(runs: Sequence[Folder], failures: Iterable[str]) -> Html:
    found = {run.name: run.results.get("note") or run.untrained.get("note") for run in runs}
    notes = dict.fromkeys(
        str(note) if len(set(found.values())) == 1 else f"{name}: {note}"
        for name, note in found.items()
        if note
    )
    notes |= dict.fromkeys(
        without_folders(f"{run.name} starts from the weights {run.metrics[0]['start']}")
        for run in runs
        if run.metrics and "start" in run.metrics[0]
    )
    notices = [Html(tag("p", note, class_="note")) for note in notes if note]
    missing = [*map(without_folders, failures), *(sentence for run in runs for sentence in run.missing)]
    if missing:
        notices.append(
            tag("div", tag("p", "Parts of this page are missing."), bullets(missing), class_="note")
        )
    return join(notices)


def _figure(name: str, content: Any, placeholder: str, words: str) -> Html:
    """Element in which the script draws a figure, or the sentence that replaces it."""
    if not content:
        return tag("p", placeholder, class_="muted") if placeholder else Html("")
    caption = [tag("figcaption", words, class_="muted")] if words else []
    return tag("figure", tag("div", "", data_figure=name), *caption)


def _no_map(runs: Sequence[Folder]) -> str:
    if all(run.recipe.get("evaluation", {}).get("map_points") == 0 for run in runs):
        return "The recipes ask for no map (evaluation.map_points = 0)."
    return "No run has a map yet."


def _curve_words(groups: Sequence[Group], panels: Sequence[Mapping[str, Any]]) -> str:
    words = "Losses of different objectives cannot be compared, so they have separate axes."
    if any(0 in line["x"] for panel in panels for line in panel["series"]):
        words = f"Round 0 is the encoder before training. {words}"
    if any(len(group.runs) > 1 for group in groups):
        words += " A line is the mean over seeds; its band is one standard deviation to either side."
    return words


def _largest(groups: Sequence[Group]) -> str:
    several = any(result.get("by_model") for group in groups for result in group.results)
    return (
        " If a method ends with several models, the map shows the one whose clients hold the most images."
        if several
        else ""
    )


def _partition(partitions: Sequence[tuple[str, Mapping[str, Any]]], samples: Html) -> Html:
    if not partitions:
        return tag("p", "The partition of these runs is unknown.", class_="muted")
    picture = _figure("partition", partitions, "", "")
    tables = run_tables.partition_tables(partitions)
    return join([run_tables.partition_facts(partitions), picture, samples, tables])


def _islands(runs: Sequence[Folder]) -> Html:
    """The picture in the heading: a ring of the first run's clients, each with the area of its data."""
    known = [run.partition["clients"] for run in runs if run.partition.get("clients")]
    sizes = [client["size"] for client in known[0][:MAX_ISLANDS]] if known else [1] * 10
    radii = [math.sqrt(size) for size in sizes]
    scale = min(0.8 * math.pi * RING / sum(radii), 0.35 * RING / max(radii))
    gap = (2 * math.pi - 2 * scale * sum(radii) / RING) / len(radii)
    islands, angle = [], -math.pi / 2
    for radius in radii:
        half = scale * radius / RING
        angle += half
        x, y = RING * math.cos(angle), RING * math.sin(angle)
        islands.append(tag("circle", cx=f"{x:.2f}", cy=f"{y:.2f}", r=f"{scale * radius:.2f}"))
        angle += half + gap
    lagoon = tag("circle", class_="lagoon", r=f"{RING}")
    return tag("svg", lagoon, *islands, class_="atoll", viewBox="-50 -50 100 100", aria_hidden="true")
