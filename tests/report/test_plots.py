"""Drawings of figures: valid SVG, the same each time, with all that a panel says."""

import importlib.util
from xml.etree import ElementTree

import pytest

from atoll.core.errors import UserError
from atoll.report.plots import DRAW, figure_svg, require_plots

FRAME = {"title": "a title", "x": "along", "y": "up", "log": False}
PANELS = {
    "lines": {
        "series": [{"label": "one", "x": [1, 10], "y": [0.5, None], "s": [0.1, None]}],
        "levels": [{"label": "level", "y": [0.4], "s": [None]}],
        "log": True,
    },
    "bars": {"groups": ["g1", "g2"], "series": [{"label": "bar", "y": [2.0, 1.5], "s": [None, 0.1]}]},
    "scatter": {"points": [{"label": "dot (81.3)", "x": 1.0, "y": 2.0}]},
    "boxes": {"at": [1, 2], "boxes": [[1, 2, 3, 4, 5], [2, 3, 4, 5, 6]]},
    "heat": {"rows": ["layer"], "columns": ["7", "8"], "values": [[0.1, 0.2]]},
    "stacked": {"rows": ["client 0", "client 1"], "columns": ["cat", "dog"], "values": [[1, 2], [3, 0]]},
    "map": {"points": [[0, 0], [1, 1], [2, 0]], "groups": [0, 1, 2], "names": ["cat", "dog", "other"]},
    "landscape": {
        "xs": [-1, 0, 1],
        "ys": [-1, 0, 1],
        "loss": [[3, 2, 3], [2, 1, 2], [3, 2, 3]],
        "path": [[1, 1], [0, 0]],
    },
}
SHOWN = {
    "lines": ["one", "level"],
    "bars": ["g1", "g2", "bar"],
    "scatter": ["dot (81.3)"],
    "heat": ["layer", "7", "8"],
    "stacked": ["client 0", "client 1", "cat", "dog"],
    "map": ["cat", "dog", "other"],
}


@pytest.mark.parametrize("kind", DRAW)
def test_a_panel_is_valid_svg_and_the_same_each_time(kind):
    panel = {**FRAME, "kind": kind, **PANELS[kind]}
    svg = figure_svg([panel], "above")
    assert svg.startswith("<svg")
    assert svg == figure_svg([panel], "above")
    root = ElementTree.fromstring(svg)
    texts = {"".join(element.itertext()).strip() for element in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"above", "a title", "along", "up", *SHOWN.get(kind, [])} <= texts


def texts_of(svg):
    """Each text of a drawing, a line with the next ones of one title."""
    root = ElementTree.fromstring(svg)
    return ["".join(element.itertext()).strip() for element in root.iter("{http://www.w3.org/2000/svg}text")]


def test_a_short_logarithmic_axis_has_its_own_places_as_ticks():
    series = [{"label": "", "x": [2, 5, 0.01, 50], "y": [1.0, 2.0, 3.0, 4.0], "s": [None] * 4}]
    panel = {**FRAME, "kind": "lines", "series": series, "levels": [], "log": True, "title": "", "x": ""}
    assert texts_of(figure_svg([panel]))[:5] == ["0.01", "2", "5", "50", "1.0"]


def test_long_titles_are_broken():
    words = " ".join(f"word{k}" for k in range(30))
    panel = {**FRAME, "kind": "bars", **PANELS["bars"], "title": words}
    texts = texts_of(figure_svg([panel], words))
    assert words not in texts
    assert sum("word0 " in text for text in texts) == 2
    assert max(map(len, texts)) < 80


def test_the_place_of_a_point_is_its_value():
    """The markers of a line lie at heights that are linear in its values."""
    lines = {
        **FRAME,
        "kind": "lines",
        "levels": [],
        "series": [{"label": "", "x": [0, 1, 2], "y": [0, 1, 3], "s": [None] * 3}],
    }
    root = ElementTree.fromstring(figure_svg([lines]))
    uses = [
        e
        for e in root.iter("{http://www.w3.org/2000/svg}use")
        if e.get("style", "").find("fill: #1f77b4") >= 0
    ]
    heights = [float(e.get("y")) for e in uses][-3:]
    assert (heights[0] - heights[2]) == pytest.approx(3 * (heights[0] - heights[1]), rel=1e-3)


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are drawn."""
    figures = []

    def save(figure, file, **_):
        figures.append(figure)
        file.write("<svg>")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", save)
    return figures


def test_a_label_has_one_colour_in_all_panels(drawn):
    names = [f"method {k}" for k in range(12)]
    panels = [
        FRAME
        | {"kind": "lines", "levels": []}
        | {"series": [{"label": one, "x": [1, 2], "y": [2, 3], "s": [0, 0]} for one in shown]}
        for shown in (names, names[3:5], [names[0], names[10]])
    ]
    figure_svg(panels)
    (figure,) = drawn
    colours = [
        {label: bars[0].get_color() for bars, label in zip(*axes.get_legend_handles_labels(), strict=True)}
        for axes in figure.axes
    ]
    assert len(set(colours[0].values())) == 12
    assert all(colours[0][name] == colour for panel in colours[1:] for name, colour in panel.items())
    assert [list(panel) for panel in colours] == [names, names[3:5], [names[0], names[10]]]


@pytest.mark.parametrize("kind", ["lines", "bars"])
def test_only_known_deviations_have_error_bars(drawn, kind):
    series = {"label": "", "x": [0, 1, 2], "y": [1.0, 2.0, 3.0], "s": [0.5, None, 0.0]}
    panel = {**FRAME, "kind": kind, "groups": ["a", "b", "c"], "series": [series], "levels": []}
    figure_svg([panel])
    (bars,) = drawn[0].axes[0].collections
    ends = [
        segment.tolist() for segment in bars.get_segments() if len(segment) and segment[0, 1] == segment[0, 1]
    ]
    assert ends == [[[0, 0.5], [0, 1.5]], [[2, 3.0], [2, 3.0]]]


def test_without_matplotlib_a_sentence_says_what_to_install(monkeypatch):
    require_plots()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install '\.\[figures\]'"):
        require_plots()
