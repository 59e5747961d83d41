"""``atoll reproduce``: runs the rows of a paper's table, and compares their results with the published ones."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from atoll.commands.compare import Comparison, check_folders, compare
from atoll.commands.evaluate import measure_run
from atoll.commands.figures import Drawn, Results, figure_data
from atoll.commands.progress import Bar
from atoll.core.config import describe
from atoll.core.errors import UserError
from atoll.core.files import write_whole
from atoll.core.provenance import version
from atoll.core.run_folder import DETECTION, Run
from atoll.data.detection.load import load_detection, why_no_objects
from atoll.data.options import DataOptions
from atoll.data.partition.partition import Partition
from atoll.data.sources import Splits, load_data, why_missing
from atoll.engines.federation import Federation
from atoll.evaluation import PROTOCOLS
from atoll.evaluation.detection.average_precision import require_pycocotools
from atoll.papers.figures import Figure, figure_of
from atoll.papers.reproduction import Reproduction, images_of, missing_images
from atoll.papers.rows import Detection, Row
from atoll.recipe.prerequisites import prerequisite_recipes
from atoll.recipe.recipe import recipe_of
from atoll.report import write_report
from atoll.report.folders import read_folder
from atoll.report.formats import write_table
from atoll.report.groups import group_runs, stopped_early
from atoll.report.plots import figure_svg, require_plots
from atoll.report.reproduction import cells, markdown, section
from atoll.report.wording import source_words


def reproduce(
    job: Reproduction,
    callback: Callable[[str], Bar] | None = None,
    other_environment: bool = False,
    restart: bool = False,
) -> dict[str, Any]:
    """Run a table's rows; finished runs are not run again.

    If a run fails, its cell shows the row's other seeds, or is empty; ``failures`` contains the reasons.

    Args:
        job: The table, its rows and where their runs are.
        callback: Makes a progress bar for a title.
        other_environment: Whether to continue runs in another environment.
        restart: Whether to delete runs that cannot be continued, and to start them again.

    Returns:
        The record of the table, as written to ``table.json``; ``table.md`` and ``report.html`` are next to it. A
        figure also has ``figure.json`` and ``figure.svg``, and no page if it shows partitions only.

    Raises:
        UserError: Images or a library are missing (checked before the first run), or a recipe is invalid.
    """
    figure = _figure(job)
    if any(row.detection for row in job.rows):
        require_pycocotools()
    _require_images(job)
    folders = {row.name: job.folders(row) for row in job.rows}  # before this table has runs of its own
    trainings = job.trainings() if not figure or figure.trains else []
    compared = Comparison([], {})
    if trainings:
        compared = compare(
            trainings, job.seeds, job.out, callback, restart=restart, other_environment=other_environment
        )
    done = {run.folder for run in compared.runs}
    finished: dict[Path, Run] = {}
    rows, runs_of = [], {}
    for row in job.rows:
        runs = [Run(folder) for folder in folders[row.name] if folder in done or folder.parent != job.out]
        runs_of[row.name] = runs
        finished |= {run.folder: run for run in runs}
        names = [run.name if run.folder in done else f"{run.folder.parent.name}/{run.name}" for run in runs]
        rows.append(_measured(row, names, [_results_or_failure(row, run, compared) for run in runs]))
    early = stopped_early(group_runs([read_folder(folder) for folder in finished]))
    record = {
        **job.header(),
        "notes": [*job.notes(), *filter(None, [early])],
        "version": version(),
        "failures": compared.failures,
        "rows": rows,
    }
    write_whole(job.out / "table.json", (json.dumps(record, indent=2, ensure_ascii=False) + "\n").encode())
    if figure:
        values = {row["name"]: row["values"] for row in rows}
        record["figure"] = _drawn(job, figure_data(figure, Results(job.table, job.rows, runs_of, values)))
    write_table(job.out / "table.md", *cells(record), markdown(record))
    if finished:
        failed = compared.failures.values()
        write_report(list(finished), job.out / "report.html", failed, section(record), job.title)
    return record


def _figure(job: Reproduction) -> Figure | None:
    """Return the figure that the rows are run for, which can be drawn here; None for a table."""
    if figure := figure_of(job.table):
        require_plots()
    return figure


def _drawn(job: Reproduction, data: Drawn) -> Drawn:
    """Write ``figure.json``, and ``figure.svg`` if there is a panel; return the data with the drawing."""
    written = {**data, "title": job.title, "version": version(), "changed": job.changed()}
    write_whole(job.out / "figure.json", (json.dumps(written, ensure_ascii=False) + "\n").encode())
    mark = "\nNOT the paper's setting" if job.changed() else ""
    svg = figure_svg(data["panels"], job.title + mark) if data["panels"] else ""
    if svg:
        write_whole(job.out / "figure.svg", svg.encode())
    else:
        (job.out / "figure.svg").unlink(missing_ok=True)  # of other rows
    return {**data, "svg": svg}


@dataclass(frozen=True)
class RowCheck:
    """What a dry run found out about a row.

    Attributes:
        row: The row.
        clients: The seeds' clients and their sizes, in words; empty if nothing was built.
        missing: Reason why images are not on this machine; empty if they are.
        fault: Reason why the row cannot run; empty if it can.
    """

    row: Row
    clients: str = ""
    missing: str = ""
    fault: str = ""


def dry_run(job: Reproduction, other_environment: bool = False, restart: bool = False) -> list[RowCheck]:
    """Build the federation of each row whose images are on this machine, for each seed, without training.

    Args:
        job: The table, its rows and where their runs are.
        other_environment: Whether runs would be continued in another environment.
        restart: Whether runs that cannot be continued would be started again.

    Raises:
        UserError: The figure cannot be drawn.
    """
    _figure(job)
    missing = cache(why_missing)
    load = lru_cache(maxsize=4)(load_data)
    faults: dict[str, str] = {}
    for recipe in job.trainings():
        try:
            check_folders(recipe, job.seeds, job.out, restart, other_environment)
        except UserError as error:
            faults[recipe.name] = str(error)
    checks = [_check_row(job, row, missing, load) for row in job.rows]
    return [replace(one, fault=one.fault or faults.get(job.training_of(one.row), "")) for one in checks]


def _check_row(
    job: Reproduction,
    row: Row,
    missing: Callable[[DataOptions], str],
    load: Callable[[DataOptions, int], Splits],
) -> RowCheck:
    partitions = []
    try:
        for words, reason in missing_images(row, missing).items():
            return RowCheck(row, missing=f"{words}: {reason}")
        for seed in range(row.recipe.seed, row.recipe.seed + job.seeds):
            recipe = replace(row.recipe, seed=seed)
            for other in prerequisite_recipes(recipe).values():
                Federation(other, load(other.data, seed))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # clients that sit out; they are in the result
                partitions.append(Federation(recipe, load(recipe.data, seed)).partition)
        if row.measured_on:
            load(row.measured_on, row.recipe.seed)
        if row.detection:
            require_pycocotools()
            load_detection(
                row.detection.data, row.detection.options.train_split, row.detection.options.test_split
            )
    except UserError as error:
        return RowCheck(row, fault=str(error))
    return RowCheck(row, _client_words(partitions))


def _client_words(partitions: Sequence[Partition]) -> str:
    counts = sorted({len(partition) for partition in partitions})
    sizes = [size for partition in partitions for size in partition.sizes]
    out = max(len(partition.sit_out) for partition in partitions)
    clients = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    each = " – ".join(f"{size:,}" for size in sorted({min(sizes), max(sizes)}))
    return f"{clients}: {each}{f', {out} sit out' if out else ''}"


def require_built(checks: Sequence[RowCheck]) -> None:
    """Check that a dry run found no row that cannot run.

    Raises:
        UserError: There is one.
    """
    faults = [check for check in checks if check.fault]
    if faults:
        raise UserError(
            f"{len(faults)} of {len(checks)} rows cannot run, such as {faults[0].row.name}: {faults[0].fault}"
        )


def _require_images(job: Reproduction) -> None:
    """Find missing images before the first run."""
    unfinished = [row for row in job.rows if not all(Run(folder).finished for folder in job.folders(row))]
    for row in unfinished:
        if row.detection and (why := why_no_objects(row.detection.data)):
            raise UserError(f"rows of {job.name} (such as {row.name}) detect objects: {why}")
    for data in images_of(unfinished):
        try:
            load_data(data, seed=0)
        except UserError as error:
            affected = [row.name for row in unfinished if data in images_of([row])]
            raise UserError(
                f"{len(affected)} of {len(job.rows)} rows of {job.name} (such as {affected[0]}) need the images "
                f"{source_words(describe(data))}: {error}; or choose other rows with --rows"
            ) from None


def _detected(row: Row, detection: Detection, run: Run) -> dict[str, Any]:
    """Fine-tune a run's encoder to detect objects, or load an earlier result."""
    from atoll.commands.detect import detect, prepare_detection  # imports torchvision, which takes a second

    options = replace(detection.options, seed=recipe_of(run).seed)
    out = run.folder / DETECTION / row.name
    (record,) = detect(prepare_detection(run.folder, detection.data, options, out=out))
    return {
        f"{DETECTION}/{kind}/{name}": value
        for kind in ("bbox", "segm")
        for name, value in record.get(kind, {}).items()
        if isinstance(value, float)
    }


