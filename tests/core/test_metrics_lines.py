import contextlib

import pytest

from atoll.core.digests import DamagedError
from atoll.core.metrics_lines import Results, format_line, parse_lines

LINES = [{"round": 0, "evaluation": {}}, {"round": 1, "loss": 0.5}, {"round": 2, "loss": 0.25}]
DATA = b"".join(map(format_line, LINES))


def test_lines_survive():
    assert parse_lines(DATA) == LINES
    assert parse_lines(b"") == []


def test_lines_of_0_1_are_read():
    assert parse_lines(b'{"round": 0}\n{"round": 1, "loss": 0.5}\n') == [{"round": 0}, LINES[1]]


def test_a_line_that_a_kill_cut_does_not_count():
    for cut in range(1, len(format_line(LINES[2]))):
        assert parse_lines(DATA[:-cut]) in (LINES[:2], LINES)


def test_every_flipped_bit_is_found():
    """The last line may also look as if a kill had cut it; it is never read as another one."""
    for bit in range(8 * len(DATA)):
        flipped = bytearray(DATA)
        flipped[bit // 8] ^= 1 << bit % 8
        with contextlib.suppress(DamagedError):
            assert parse_lines(bytes(flipped)) == LINES[:2]


@pytest.mark.parametrize("line", [b"5", b"null", b'{"a": 1}', b'{"round": "1"}', b"", b"[" * 100_000])
def test_foreign_lines_are_named(line):
    with pytest.raises(DamagedError, match="line 2"):
        parse_lines(format_line(LINES[0]) + line + b"\n")


def test_reordered_and_lost_lines_are_named():
    zero, one, two = map(format_line, LINES)
    for data in (one + zero, zero + two, zero + zero):
        with pytest.raises(DamagedError, match=r"line 2: round . follows round ."):
            parse_lines(data)


def test_a_result_that_there_is_not_names_those_that_there_are():
    found = Results({"round": 2, "knn/accuracy": 0.5, "knn/k": 200, "probe/accuracy": 0.6})
    assert found["knn/accuracy"] == 0.5
    with pytest.raises(KeyError, match=r"no result 'knn'; the accuracies are: knn/accuracy, probe/accuracy"):
        found["knn"]
    assert found.get("knn") is None
    assert "knn" not in found
    with pytest.raises(KeyError, match=r"no result 'knn/accuracy'; .*none, until the run has finished"):
        Results()["knn/accuracy"]
    with pytest.raises(KeyError, match=r"the accuracies are: none\"$"):
        Results({"round": 2, "geometry/effective_rank": 3.0})["knn/accuracy"]
