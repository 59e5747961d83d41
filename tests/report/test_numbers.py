"""Numbers in tables: spreads over seeds, and which values of a column are marked as the highest."""

import statistics

import pytest

from atoll.report.numbers import Spread, best, mean_std, number, spread


def of(*values):
    return spread(values)


@pytest.mark.parametrize(
    ("column", "marks"),
    [
        ([of(0.5), of(0.7), of(0.6)], [False, True, False]),
        ([of(0.7), of(0.5), of(0.7)], [True, False, True]),  # a tie
        ([None, of(0.7), None, of(0.6)], [False, True, False, False]),
        ([None, of(0.7), None], [False, False, False]),  # the only value of its column
        ([None, None], [False, False]),
        ([], []),
        # 0.60 ± 0.0141 and 0.62 ± 0.0141 overlap; 0.59 ± 0.0141 differs from 0.62 by more than both deviations.
        ([of(0.59, 0.61), of(0.61, 0.63), of(0.58, 0.60)], [True, True, False]),
        ([of(0.62), of(0.61, 0.65), of(0.59)], [True, True, False]),  # a single seed has no deviation
        ([of(-1.5), of(-1.0), of(-2.0)], [False, True, False]),
        ([of(0.4, 0.4), of(0.4, 0.4), of(0.3, 0.3)], [True, True, False]),
    ],
)
def test_the_highest_values_and_those_within_the_deviations_are_marked(column, marks):
    assert best(column) == marks


def test_a_spread_is_of_the_values():
    values = [0.3, 0.9, 0.4]
    assert spread(values) == Spread(3, statistics.fmean(values), statistics.stdev(values), pytest.approx(0.6))
    assert spread([2.0]) == Spread(1, 2.0, None, 0.0)
    assert spread([]) is None
    assert [mean_std(one, 1) for one in ([], [2.0], [2.0, 2.0], [1.0, -2.0])] == [
        "–",
        "2.0",
        "2.0",
        "−0.5 ± 2.1",
    ]


def test_what_rounds_to_zero_has_no_sign():
    # -uniformity of a collapsed encoder is -0.0, or a rounding error below 0.
    assert [number(value, 3) for value in (-0.0, -4e-4, -6e-4)] == ["0.000", "0.000", "−0.001"]


def test_a_huge_number_is_written_with_a_power_of_ten():
    assert number(-1.5e299, 3) == "−1.500e+299"
    assert number(123456789.0, 1) == "123456789.0"