def _results_or_failure(row: Row, run: Run, compared: Comparison) -> dict[str, Any]:
    """A run's results; none, and a failure beside those of the runs, if it cannot be evaluated as the row asks."""
    try:
        return _results(row, run)
    except UserError as error:
        compared.failures[run.name] = str(error)
        return {}


def _results(row: Row, run: Run) -> dict[str, Any]:
    """Evaluate a run as the row asks, or load an earlier evaluation."""
    record: dict[str, Any] = run.results
    if row.detection:
        record = record | _detected(row, row.detection, run)
    protocols = list(
        dict.fromkeys(one.protocol for one in row.measures.values() if one.protocol in PROTOCOLS)
    )
    if row.measured_on is None:
        measured = {key.partition("/")[0] for key in record}
        protocols = [name for name in protocols if name not in measured]  # if another row has trained it
        if not protocols:
            return record
        name = f"evaluation-table-{'-'.join(protocols)}.json"
    else:
        name = f"evaluation-table-on-{row.measured_on.short_name}.json"
    inputs = {
        "round": record["round"],
        "data": describe(row.measured_on) if row.measured_on else None,
        "evaluation": describe(row.recipe.evaluation),
        "protocols": protocols,
    }
    before = run.read_json(name)
    if before is None or before.get("asked") != inputs:
        before = {"asked": inputs, "results": measure_run(run, protocols, row.measured_on)}
        run.write(name, json.dumps(before) + "\n")
    results: dict[str, Any] = before["results"]
    return results if row.measured_on else record | results


def _measured(row: Row, runs: Sequence[str], results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    values = {}
    for column, one in row.measures.items():
        measured = [one.times * result[one.of] for result in results if one.of in result]
        values[column] = {
            "published": row.published[column].get("value", ""),
            "ours": measured,
            "measure": one.of or None,
        }
    return {"name": row.name, "label": row.label, "runs": list(runs), "values": values}
