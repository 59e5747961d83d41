"""``atoll reproduce``: runs the rows of a paper's table, and compares their results with the published ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.commands.compare import Bar, compare
from atoll.commands.evaluate import measure_run
from atoll.commands.paper_tables import PaperTable, Row, load_table, make_rows
from atoll.core.config import describe, flatten
from atoll.core.errors import UserError
from atoll.core.files import write_whole
from atoll.core.provenance import version
from atoll.core.run_folder import Run
from atoll.data.options import DataOptions
from atoll.data.sources import load_data
from atoll.recipe.prerequisites import prerequisite_recipes
from atoll.report import write_report
from atoll.report.numbers import UNMEASURED
from atoll.report.reproduction import markdown
from atoll.report.wording import source_words

NO_SETTING = ("engine.", "name", "title", "seed")  # recipe keys that are not part of a paper's setting


@dataclass(frozen=True)
class Reproduction:
    """A paper's table to run.

    Attributes:
        name: Name of the table, or its file.
        table: The content of the file.
        rows: The selected rows.
        seeds: Runs per row.
        out: Folder of the runs and their results.
    """

    name: str
    table: PaperTable
    rows: tuple[Row, ...]
    seeds: int
    out: Path

    def folders(self, row: Row) -> list[Path]:
        """Folders of a row's runs."""
        first = row.recipe.seed
        return [self.out / f"{row.name}-seed{seed}" for seed in range(first, first + self.seeds)]

    @property
    def published(self) -> bool:
        """Whether there are published values to compare with."""
        return any(value.get("value") for row in self.rows for value in row.published.values())

    def changed(self) -> dict[str, str]:
        """Describe the changes of ``--set`` to the table's setting: the key, and both values in words."""
        source = "the paper's" if self.published else "the table's"
        found: dict[str, tuple[list[Any], list[Any]]] = {}
        for row in self.rows:
            run, paper = (flatten(describe(one.completed())) for one in (row.recipe, row.paper))
            for key in sorted(run | paper):
                if run.get(key) != paper.get(key) and not key.startswith(NO_SETTING):
                    for values, value in zip(
                        found.setdefault(key, ([], [])), (run.get(key), paper.get(key)), strict=True
                    ):
                        values += [] if value in values else [value]
        return {
            key: f"{_words(run)}; in {source} setting {_words(paper)}" for key, (run, paper) in found.items()
        }

    def notes(self) -> list[str]:
        """Collect the notes below the table; the note of a choice is included only if a row has the choice."""
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
    """Load a table by name or file, and make its rows.

    Args:
        name: Name of the table, or a TOML file.
        wanted: Rows, by name or by a pattern such as ``"cifar10-*"``; all if empty.
        settings: ``key=value`` settings, applied to the recipe of every row.
        seeds: Runs per row.
        out: Folder of the runs; None for ``runs/TABLE``.

    Raises:
        UserError: The table or a row is unknown, or a recipe is invalid.
    """
    table, folder = load_table(name)
    rows = make_rows(table, settings, folder, wanted)
    return Reproduction(name, table, tuple(rows), seeds, out or Path("runs") / Path(name).stem)


def reproduce(job: Reproduction, callback: Callable[[str], Bar] | None = None) -> dict[str, Any]:
    """Run a table's rows; finished runs are not run again.

    If a run fails, its cell shows the row's other seeds, or is empty; ``failures`` contains the reasons.

    Returns:
        The record of the table, as written to ``table.json``; ``table.md`` and ``report.html`` are next to it.

    Raises:
        UserError: Images are missing (checked before the first run), or a recipe is invalid.
    """
    _require_images(job)
    compared = compare([row.recipe for row in job.rows], job.seeds, job.out, callback)
    finished = {run.folder: run for run in compared.runs}
    rows = []
    for row in job.rows:
        runs = [finished[folder] for folder in job.folders(row) if folder in finished]
        rows.append(_measured(row, runs, [_results(row, run) for run in runs]))
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
    """Images that rows need for training, for the evaluation, and for the prerequisites of their methods."""
    found: list[DataOptions] = []
    for row in rows:
        first = [other.data for other in prerequisite_recipes(row.recipe).values()]
        for data in [row.recipe.data, *first, *([row.measured_on] if row.measured_on else [])]:
            if data not in found:
                found.append(data)
    return found


def image_names(rows: Iterable[Row]) -> str:
    """Sources of the images that rows need, in words."""
    return ", ".join(dict.fromkeys(source_words(describe(data)) for data in images_of(rows)))


def _require_images(job: Reproduction) -> None:
    """Find missing images before the first run."""
    unfinished = [row for row in job.rows if not all(Run(folder).finished for folder in job.folders(row))]
    for data in images_of(unfinished):
        try:
            load_data(data, seed=0)
        except UserError as error:
            affected = [row.name for row in unfinished if data in images_of([row])]
            raise UserError(
                f"{len(affected)} of {len(job.rows)} rows of {job.name} (such as {affected[0]}) need the images "
                f"{source_words(describe(data))}: {error}; or choose other rows with --rows"
            ) from None


def _results(row: Row, run: Run) -> dict[str, Any]:
    """Evaluate a run on the row's images, or load an earlier evaluation."""
    record: dict[str, Any] = run.read_json("evaluation.json")
    if row.measured_on is None:
        return record
    protocols = list(dict.fromkeys(one.protocol for one in row.measures.values() if one.of))
    inputs = {
        "round": record["round"],
        "data": describe(row.measured_on),
        "evaluation": describe(row.recipe.evaluation),
        "protocols": protocols,
    }
    name = f"evaluation-on-{Path(row.measured_on.path or row.measured_on.source).name}.json"
    before = run.read_json(name)
    if before is None or before["asked"] != inputs:
        before = {"asked": inputs, "results": measure_run(run, protocols, row.measured_on)}
        run.write(name, json.dumps(before) + "\n")
    results: dict[str, Any] = before["results"]
    return results


def _measured(row: Row, runs: Sequence[Run], results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    values = {}
    for column, one in row.measures.items():
        measured = [one.times * result[one.of] for result in results if one.of in result]
        values[column] = {
            "published": row.published[column].get("value", ""),
            "ours": measured,
            "measure": one.of or None,
        }
    return {"name": row.name, "label": row.label, "runs": [run.name for run in runs], "values": values}


def _words(values: Sequence[Any]) -> str:
    return " or ".join("unset" if value is None else str(value) for value in values)
