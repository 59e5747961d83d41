"""`atoll theory`: the record, resuming, the summary on known numbers, the picture."""

import json
from xml.etree import ElementTree

import pytest

from atoll.cli.main import main
from atoll.commands.theory import TheorySettings, run_theory, summarise
from atoll.core.errors import UserError


def row(d, seed, local, whole, supervised):
    return {
        "d": d,
        "seed": seed,
        "sources": 2,
        "local": [[1.0, 1 - local], [1 - local, 1.0]],
        "global": [1 - whole, 1.0],
        "supervised": [[1.0, supervised], [supervised, 1.0]],
        "supervised_noise": [0.01, 0.01],
    }


def test_the_constants_are_the_smallest_and_slopes_those_of_powers():
    rows = [row(d, s, 2 * d**-0.8, (3 + s) * d**-0.8, 0.5 * d**-0.3) for d in (100, 300) for s in range(2)]
    found = summarise(rows)
    assert found["c"] == pytest.approx(4)
    assert found["dims"]["100"]["c_local"] == pytest.approx(2)
    assert found["c_supervised"] == pytest.approx(0.5 * 100**-0.2)
    assert found["slopes"]["loss_local"] == pytest.approx(-0.8)
    assert found["slopes"]["cross_correlation"] == pytest.approx(-0.3)
    better, worse = row(1000, 0, 1e-9, 3.9 * 1000**-0.8, 0.01), row(3000, 0, 1e-9, 4.1 * 3000**-0.8, 0.9)
    found = summarise([*rows, better, worse])
    assert found["c"] == pytest.approx(4)  # from d up to 300 only
    assert [found["dims"][d]["holds"] for d in ("300", "1000", "3000")] == [True, True, False]
    assert [found["dims"][d]["holds_supervised"] for d in ("1000", "3000")] == [True, False]


def test_a_run_is_written_resumed_and_drawn(tmp_path, capsys):
    lines = []
    first = run_theory([30], 1, tmp_path, TheorySettings(), lines.append)
    again = run_theory([40, 30], 2, tmp_path, TheorySettings(), lines.append)
    assert lines == ["d = 30, seed 0", "d = 30, seed 1", "d = 40, seed 0", "d = 40, seed 1"]
    assert again["measurements"][0] == first["measurements"][0]
    assert json.loads((tmp_path / "theory.json").read_text()) == again
    for one in again["measurements"]:
        assert (one["sources"], one["rows"], one["frequent"], one["rare"]) == (3, 6, one["d"], 1)
        for k in range(3):
            assert one["local"][k][(k + 1) % 3] > 0.7 > 0.3 > one["supervised"][k][(k + 1) % 3]
    picture = (tmp_path / "theory.svg").read_text()
    ElementTree.fromstring(picture)
    assert "mean of 2 seeds" in picture
    assert picture.count("source 3") == 2
    assert main(["theory", "--dims", "30", "--seeds", "2", "--out", str(tmp_path)]) == 0
    assert "the smallest for d up to 30" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"other settings \(samples = 1\.0, width = 2\); choose these"):
        run_theory([30], 1, tmp_path, TheorySettings(samples=2), lines.append)


def test_the_picture_of_one_dimension_tells_its_two_means_apart_and_draws_the_bound(tmp_path):
    run_theory([30], 1, tmp_path, TheorySettings(), print)
    picture = ElementTree.fromstring((tmp_path / "theory.svg").read_text())
    tags = [(one.tag.rpartition("}")[2], one.attrib) for one in picture.iter()]
    local, of_all = [attributes["fill"] for tag, attributes in tags if tag == "circle"][:2]
    assert local != of_all
    bounds = [
        one["points"] for tag, one in tags if tag == "polyline" and one.get("stroke-dasharray") == "5 4"
    ]
    assert [len(points.split()) for points in bounds] == [2, 2]
    assert "mean of 1 seed" in {one.text.rpartition(", ")[2] for one in picture.iter() if one.text}


def test_mistakes_are_named(tmp_path):
    with pytest.raises(UserError, match="dimensions of at least 20"):
        run_theory([3], 1, tmp_path, TheorySettings(), print)
    (tmp_path / "theory.json").write_text("{")
    with pytest.raises(UserError, match="is damaged"):
        run_theory([30], 1, tmp_path, TheorySettings(), print)


@pytest.mark.slow
def test_the_constants_of_the_page_hold_at_1000(tmp_path):
    found = run_theory([100, 300, 1000], 3, tmp_path, TheorySettings(), print)["summary"]
    assert found["c"] <= 1.86
    assert found["c_supervised"] <= 0.237
    for one in found["dims"].values():
        assert max(one["c_local"], one["c_global"]) <= 1.86
        assert one["c_supervised"] <= 0.237
    assert found["slopes"]["loss_local"] == pytest.approx(-0.8, abs=0.1)
    assert found["slopes"]["cross_correlation"] < -0.1
