"""Comparison of several runs in the terminal and in Markdown, with the rows and columns of the page's table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Group

from atoll.core.given import names_code
from atoll.core.run_folder import Run
from atoll.evaluation.metrics import constants
from atoll.report.folders import Folder, edited_files_named, read_folder
from atoll.report.formats import markdown_table
from atoll.report.groups import (
    Row,
    group_runs,
    have_other_seeds,
    result_columns,
    result_rows,
    seed_words,
    stopped_early,
)
from atoll.report.html import Html, bullets, join, table
from atoll.report.numbers import UNMEASURED
from atoll.report.same_images import other_sites
from atoll.report.terminal import terminal_table

Cells = tuple[list[str], list[list[str]], list[str]]  # a table's header, its rows, and the notes below it


def comparison_cells(runs: Sequence[Run]) -> Cells:
    """Compare the results of runs, the untrained encoder first; mean ± std over seeds.

    The label of a method contains its number of runs if another method has more.

    Raises:
        UserError: See `read_folder` and `edited_files_named`.
    """
    with edited_files_named([run.folder for run in runs]):
        return _compared([read_folder(run.folder) for run in runs])


def _compared(folders: Sequence[Folder]) -> Cells:
    groups = group_runs(folders)
    rows = result_rows(groups)
    header, cells = result_cells(rows)
    seeds = sorted({folder.seed for folder in folders})
    versions = sorted({str(folder.results["version"]) for folder in folders if "version" in folder.results})
    made = seed_words(seeds)
    if have_other_seeds(rows):
        made += f" ({'; '.join(f'{row.label}: {seed_words(row.seeds)}' for row in rows if row.seeds)})"
    made += f"; Atoll {', '.join(versions)}" if versions else ""  # none has finished
    protocols = sorted({_protocol(folder) for folder in folders if folder.results})
    notes = [note for note in (*protocols, other_sites(groups), stopped_early(groups), made) if note]
    return header, cells, notes


def result_cells(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Header and cells of the table of results, as text."""
    most = max((row.runs for row in rows if row.line >= 0), default=0)
    columns = result_columns(rows)
    cells = []
    for row in rows:
        values = [(row.spread(metric), metric) for metric in columns]
        words = ("".join(value.words(metric.digits)) if value else UNMEASURED for value, metric in values)
        cells.append([_label(row, most), *words])
    return ["method", *(metric.title for metric in columns)], cells


def _label(row: Row, most: int) -> str:
    # A row without any result shows no values.
    runs = len(row.results) or row.runs
    return f"{row.label} ({runs} of {most} runs)" if row.line >= 0 and runs < most else row.label


def comparison_table(cells: Cells) -> Group:
    """Format a comparison for a terminal."""
    return terminal_table(*cells)


def comparison_html(cells: Cells) -> Html:
    """Format a comparison for a notebook."""
    header, rows, notes = cells
    return join([table("Results", header, rows), bullets(notes)])


def comparison_markdown(cells: Cells, failures: Iterable[str] = ()) -> str:
    """Format a comparison as Markdown, with the reasons why other runs failed."""
    header, rows, notes = cells
    below = [*notes, *(f"Failed: {why}" for why in failures)]
    return "\n".join([*markdown_table(header, rows), "", *(f"- {note}" for note in below)]) + "\n"


def _protocol(folder: Folder) -> str:
    results = folder.results
    facts = [f"{folder.recipe.get('title') or folder.setting}; {results.get('split', 'unknown')} split"]
    for protocol, values in constants(results).items():
        if names_code(protocol):
            facts.append(f"{protocol} ({', '.join(f'{name}={value}' for name, value in values.items())})")
            continue
        if "k" in values:
            name = protocol.replace("knn", "kNN")
            facts.append(f"{name} k={values['k']}, T={values['temperature']}, cosine")
        if "optimizer" in values:
            name = f"{protocol} {values['name']}" if protocol.endswith("probe") else protocol
            rate = values.get("lr") or values["head_lr"]
            steps = f"{values['epochs']} epochs, batch {values['batch_size']}"
            facts.append(f"{name} ({values['optimizer']}, lr {rate}, {steps})")
    if "note" in results:
        facts.append(results["note"])
    return "; ".join(facts)
