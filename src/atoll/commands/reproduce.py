"""A paper's table, run again: our numbers beside the published ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from atoll.commands.compare import Bar, compare
from atoll.commands.evaluate import measure_run
from atoll.commands.paper_tables import NOT_COVERED, PaperTable, Row, load_table, make_rows, table_names
from atoll.core.config import describe, flatten
from atoll.core.errors import UserError
from atoll.core.files import write_whole
from atoll.core.provenance import version
from atoll.core.run_folder import Run
from atoll.data.options import DataOptions
from atoll.data.sources import load_data
from atoll.recipe.prerequisites import prerequisite_recipes
from atoll.report import write_report
from atoll.report.numbers import UNMEASURED, markdown_table, mean_std
from atoll.report.tables import plural, source_words

NO_SETTING = ("engine.", "name", "title", "seed")  # of a recipe: they change no paper's setting


@dataclass(frozen=True)
class Reproduction:
    """A paper's table that is run, or is to be.

    Attributes:
        name: of the table, or its file.
        table: as its file has it.
        rows: those of it that are wanted.
        seeds: how many runs a row.
        out: folder of the runs and of what comes of them.
    """

    name: str
    table: PaperTable
    rows: tuple[Row, ...]
    seeds: int
    out: Path

    def folders(self, row: Row) -> list[Path]:
        """A row's runs."""
        first = row.recipe.seed
        return [self.out / f"{row.name}-seed{seed}" for seed in range(first, first + self.seeds)]

    @property
    def published(self) -> bool:
        """Whether there are published values to compare with."""
        return any(value.get("value") for row in self.rows for value in row.published.values())

    def changed(self) -> dict[str, str]:
        """What ``--set`` changed in the table's setting: the key, and both values in words."""
        whose = "the paper's" if self.published else "the table's"
        found: dict[str, tuple[list[Any], list[Any]]] = {}
        for row in self.rows:
            ours, papers = (flatten(describe(one.completed())) for one in (row.recipe, row.paper))
            for key in sorted(ours | papers):
                if ours.get(key) != papers.get(key) and not key.startswith(NO_SETTING):
                    for values, value in zip(
                        found.setdefault(key, ([], [])), (ours.get(key), papers.get(key)), strict=True
                    ):
                        values += [] if value in values else [value]
        return {
            key: f"{_words(ours)}; in {whose} setting {_words(papers)}"
            for key, (ours, papers) in found.items()
        }

    def notes(self) -> list[str]:
        """What a reader of the table must know; a note under a choice's name, where a row has that choice."""
        used = {name for row in self.rows for name in row.choices}
        return [
            *(
                note
                for name, note in self.table.notes.items()
                if note and (name in used or name not in self.table.choices)
            ),
            *(
                f"{column}: {UNMEASURED}, because {why}."
                for column, why in {
                    (column, one.missing) for row in self.rows for column, one in row.measures.items()
                }
                if why
            ),
        ]


def find_table(
    name: str,
    wanted: Sequence[str] = (),
    settings: Sequence[str] = (),
    seeds: int = 1,
    out: Path | None = None,
) -> Reproduction:
    """A table by name or file, ready to run.

    Args:
        name: of the table, or a TOML file.
        wanted: rows, by name or by a pattern such as ``"cifar10-*"``; none: all.
        settings: ``key=value``, laid over the recipe of every row.
        seeds: how many runs a row.
        out: folder for the runs; None: ``runs/TABLE``.

    Raises:
        UserError: an unknown table or row, or a mistake in a recipe.
    """
    table, folder = load_table(name)
    rows = make_rows(table, settings, folder, wanted)
    return Reproduction(name, table, tuple(rows), seeds, out or Path("runs") / Path(name).stem)


def reproduce(job: Reproduction, callback: Callable[[str], Bar] | None = None) -> dict[str, Any]:
    """Run a table's rows; finished runs are not run again.

    Returns:
        What is written: the table with all its numbers, as ``table.json`` holds it; ``table.md`` and
        ``report.html`` stand beside it.

    A run that comes to nothing leaves its cell to the row's other seeds, or empty; ``failures`` say why.

    Raises:
        UserError: images that are not there, before anything is run; or a run's own mistake.
    """
    _require_images(job)
    compared = compare([row.recipe for row in job.rows], job.seeds, job.out, callback)
    finished = {run.folder: run for run in compared.runs}
    rows = []
    for row in job.rows:
        mine = [finished[folder] for folder in job.folders(row) if folder in finished]
        rows.append(_measured(row, mine, [_results(row, run) for run in mine]))
    record = {
        "table": job.name,
        "title": job.table.title,
        "version": version(),
        "published": job.published,
        "changed": job.changed(),
        "notes": job.notes(),
        "failures": compared.failures,
        "rows": rows,
    }
    write_whole(job.out / "table.json", (json.dumps(record, indent=2, ensure_ascii=False) + "\n").encode())
    write_whole(job.out / "table.md", markdown(record).encode())
    if finished:
        write_report(list(finished), job.out / "report.html", compared.failures.values())
    return record


def images_of(rows: Iterable[Row]) -> list[DataOptions]:
    """The images that rows need: to train on, to measure on, and for what a method must train first."""
    found: list[DataOptions] = []
    for row in rows:
        first = [other.data for other in prerequisite_recipes(row.recipe).values()]
        for data in [row.recipe.data, *first, *([row.measured_on] if row.measured_on else [])]:
            if data not in found:
                found.append(data)
    return found


def image_names(rows: Iterable[Row]) -> str:
    """The same in words."""
    return ", ".join(dict.fromkeys(source_words(describe(data)) for data in images_of(rows)))


