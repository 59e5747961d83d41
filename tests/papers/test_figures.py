"""The figures' files: each builds at each scale, and its panels name what the file has."""

from fnmatch import fnmatchcase

import pytest

from atoll.core.errors import UserError
from atoll.papers.figures import Panel, figure_of
from atoll.papers.reproduction import find_table
from atoll.papers.tables import PaperTable, figure_names, listed


@pytest.mark.parametrize("name", figure_names())
def test_a_figure_builds_at_every_scale_and_each_panel_shows_rows(name):
    for scale in ("paper", "cpu", "test"):
        job = find_table(name, scale=scale)
        figure = figure_of(job.table)
        assert figure.says.endswith(".")
        for panel in figure.panels:
            rows = panel.choose(job.rows)
            assert rows, panel.title
            # Two rows at one place of one line would be averaged without being repetitions.
            if panel.kind in ("points", "bars"):
                pooled = set(panel.pooled)
                at = [
                    (label, panel.place(row), [c for c in row.choices if c in pooled])
                    for label, row in zip(panel.series(rows, job.table), rows, strict=True)
                ]
                assert all(at.count(one) == 1 for one in at)
        if scale != "paper":
            assert any(key.startswith("train") or key.startswith("data") for key in job.changed())


def test_every_measured_figure_of_the_papers_has_a_file():
    measured = {name for name, about in listed().items() if "-fig-" in name and not about.get("why")}
    assert measured == set(figure_names())


# What the captions of Dec-SSL's panels say: clients, local epochs, and α, β or ρ where they are fixed.
CAPTIONS = {
    "2": {"*-features-*": {"K": 5, "E": 50}, "*-alpha-*": {"K": 5, "E": 50}},
    "4": {"*-commb-*": {"K": 5, "rho": 1, "beta": 0.1}, "*-partb-*": {"K": 20, "E": 5, "beta": 0.1}},
    "5": {"*-comm-*": {"K": 5, "rho": 1, "alpha": 0.02}, "*-alpha-*": {"K": 5, "E": 5, "rho": 1}},
    "6": {
        "*-alpha50-*": {"K": 5, "E": 50, "rho": 1},
        "*-beta-*": {"K": 5, "E": 5, "rho": 1},
        "*-comm-*": {"K": 5, "rho": 1, "alpha": 0.02},
        "*-part-*": {"K": 20, "E": 5, "alpha": 0.02},
    },
    "7": {"*-alpha-*": {"K": 5, "E": 5, "rho": 1}, "*-comm-*": {"K": 5, "rho": 1, "alpha": 0.02}},
    "8": {
        "*-comm-*": {"K": 5, "rho": 1, "alpha": 0.02},
        "*-lowpart-*": {"K": 20, "E": 50, "alpha": 0.02},
        "*-cifar100-*": {"K": 5, "rho": 1, "beta": 0.1},
        "*-tiny-*": {"K": 5, "rho": 1, "beta": 0.1},
        "*-alpha-*": {"K": 5, "E": 5, "rho": 1},
        "*-beta-*": {"K": 5, "E": 5, "rho": 1},
    },
    "9": {"*": {"K": 5, "E": 50, "alpha": 0.1}},
    "12": {
        "*-star-*": {"K": 10, "E": 50, "rho": 1},
        "*-cycle-*": {"K": 10, "E": 50, "rho": 1},
        "*-tree-*": {"K": 20, "E": 50, "rho": 1},
        "*-random-*": {"K": 20, "E": 50, "rho": 1},
    },
    "13": {"*-oneclass": {"K": 10, "E": 50, "rho": 1, "beta": 0}},
    "15": {"*-wide-*": {"K": 100, "E": 50, "beta": 0.1}, "*-widealpha-*": {"K": 100, "E": 50, "rho": 0.2}},
    "16": {"*": {"K": 5, "E": 50, "rho": 1}},
}


@pytest.mark.parametrize("number", CAPTIONS)
def test_rows_of_dec_ssl_have_the_settings_of_their_captions(number):
    rows = find_table(f"dec-ssl-fig-{number}").rows
    for pattern, said in CAPTIONS[number].items():
        chosen = [row for row in rows if fnmatchcase(row.name, pattern)]
        assert chosen
        for row in chosen:
            partition, train = row.recipe.partition, row.recipe.train
            found = {"K": partition.clients, "E": train.epochs, "rho": train.participation}
            found |= {"dirichlet": {"alpha": partition.alpha}, "skew": {"beta": partition.beta}}[
                partition.kind
            ]
            assert {key: found[key] for key in said} == said, row.name


def test_a_figure_of_partitions_has_no_note_of_training():
    assert find_table("dec-ssl-fig-17").notes() == []


def table(**figure):
    return PaperTable(
        title="t",
        recipe="digits",
        columns=("acc",),
        rows=((("a", "b"), ("x1", "x2")),),
        measures={"acc": {"of": "knn/accuracy"}},
        choices={name: type("Choice", (), {"title": name.upper()})() for name in ("a", "b", "x1", "x2")},
        figure={"says": "It shows.", "panels": [figure]},
    )


@pytest.mark.parametrize(
    ("panel", "sentence"),
    [
        ({"kind": "points", "y": "loss"}, "shows 'loss', which is none of the columns"),
        ({"kind": "scatter", "x": "acc", "y": "acc", "note": "n"}, "shows 'n', which is none"),
        ({"kind": "bars", "y": "acc", "places": {"c": 1}}, "names the choice 'c', which the file does not"),
        ({"kind": "pies", "y": "acc"}, "figure.panels"),
        (
            {"kind": "curves", "x": "rounds", "y": "loss"},
            "curves show 'loss' by 'rounds', and need x = 'round'",
        ),
        ({"kind": "curves", "x": "MB", "y": "measure:norms/h"}, "curves show 'measure:norms/h' by 'MB'"),
        ({"kind": "curves", "x": "round"}, "curves show '' by 'round'"),
        ({"kind": "points", "y": "acc", "places": {"a": 1, "b": "half"}}, "mix numbers and texts"),
        ({"kind": "points", "y": "acc", "places": {"a": 1, "b": 0}, "log": True}, "needs places above 0"),
    ],
)
def test_a_panel_that_does_not_fit_is_a_sentence(panel, sentence):
    with pytest.raises(UserError, match=sentence):
        figure_of(table(**panel))


def row(*choices):
    return type("Row", (), {"choices": choices, "name": "-".join(choices)})()


def test_a_line_has_the_choices_that_distinguish_it():
    panel = Panel("points", y="acc", places={"x1": 1.0, "x2": 2.0}, pooled=("b",))
    rows = [row("a", "x1"), row("a", "x2"), row("b", "x1")]
    assert [panel.place(one) for one in rows] == [1.0, 2.0, 1.0]
    assert Panel("points", places=panel.places).series(rows, table(kind="points", y="acc")) == ["A", "A", "B"]
    assert panel.series(rows, table(kind="points", y="acc")) == ["A", "A", ""]
    assert [one.name for one in Panel("points", rows=("a-*",)).choose(rows)] == ["a-x1", "a-x2"]
