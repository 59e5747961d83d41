"""What a table's result says beside its numbers."""

from pathlib import Path

from atoll.papers.reproduction import find_table


def test_notes_on_missing_measures_stand_in_the_order_of_the_columns(tmp_path: Path) -> None:
    columns = [f"m{k}" for k in range(8)]
    measures = "".join(f"{name} = {{ missing = 'no {name}' }}\n" for name in columns)
    (tmp_path / "mine.toml").write_text(
        f"title = 'T'\nrecipe = 'digits-ssd'\ncolumns = {columns}\nrows = [[['x']]]\n"
        f"[measures]\n{measures}[choices.x]\ntitle = 'X'\n"
    )
    notes = find_table(str(tmp_path / "mine.toml")).notes()
    assert notes == [f"{name}: –, because no {name}." for name in columns]