def _require_images(job: Reproduction) -> None:
    """Refuse now what would fail after hours."""
    waiting = [row for row in job.rows if not all(Run(folder).finished for folder in job.folders(row))]
    for data in images_of(waiting):
        try:
            load_data(data, seed=0)
        except UserError as error:
            needing = [row.name for row in waiting if data in images_of([row])]
            raise UserError(
                f"{len(needing)} of {len(job.rows)} rows of {job.name} (such as {needing[0]}) need the images "
                f"{source_words(describe(data))}: {error}; or choose other rows with --rows"
            ) from None


def _results(row: Row, run: Run) -> dict[str, Any]:
    """A run's evaluation, on the row's images; what was measured before is not measured again."""
    record: dict[str, Any] = run.read_json("evaluation.json")
    if row.measured_on is None:
        return record
    protocols = list(dict.fromkeys(one.protocol for one in row.measures.values() if one.of))
    asked = {
        "round": record["round"],
        "data": describe(row.measured_on),
        "evaluation": describe(row.recipe.evaluation),
        "protocols": protocols,
    }
    name = f"evaluation-on-{Path(row.measured_on.path or row.measured_on.source).name}.json"
    before = run.read_json(name)
    if before is None or before["asked"] != asked:
        before = {"asked": asked, "results": measure_run(run, protocols, row.measured_on)}
        run.write(name, json.dumps(before) + "\n")
    results: dict[str, Any] = before["results"]
    return results


def _measured(row: Row, runs: Sequence[Run], results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    values = {}
    for column, one in row.measures.items():
        ours = [one.times * result[one.of] for result in results if one.of in result]
        values[column] = {
            "published": row.published[column].get("value", ""),
            "ours": ours,
            "measure": one.of or None,
        }
    return {"name": row.name, "label": row.label, "runs": [run.name for run in runs], "values": values}


def cells(record: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """The table's header and its rows, each of our values followed by the published one where there are such."""
    columns = list(record["rows"][0]["values"])
    beside = ("paper",) if record["published"] else ()
    header = ["", *(heading for column in columns for heading in (column, *beside))]
    digits = {
        column: max(_digits(row["values"][column]["published"]) for row in record["rows"])
        for column in columns
    }
    rows = []
    for row in record["rows"]:
        shown = [row["label"]]
        for column, value in row["values"].items():
            theirs = (value["published"] or UNMEASURED,) if beside else ()
            shown += [mean_std(value["ours"], digits[column]), *theirs]
        rows.append(shown)
    return header, rows


def _digits(published: str) -> int:
    """After the point; where there is nothing to compare with, as many as the papers have."""
    return len(published.partition(".")[2]) if published else 2


def remarks(record: dict[str, Any]) -> list[str]:
    """The lines below the table: first, and clearly, what is not the paper's setting."""
    changed = [f"{key} = {words}" for key, words in record["changed"].items()]
    warning = (
        "NOT the paper's setting, and so no reproduction of its numbers:"
        if record["published"]
        else "NOT the table's own setting:"
    )
    return [
        *([warning, *changed] if changed else []),
        *(f"Failed: {why}" for why in record["failures"].values()),
        *record["notes"],
    ]


def markdown(record: dict[str, Any]) -> str:
    """The table as Markdown."""
    lines = markdown_table(*cells(record))
    notes = [f"- {note}" for note in remarks(record)]
    return "\n".join([f"# {record['title']}", "", *lines, "", *notes, f"- Atoll {record['version']}."]) + "\n"


def shown(record: dict[str, Any]) -> Group:
    """The table for a terminal."""
    header, rows = cells(record)
    return _terminal(record["title"], header, rows, remarks(record))


def plan_table(job: Reproduction) -> Group:
    """The runs that a table needs, before any of them."""
    rows = []
    for row in job.rows:
        recipe = row.recipe
        partition, train = recipe.partition, recipe.train
        alpha = {"dirichlet": f"({partition.alpha})", "skew": f"(β {partition.beta})"}.get(partition.kind, "")
        clients = "" if partition.kind == "centralised" else f" × {partition.clients}"
        finished = sum(Run(folder).finished for folder in job.folders(row))
        rows.append(
            [
                row.name,
                recipe.composed.title,
                source_words(describe(recipe.data))
                + (f" → {source_words(describe(row.measured_on))}" if row.measured_on else ""),
                f"{partition.kind}{alpha}{clients}",
                f"{recipe.model.encoder}",
                f"{train.rounds} × {train.epochs}",
                f"{finished}/{job.seeds}",
            ]
        )
    header = ["row", "method", "images", "partition", "encoder", "rounds × epochs", "finished"]
    below = [
        f"{plural(len(rows) * job.seeds, 'run')}, into {job.out}; images: {image_names(job.rows)}",
        *remarks(
            {"published": job.published, "changed": job.changed(), "notes": job.notes(), "failures": {}}
        ),
    ]
    return _terminal(job.table.title, header, rows, below)


def listing() -> Group:
    """All tables, and which are not covered."""
    rows = []
    for name in table_names():
        job = find_table(name)
        rows.append([name, job.table.title, str(len(job.rows)), image_names(job.rows)])
    below = [f"not covered: {name}: {why}" for name, why in NOT_COVERED.items()]
    return _terminal("", ["table", "shows", "runs", "images"], rows, below)


def _terminal(
    title: str, header: Sequence[str], rows: Iterable[Sequence[str]], below: Sequence[str]
) -> Group:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column, heading in enumerate(header):
        table.add_column(Text(heading), overflow="fold", no_wrap=column == 0)
    for row in rows:
        table.add_row(*map(Text, row))
    return Group(*([Text(title)] if title else []), table, *map(Text, below))


def _words(values: Sequence[Any]) -> str:
    return " or ".join("unset" if value is None else str(value) for value in values)
