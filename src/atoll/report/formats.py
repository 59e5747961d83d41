"""A table of results as Markdown, CSV and LaTeX."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path

from atoll.core.files import write_whole
from atoll.report.numbers import UNMEASURED

PLUS_MINUS = " ± "
LATEX = {
    "\\": r"\textbackslash{}",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}"},
    **{"±": r"$\pm$", "−": "$-$", "×": r"$\times$", "≤": r"$\le$", "≥": r"$\ge$", "→": r"$\to$", "–": "--"},
    **{"α": r"$\alpha$", "β": r"$\beta$", "γ": r"$\gamma$", "δ": r"$\delta$", "ε": r"$\varepsilon$"},
    **{"λ": r"$\lambda$", "μ": r"$\mu$", "ρ": r"$\rho$", "σ": r"$\sigma$", "τ": r"$\tau$", "²": "$^2$"},
}


def write_table(path: Path, header: Sequence[str], rows: Sequence[Sequence[str]], markdown: str) -> Path:
    """Write a table as ``.md``, and beside it as ``.csv`` and ``.tex``.

    Args:
        path: The Markdown file.
        header: Headings.
        rows: Cells; the first of each row is its label.
        markdown: The table in Markdown, with its notes.

    Returns:
        ``path``.

    Raises:
        UserError: A file cannot be written.
    """
    write_whole(path, markdown.encode())
    write_whole(path.with_suffix(".csv"), csv_table(header, rows).encode())
    write_whole(path.with_suffix(".tex"), latex_table(header, rows).encode())
    return path


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Format a table as lines of Markdown; the first column is text, the others are numbers."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return [
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in (header, rule, *rows)
    ]


def csv_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a table as CSV; a column with "mean ± std" becomes two, and a missing value an empty cell.

    A heading that several columns have, such as "paper", follows the heading of the column before.

    Example:
        >>> from atoll.report.formats import csv_table
        >>> print(csv_table(["method", "kNN %"], [["SSD", "41.2 ± 0.3"], ["FedBYOL", "–"]]))
        method,kNN %,kNN % std
        SSD,41.2,0.3
        FedBYOL,,
        <BLANKLINE>
    """
    split = [any(PLUS_MINUS in row[i] for row in rows) for i in range(len(header))]

    def line(cells: Sequence[str]) -> list[str]:
        found = [cells[0]]
        for cell, double in list(zip(cells, split, strict=True))[1:]:
            mean, _, std = ("" if cell == UNMEASURED else cell.replace("−", "-")).partition(PLUS_MINUS)
            found += [mean, std] if double else [mean]
        return found

    headings = [header[0]]
    for i, double in list(enumerate(split))[1:]:
        # Readers by name would lose all but the last of equal headings.
        name = f"{header[i - 1]} {header[i]}" if header.count(header[i]) > 1 else header[i]
        headings += [name, f"{name} std"] if double else [name]
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows([headings, *map(line, rows)])
    return file.getvalue()


def latex_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    r"""Format a table for LaTeX with the package booktabs.

    Example:
        >>> from atoll.report.formats import latex_table
        >>> print(latex_table(["method", "kNN %"], [["SSD", "41.2 ± 0.3"]]))
        \begin{tabular}{lr}
        \toprule
        method & kNN \% \\
        \midrule
        SSD & 41.2 $\pm$ 0.3 \\
        \bottomrule
        \end{tabular}
        <BLANKLINE>
    """
    lines = [" & ".join(map(_latex, row)) + r" \\" for row in (header, *rows)]
    columns = "l" + "r" * (len(header) - 1)
    whole = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", lines[0], r"\midrule", *lines[1:]]
    return "\n".join([*whole, r"\bottomrule", r"\end{tabular}", ""])


def _latex(text: str) -> str:
    return "".join(LATEX.get(letter, letter) for letter in text)
