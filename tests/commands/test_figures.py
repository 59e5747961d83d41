"""A figure with every kind of panel on digits, from end to end."""

import json
import math
from itertools import accumulate

import pytest

from atoll.commands.figures import Results, figure_data
from atoll.commands.reproduce import reproduce
from atoll.core.run_folder import Run
from atoll.papers.figures import Figure, Panel
from atoll.papers.reproduction import find_table
from atoll.report.reproduction import figure_remarks
from tests.commands.test_reproduce import tiny_recipe

FIGURE = """
title = "Mine"
recipe = "tiny.toml"
columns = ["acc %", "rank"]
rows = [[["plain", "ssd"], ["few", "many"]], [["plain"], ["alone"]]]

[changes]
train = { keep_models_every = 1, keep_local_models = [-1] }
evaluation = { measures = ["angles", "layers", "norms"], every = 1, during = ["knn"] }

[measures]
"acc %" = { of = "knn/accuracy", times = 100 }
"rank" = { of = "geometry/effective_rank" }

[choices.plain]
title = "FedAlignUniform"
changes.method.name = "fed_align_uniform"

[choices.ssd]
title = "SSD"
changes.method.name = "ssd"

[choices.few]
title = "2 clients"
changes.partition.clients = 2

[choices.many]
title = "4 clients"

[choices.alone]
title = "3 clients"
changes.partition.clients = 3

[figure]
says = "More clients & fewer images <each> are worse."

[[figure.panels]]
kind = "points"
x = "clients"
y = "acc %"
places = { few = 2, many = 4 }

[[figure.panels]]
kind = "bars"
rows = ["*-few"]
y = "rank"

[[figure.panels]]
kind = "scatter"
x = "rank"
y = "acc %"
note = "acc %"

[[figure.panels]]
kind = "curves"
title = "traffic"
rows = ["plain-few"]
x = "MB"
y = "evaluation:knn/accuracy"
times = 100
targets = [0, 101]

[[figure.panels]]
kind = "curves"
rows = ["ssd-*"]
x = "round"
y = "losses:dsr"

[[figure.panels]]
kind = "boxes"
rows = ["plain-few"]

[[figure.panels]]
kind = "layers"
rows = ["plain-few"]

[[figure.panels]]
kind = "map"
rows = ["plain-many"]
models = ["global", "client-1"]
colour = "model"

[[figure.panels]]
kind = "landscape"
rows = ["plain-few"]
resolution = 3

[[figure.panels]]
kind = "classes"
rows = ["plain-many"]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("figure")
    (folder / "tiny.toml").write_text(tiny_recipe())
    (folder / "mine.toml").write_text(FIGURE)
    return folder


@pytest.fixture(scope="module")
def done(folder):
    return reproduce(find_table(str(folder / "mine.toml"), seeds=2, out=folder / "out"))


def runs(folder, row):
    return [Run(folder / "out" / f"{row}-seed{seed}") for seed in (0, 1)]


def final(folder, row, key):
    return [run.read_json("evaluation.json")[key] for run in runs(folder, row)]


def test_each_panel_shows_the_numbers_of_its_runs(folder, done):
    panels = json.loads((folder / "out/figure.json").read_text())["panels"]
    kinds = ["lines", "bars", "scatter", "lines", "lines", "boxes", "heat", "map", "landscape", "stacked"]
    assert [panel["kind"] for panel in panels] == kinds
    points, bars, scatter, traffic, dsr, boxes, heat, _, landscape, stacked = panels

    accuracy = {
        row: [100 * value for value in final(folder, row, "knn/accuracy")]
        for row in ("plain-few", "plain-many", "ssd-few", "ssd-many", "plain-alone")
    }
    for label, row in (("FedAlignUniform", "plain"), ("SSD", "ssd")):
        line = next(one for one in points["series"] if one["label"] == label)
        assert line["x"] == [2, 4]
        for k, place in enumerate(("few", "many")):
            a, b = accuracy[f"{row}-{place}"]
            assert line["y"][k] == pytest.approx((a + b) / 2)
            assert line["s"][k] == pytest.approx(abs(a - b) / math.sqrt(2))
    (level,) = points["levels"]
    assert level["y"] == [pytest.approx(sum(accuracy["plain-alone"]) / 2)]

    assert bars["groups"] == ["FedAlignUniform", "SSD"]
    assert bars["series"][0]["y"][1] == pytest.approx(
        sum(final(folder, "ssd-few", "geometry/effective_rank")) / 2
    )
    assert len(scatter["points"]) == 5
    assert scatter["points"][0]["label"].endswith(f"({scatter['points'][0]['y']:.1f})")

    (line,) = traffic["series"]
    metrics = runs(folder, "plain-few")[0].metrics
    megabytes = list(accumulate((m.get("bytes_up", 0) + m.get("bytes_down", 0)) / 1e6 for m in metrics))
    assert line["x"] == pytest.approx(megabytes)
    assert line["y"][-1] == pytest.approx(sum(accuracy["plain-few"]) / 2)
    assert traffic["remarks"] == [
        f"FedAlignUniform, 2 clients reaches {one}" for one in ("0: 0, 0 MB", "101: not reached")
    ]

    assert [one["label"] for one in dsr["series"]] == ["2 clients", "4 clients"]
    assert dsr["series"][0]["x"] == [1, 2]
    last = [run.metrics[-1]["losses"]["dsr"] for run in runs(folder, "ssd-few")]
    assert dsr["series"][0]["y"][-1] == pytest.approx(sum(last) / 2)

    measured = metrics[2]["measures"]
    assert boxes["at"] == [1, 2]
    assert boxes["boxes"][1] == [measured[f"angles/p{p}"] for p in (5, 25, 50, 75, 95)]
    assert [heat["values"][k][1] for k in range(len(heat["rows"]))] == list(metrics[2]["layers"].values())
    assert len(landscape["path"]) == 3
    partition = runs(folder, "plain-many")[0].read_json("partition.json")
    assert [sum(line) for line in stacked["values"]] == [client["size"] for client in partition["clients"]]


def test_the_page_and_the_table_have_the_figure_and_the_papers_statement(folder, done):
    svg = (folder / "out/figure.svg").read_text()
    page = (folder / "out/report.html").read_text()
    assert svg in page
    assert "More clients &amp; fewer images &lt;each&gt; are worse." in page
    text = (folder / "out/table.md").read_text()
    assert "The paper: More clients & fewer images <each> are worse." in text
    assert "![our figure](figure.svg)" in text


def test_finished_runs_are_not_run_again_and_the_figure_is_the_same(folder, done):
    before = {name: (folder / "out" / name).read_bytes() for name in ("figure.json", "figure.svg")}
    times = [(run.folder / "evaluation.json").stat().st_mtime_ns for run in runs(folder, "ssd-few")]
    reproduce(find_table(str(folder / "mine.toml"), seeds=2, out=folder / "out"))
    assert before == {name: (folder / "out" / name).read_bytes() for name in before}
    assert times == [(run.folder / "evaluation.json").stat().st_mtime_ns for run in runs(folder, "ssd-few")]


def test_partitions_alone_are_drawn_without_a_run(folder):
    text = FIGURE[: FIGURE.index("[[figure.panels]]")] + '[[figure.panels]]\nkind = "clients"\n'
    (folder / "partitions.toml").write_text(text.replace('"acc %", "rank"', "", 1))
    job = find_table(str(folder / "partitions.toml"), out=folder / "partitions")
    record = reproduce(job)
    assert sorted(path.name for path in (folder / "partitions").iterdir()) == [
        *("figure.json", "figure.svg", "table.csv", "table.json", "table.md", "table.tex")
    ]
    assert len(record["figure"]["panels"]) == 5


def test_a_run_that_measured_no_angles_has_no_boxes(folder, tmp_path):
    (tmp_path / "recipe.toml").write_text("")
    (tmp_path / "metrics.jsonl").write_text('{"round": 0}\n')
    job = find_table(str(folder / "mine.toml"), ["plain-few"])
    results = Results(job.table, job.rows, {"plain-few": [Run(tmp_path)]}, {})
    drawn = figure_data(Figure("", (Panel("boxes"),)), results)
    assert drawn["panels"] == []
    assert figure_remarks(drawn) == [
        "Panels that are not drawn, because the rows have no result for them: boxes."
    ]


def test_a_figure_without_a_panel_has_no_picture(folder, tmp_path):
    panel = '[[figure.panels]]\nkind = "curves"\nrows = ["ssd-few"]\nx = "round"\ny = "loss"\n'
    (folder / "one.toml").write_text(FIGURE[: FIGURE.index("[[figure.panels]]")] + panel)
    job = find_table(str(folder / "one.toml"), ["plain-few"], seeds=1, out=tmp_path)
    (tmp_path / "figure.svg").write_text("of an earlier command, with other rows")
    record = reproduce(job)
    assert record["figure"]["empty"] == ["loss"]
    assert not (tmp_path / "figure.svg").exists()
    text = (tmp_path / "table.md").read_text()
    assert "Panels that are not drawn, because the rows have no result for them: loss." in text
    assert "figure.svg" not in text


def test_much_traffic_is_said_without_an_exponent(folder, tmp_path):
    (tmp_path / "recipe.toml").write_text("")
    lines = [{"round": 1, "bytes_up": 9e9, "bytes_down": 3.3456e9, "evaluation": {"knn/accuracy": 0.5}}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    job = find_table(str(folder / "mine.toml"), ["plain-few"])
    panel = Panel("curves", x="MB", y="evaluation:knn/accuracy", targets=(0.5,))
    results = Results(job.table, job.rows, {"plain-few": [Run(tmp_path)]}, {})
    (drawn,) = figure_data(Figure("", (panel,)), results)["panels"]
    assert drawn["remarks"] == ["FedAlignUniform, 2 clients reaches 0.5: 12,350 MB"]


def test_curves_of_several_runs_are_means_by_round_whichever_rounds_a_run_has(folder, tmp_path):
    values = [{1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0}, {1: 3.0, 3: 5.0, 4: 6.0, 5: 7.0}]
    runs = []
    for number, by_round in enumerate(values):
        run = tmp_path / str(number)
        run.mkdir()
        (run / "recipe.toml").write_text("")
        lines = [
            {"round": round, "bytes_up": 1e6} | ({"loss": by_round[round]} if round in by_round else {})
            for round in range(1, max(by_round) + 1)
        ]
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        runs.append(Run(run))
    job = find_table(str(folder / "mine.toml"), ["plain-few"])
    results = Results(job.table, job.rows, {"plain-few": runs}, {})
    panels = (Panel("curves", x="round", y="loss"), Panel("curves", x="MB", y="loss"))
    rounds, megabytes = (panel["series"][0] for panel in figure_data(Figure("", panels), results)["panels"])
    assert rounds["x"] == [1, 2, 3, 4, 5]
    assert rounds["y"] == megabytes["y"] == [2.0, 2.0, 4.0, 5.0, 7.0]
    assert megabytes["x"] == [1.0, 2.0, 3.0, 4.0, 5.0]
