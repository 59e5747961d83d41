"""Tables in a terminal: numbers are never broken, however narrow it is."""

from hypothesis import given
from hypothesis import strategies as st

from atoll.report.terminal import terminal_table
from tests.harness import printed


def shown(width, *table, **options):
    return printed(terminal_table(*table, **options), width=width).splitlines()


def cells(line):
    return [cell.strip() for cell in line.replace("┃", "│").split("│")]


@given(
    st.integers(24, 160), st.lists(st.sampled_from(["probe %", "effective rank", "−uniformity"]), max_size=20)
)
def test_a_wide_table_goes_on_below_itself_and_breaks_no_number(width, headings):
    numbers = [f"{10 + i}.25 ± 0.{i:02}" for i in range(len(headings))]
    lines = shown(width, ["method", *headings], [["SSD", *numbers], ["FedU", *numbers]], ["note"], "title")
    assert all(len(line) <= width for line in lines)
    for name in ("SSD", "FedU"):
        found = [cells(line)[1:] for line in lines if cells(line)[0] == name]
        assert [number for block in found for number in block] == numbers


def test_a_table_that_fits_is_one_table_with_whole_headings():
    lines = shown(60, ["method", "effective rank"], [["SSD", "1.0"]])
    assert [cells(line) for line in lines if "━" not in line] == [
        ["method", "effective rank"],
        ["SSD", "1.0"],
    ]


def test_a_long_name_is_broken_for_the_numbers():
    lines = shown(40, ["method", "kNN %"], [["A long name without an end" * 3, "61.25 ± 0.41"]])
    assert any("61.25 ± 0.41" in line for line in lines)
    assert max(map(len, lines)) <= 40
