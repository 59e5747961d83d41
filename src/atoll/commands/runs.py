"""Several runs as an object in Python: one table, one page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, overload

from rich.console import Group

from atoll.commands.handle import Run
from atoll.commands.report import check_page
from atoll.core.errors import UserError
from atoll.core.extras import require
from atoll.core.files import to_path
from atoll.core.metrics_lines import numbers
from atoll.core.text import type_words
from atoll.report import write_report
from atoll.report.comparison import comparison_cells, comparison_html, comparison_table

if TYPE_CHECKING:
    import pandas


class Runs(Sequence[Run]):
    """Several runs, compared as in ``atoll compare``: runs that differ only in their seed are one row, mean ± std.

    A notebook shows them as a table.

    Args:
        runs: The runs, or the paths of their folders.

    Raises:
        UserError: There are none, or a folder holds no run.

    Example:
        >>> import tempfile
        >>> import atoll
        >>> iid = {"kind": "iid", "clients": 2}
        >>> small = {"base": "digits", "data": {"limit": 100}, "partition": iid, "train": {"rounds": 0}}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     runs = atoll.Runs(atoll.simulate({**small, "seed": s}, out=f"{folder}/{s}") for s in range(2))
        ...     page = runs.report(f"{folder}/report.html")
        >>> len(runs), page.name
        (2, 'report.html')
    """

    def __init__(self, runs: Iterable[Run | str | PathLike[str]]) -> None:
        if isinstance(runs, str | PathLike) or not isinstance(runs, Iterable):
            raise UserError(f"Runs takes a list of runs, not {type_words(runs)}; for one run, use atoll.Run")
        self._runs = [run if isinstance(run, Run) else Run(to_path(run, "a run")) for run in runs]
        if not self._runs:
            raise UserError("Runs needs at least one run")
        for run in self._runs:
            run.require()

    def __len__(self) -> int:
        return len(self._runs)

    @overload
    def __getitem__(self, index: int) -> Run: ...

    @overload
    def __getitem__(self, index: slice) -> Runs: ...

    def __getitem__(self, index: int | slice) -> Run | Runs:
        """Return one run, or some of them."""
        return Runs(self._runs[index]) if isinstance(index, slice) else self._runs[index]

    def to_pandas(self) -> pandas.DataFrame:
        """Return the final numbers as a table: a row for each run, whose name is the index, with method and seed.

        Raises:
            UserError: pandas is not installed, or a recipe is damaged.
        """
        library = require("pandas", "pandas", "to_pandas")
        rows = [
            {"run": run.name, "method": run.recipe.label, "seed": run.recipe.seed, **numbers(run.results)}
            for run in self
        ]
        frame: pandas.DataFrame = library.DataFrame(rows).set_index("run")
        return frame

    def report(self, out: Path | str) -> Path:
        """Write the page that compares these runs, as ``atoll report`` does.

        Args:
            out: The page's file.

        Returns:
            The page's file.

        Raises:
            UserError: A run is damaged, or the page cannot be written.
        """
        page = to_path(out, "the report")
        check_page(page)
        return write_report([run.folder for run in self], page)

    def __repr__(self) -> str:
        return "\n".join(map(repr, self))

    def __rich__(self) -> Group:
        """Show the results as a table in a terminal."""
        return comparison_table(comparison_cells(self))

    def _repr_html_(self) -> str:
        return comparison_html(comparison_cells(self))
