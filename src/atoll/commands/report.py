"""``atoll report``: one page about one run or several."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from atoll.core.errors import UserError
from atoll.core.run_folder import Run
from atoll.report import write_report


def report_runs(runs: Sequence[Path], output: Path | None = None) -> Path:
    """Write the page.

    Args:
        runs: the runs' folders.
        output: the page; None: ``report.html`` in the run's folder, or here where there are several runs.

    Returns:
        The page.

    Raises:
        UserError: a folder holds no run, or the page of several runs would overwrite another page.
    """
    folders = [Run(run).require().folder for run in runs]
    page = output or (folders[0] if len(folders) == 1 else Path()) / "report.html"
    if len(folders) > 1 and not output and page.exists():
        raise UserError(f"{page} is here already, maybe another run's own; name the page with -o FILE")
    return write_report(folders, page)
