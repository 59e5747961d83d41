"""``atoll report``: writes one page about one or several runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from atoll.core.errors import UserError, warn
from atoll.core.files import write_whole
from atoll.core.outputs import check_output
from atoll.core.run_folder import Run
from atoll.report.page import read_and_page


def report_runs(runs: Sequence[Path], output: Path | None = None) -> Path:
    """Write the report of one or several runs.

    Args:
        runs: The runs' folders.
        output: The page, a name that ends in .html; None for ``report.html`` in the run's folder, or, for several
            runs, in the working folder.

    Returns:
        The page. What it lacks because a file is missing or damaged is a warning.

    Raises:
        UserError: A folder contains no run, the page of several runs would overwrite another page, or see
            `check_page`.
    """
    folders = [Run(run).require().folder for run in runs]
    if output:
        check_page(output)
    out = output or (folders[0] if len(folders) == 1 else Path()) / "report.html"
    if len(folders) > 1 and not output and out.exists():
        raise UserError(f"{out} already exists and may belong to another run; choose a file with -o FILE")
    read, text = read_and_page(folders)
    for lack in (sentence for folder in read for sentence in folder.missing):
        warn(lack)
    write_whole(out, text.encode(errors="replace"))
    return out


def check_page(path: Path) -> None:
    """Refuse a file for a report that is no page, or one of a run's other files.

    Raises:
        UserError: Its name does not end in .html, or it belongs to a run.
    """
    if path.suffix.lower() != ".html":
        raise UserError(f"a report is a web page, and {path} does not end in .html; choose another --output")
    check_output(path)
