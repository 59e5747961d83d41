"""Tables as files: read back by pandas-like readers and by LaTeX's rules."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from atoll.report.formats import LATEX, csv_table, latex_table, write_table

HEADER = ["method", "kNN %", "rank"]
ROWS = [["SSD, α = 0.1", "41.20 ± 0.35", "−3.1"], ["a|b & c_d", "–", "70.0"]]


def test_the_csv_holds_numbers() -> None:
    first, *rest = csv.reader(io.StringIO(csv_table(HEADER, ROWS)))
    assert first == ["method", "kNN %", "kNN % std", "rank"]
    assert rest == [["SSD, α = 0.1", "41.20", "0.35", "-3.1"], ["a|b & c_d", "", "", "70.0"]]
    assert float(rest[0][3]) == -3.1


def test_equal_headings_follow_the_column_that_they_are_of() -> None:
    table = csv_table(["", "LP %", "paper", "FT %", "paper"], [["SSD", "1.0 ± 0.5", "2.0", "3.0", "4.0"]])
    (found,) = csv.DictReader(io.StringIO(table))
    assert found == {
        "": "SSD",
        "LP %": "1.0",
        "LP % std": "0.5",
        "LP % paper": "2.0",
        "FT %": "3.0",
        "FT % paper": "4.0",
    }


@given(
    st.lists(st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"])), min_size=3, max_size=3)
)
def test_any_label_survives_the_csv(labels: list[str]) -> None:
    rows = [[label, "1.0", "2.0"] for label in labels]
    read = list(csv.reader(io.StringIO(csv_table(HEADER, rows), newline="")))
    assert [row[0] for row in read[1:]] == labels


@given(st.text(alphabet="ab&%$#_{}~^\\±−αμ²<>|", max_size=20))
def test_latex_has_no_bare_special_sign(text: str) -> None:
    line = latex_table([text, "x"], []).splitlines()[2].removesuffix(r" & x \\")
    for written in sorted(LATEX.values(), key=len, reverse=True):
        line = line.replace(written, "")
    assert re.fullmatch("[ab]*", line)


def test_the_files_stand_beside_each_other(tmp_path: Path) -> None:
    path = write_table(tmp_path / "table.md", HEADER, ROWS, "# table\n")
    assert path.read_text() == "# table\n"
    assert (tmp_path / "table.csv").read_text() == csv_table(HEADER, ROWS)
    assert (tmp_path / "table.tex").read_text().count(r" \\") == 3
