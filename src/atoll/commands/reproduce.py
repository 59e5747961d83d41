"""``atoll reproduce``: runs the rows of a paper's table, and compares their results with the published ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from atoll.commands.compare import Bar, compare
from atoll.commands.evaluate import measure_run
from atoll.core.config import describe
from atoll.core.errors import UserError
from atoll.core.files import write_whole
from atoll.core.provenance import version
from atoll.core.run_folder import Run
from atoll.data.sources import load_data
from atoll.papers.reproduction import Reproduction, images_of
from atoll.papers.rows import Row
from atoll.report import write_report
from atoll.report.reproduction import markdown, section
from atoll.report.wording import source_words


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
        **job.header(),
        "version": version(),
        "failures": compared.failures,
        "rows": rows,
    }
    write_whole(job.out / "table.json", (json.dumps(record, indent=2, ensure_ascii=False) + "\n").encode())
    write_whole(job.out / "table.md", markdown(record).encode())
    if finished:
        write_report(list(finished), job.out / "report.html", compared.failures.values(), section(record))
    return record


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
