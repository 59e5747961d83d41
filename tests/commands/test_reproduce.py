"""A researcher's own small table on digits, run from end to end; and what the command says of mistakes."""

from __future__ import annotations

import copy
import json
import shutil
import statistics
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import tomli_w

from atoll.cli.main import main
from atoll.cli.tables import listing, plan_table
from atoll.commands.data import load_partition
from atoll.commands.evaluate import evaluate_run, measure_run
from atoll.commands.reproduce import dry_run, reproduce
from atoll.core.config import over, read_settings
from atoll.core.errors import UserError
from atoll.core.run_folder import Run
from atoll.papers.reproduction import find_table, images_of
from atoll.report.reproduction import cells, markdown, remarks, shown
from tests.harness import TINY, printed

TABLE = """
title = "Mine [1]"
recipe = "tiny.toml"
columns = ["kNN %", "LP acc %", "time s"]
rows = [[["plain", "ssd"]], [["plain"], ["untrained"]], [["plain"], ["elsewhere"]]]

[published]
paper = "SSD"
table = "3"

[notes]
all = "A note for everyone."
ssd = "A note for SSD."

[measures]
"kNN %" = { of = "knn/accuracy", times = 100, published = { metric = "LP acc %" } }
"LP acc %" = { of = "probe/accuracy", times = 100 }
"time s" = { missing = "clocks differ", published = { metric = "FT 1% acc %" } }

[choices.plain]
title = "FedAlignUniform"
published.method = "FedAlignUniform"
changes.method.name = "fed_align_uniform"

[choices.ssd]
title = "SSD"
published.method = "SSD (DSR+PD)"
changes.method.name = "ssd"
changes.options.dsr.scale = 5.0

[choices.untrained]
title = "untrained"
changes.train.rounds = 0

[choices.elsewhere]
title = "on other digits"
measured_on = { source = "digits", limit = 80 }
"""


def tiny_recipe() -> str:
    """The harness's recipe as a file."""
    settings = (*TINY, "options.dsr.basis=random", "evaluation.probe_epochs=2")
    return tomli_w.dumps(over({"base": "digits-ssd"}, read_settings(settings)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    (folder / "tiny.toml").write_text(tiny_recipe())
    (folder / "mine.toml").write_text(TABLE)
    return folder


@pytest.fixture(scope="module")
def done(folder: Path) -> dict:
    return reproduce(find_table(str(folder / "mine.toml"), seeds=2, out=folder / "out"))


def results(folder: Path, run: str, name: str = "evaluation.json") -> dict:
    return json.loads((folder / "out" / run / name).read_text())


def test_every_cell_is_its_runs_evaluation_beside_the_published_value(folder: Path, done: dict) -> None:
    assert done == json.loads((folder / "out/table.json").read_text())
    by_name = {row["name"]: row for row in done["rows"]}
    assert list(by_name) == ["plain", "ssd", "plain-untrained", "plain-elsewhere"]
    for name, published in (("plain", "80.84"), ("ssd", "81.32")):
        row = by_name[name]
        assert row["runs"] == [f"{name}-seed0", f"{name}-seed1"]
        knn, probe = (
            [100 * results(folder, run)[f"{key}/accuracy"] for run in row["runs"]] for key in ("knn", "probe")
        )
        assert row["values"]["kNN %"]["ours"] == knn
        assert row["values"]["LP acc %"] == {
            "published": published,
            "ours": probe,
            "measure": "probe/accuracy",
        }
    assert by_name["ssd"]["values"]["time s"]["ours"] == []
    assert by_name["ssd"]["values"]["time s"]["published"] == "70.74"


def test_a_cell_of_fewer_seeds_says_so(done: dict) -> None:
    record = copy.deepcopy(done)
    first, _ = record["rows"][0]["values"]["kNN %"]["ours"]
    record["rows"][0]["values"]["kNN %"]["ours"] = [first]
    (header, shown), (_, before) = cells(record), cells(done)
    column = header.index("kNN %")
    assert shown[0][column] == f"{first:.2f} (1 of 2 seeds)"
    assert shown[1:] == before[1:]
    assert "seeds)" not in str(before)


def test_a_run_that_was_also_evaluated_by_itself_is_measured_again(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "table"
    reproduce(find_table(str(folder / "mine.toml"), ["plain"], out=out))
    evaluate_run(Run(out / "plain-seed0"), "probe-easyfl")
    wider = TABLE.replace('"kNN %", ', '"kNN %", "easy", ').replace(
        "[measures]",
        '[measures]\neasy = { of = "probe-easyfl/accuracy", published = { metric = "FT 1% acc %" } }',
    )
    (folder / "wider.toml").write_text(wider)
    record = reproduce(find_table(str(folder / "wider.toml"), ["plain"], out=out))
    (row,) = record["rows"]
    assert len(row["values"]["easy"]["ours"]) == 1


def test_another_tables_run_that_cannot_be_read_is_passed_over(folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "ssd-1" / "bad-seed0"
    broken.mkdir(parents=True)
    (broken / "recipe.toml").write_text("[train]\nold_option = 1\n")
    (broken / "evaluation.json").write_text("{}")
    (row, *_) = (job := find_table(str(folder / "mine.toml"), out=tmp_path / "mine")).rows
    assert job.folders(row) == [tmp_path / "mine" / "plain-seed0"]


def test_a_table_without_rows_is_a_mistake(folder: Path) -> None:
    rows = next(line for line in TABLE.splitlines() if line.startswith("rows"))
    (folder / "empty.toml").write_text(TABLE.replace(rows, "rows = []"))
    with pytest.raises(UserError, match="rows is empty; give at least one row"):
        find_table(str(folder / "empty.toml"))


def test_no_rounds_leave_the_untrained_encoder(folder: Path, done: dict) -> None:
    first = Run(folder / "out/plain-seed0").metrics[0]["evaluation"]
    untrained = next(row for row in done["rows"] if row["name"] == "plain-untrained")
    assert untrained["values"]["kNN %"]["ours"][0] == 100 * first["knn/accuracy"]


def test_an_encoder_is_measured_on_other_images(folder: Path, done: dict) -> None:
    row = next(row for row in done["rows"] if row["name"] == "plain-elsewhere")
    assert row["runs"] == ["plain-seed0", "plain-seed1"]  # trained once
    there = results(folder, "plain-seed0", "evaluation-table-on-digits.json")
    assert there["results"]["probe/train_images"] == 80
    assert results(folder, "plain-seed0")["knn/train_images"] == 160
    assert row["values"]["LP acc %"]["ours"][0] == 100 * there["results"]["probe/accuracy"]


def test_a_row_alone_is_trained_in_the_folder_that_it_shares(folder: Path, done: dict) -> None:
    out = shutil.copytree(folder / "out", folder / "alone")
    job = find_table(str(folder / "mine.toml"), ["plain-elsewhere"], seeds=2, out=out)
    assert [one.name for one in job.trainings()] == ["plain"]
    before = (out / "plain-seed0/encoder.safetensors").stat().st_mtime_ns
    assert reproduce(job)["rows"] == [row for row in done["rows"] if row["name"] == "plain-elsewhere"]
    assert (out / "plain-seed0/encoder.safetensors").stat().st_mtime_ns == before


BESIDE = """
base = "mine.toml"
columns = ["geometry"]
rows = [[["plain"]]]
measures.geometry.of = "geometry/effective_rank"
measures.geometry.published.metric = "LP acc %"
"""


@pytest.fixture
def beside(folder: Path, done: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Path]:
    """A table, and a folder that holds the runs of another."""
    monkeypatch.setattr("atoll.papers.reproduction.table_names", lambda: ["out"])
    (folder / "beside.toml").write_text(BESIDE)
    shutil.copytree(folder / "out", tmp_path / "out")
    return str(folder / "beside.toml"), tmp_path


def test_a_table_measures_what_a_table_beside_it_has_trained(beside: tuple[str, Path]) -> None:
    table, root = beside
    before = (root / "out/plain-seed0/encoder.safetensors").stat().st_mtime_ns
    record = reproduce(find_table(table, seeds=2, out=root / "beside"))
    (row,) = record["rows"]
    assert row["runs"] == ["out/plain-seed0", "out/plain-seed1"]
    assert [path.name for path in (root / "beside").iterdir() if path.is_dir()] == []
    assert (root / "out/plain-seed0/encoder.safetensors").stat().st_mtime_ns == before
    expected = [measure_run(Run(root / "out" / f"plain-seed{seed}"), ["geometry"]) for seed in (0, 1)]
    assert row["values"]["geometry"]["ours"] == [one["geometry/effective_rank"] for one in expected]
    other = find_table(table, settings=["train.lr=0.01"], out=root / "beside")
    assert [one.name for one in other.trainings()] == ["plain"]  # another training


def test_a_run_serves_a_table_beside_it_whatever_the_engine(beside: tuple[str, Path]) -> None:
    table, root = beside
    # A run's recipe holds what "auto" stood for, as the papers' recipes leave it.
    for setting in ("engine.channels_last=auto", "engine.workers=2", "engine.device=cpu"):
        job = find_table(table, settings=[setting], seeds=2, out=root / "beside")
        assert job.trainings() == []


def test_the_table_in_words(folder: Path, done: dict) -> None:
    header, rows = cells(done)
    assert header == ["row", "kNN %", "paper", "LP acc %", "paper", "time s", "paper"]
    ours = done["rows"][1]["values"]["LP acc %"]["ours"]
    mean, std = statistics.mean(ours), statistics.stdev(ours)
    assert rows[1][0] == "SSD"
    assert rows[1][3:] == [f"{mean:.2f} ± {std:.2f}", "81.32", "–", "70.74"]
    assert remarks(done) == ["A note for everyone.", "A note for SSD.", "time s: –, because clocks differ."]
    page = (folder / "out/table.md").read_text()
    assert page == markdown(done)
    assert f"| {' | '.join(rows[1])} |" in page
    assert (folder / "out/report.html").is_file()


def test_what_is_finished_is_not_run_or_measured_again(folder: Path, done: dict) -> None:
    def stamps() -> list[int]:
        kept = [*(folder / "out").glob("*/*.safetensors"), *(folder / "out").glob("*/evaluation*.json")]
        return [path.stat().st_mtime_ns for path in sorted(kept)]

    before = stamps()
    assert len(before) == 3 * 2 * 2 + 2  # three trainings of four rows, and one row measured elsewhere
    again = reproduce(find_table(str(folder / "mine.toml"), seeds=2, out=folder / "out"))
    assert (again, stamps()) == (done, before)


def test_a_changed_setting_is_said_and_an_engines_is_not(folder: Path) -> None:
    mine = str(folder / "mine.toml")
    settings = ["train.lr=0.01", "engine.workers=2", "evaluation.knn_k=5", "train.keep_optimizer=true"]
    job = find_table(mine, ["plain*"], settings)
    assert [row.name for row in job.rows] == ["plain", "plain-untrained", "plain-elsewhere"]
    assert job.changed() == {
        "evaluation.knn_k": "5; in the paper's setting 20",
        "train.keep_optimizer": "true; in the paper's setting false",
        "train.lr": "0.01; in the paper's setting 0.05",
    }
    rounds = find_table(mine, settings=["train.rounds=1"])
    assert rounds.changed() == {"train.rounds": "1; in the paper's setting 2 or 0"}
    assert len(find_table(mine, ["ssd"], ["options.dsr.scale=3"]).rows) == 1  # the others have no such option
    shown = printed(plan_table(rounds, dry_run(rounds)))
    assert "NOT the paper's setting" in shown
    assert "train.rounds = 1; in the paper's setting 2 or 0" in shown
    plain = find_table(mine)
    assert "NOT" not in printed(plan_table(plain, dry_run(plain)))


def test_what_is_not_the_papers_setting_says_so_in_the_table_and_on_the_page(folder: Path) -> None:
    job = find_table(str(folder / "mine.toml"), ["plain"], out=folder / "scaled", scale="test")
    record = reproduce(job)
    assert record["scale"] == "test"
    page = (folder / "scaled/report.html").read_text()
    for where in (page.replace("&#x27;", "'"), (folder / "scaled/table.md").read_text()):
        assert "Mine [1], at scale 'test'" in where
        assert "NOT the paper's setting (scale test: seconds a run" in where
        assert "model.width = 4" in where or "evaluation.max_epochs = 2" in where
        assert "80.84" in where  # the paper's number
    assert page.count("it shows that the run works") == 1
    assert "<h1>Mine [1], at scale" in page


def test_a_row_whose_run_stopped_early_says_so(folder: Path) -> None:
    settings = ["train.rounds=5", "train.lr=1e-12", "evaluation.every=1", "evaluation.patience=1"]
    settings.append("evaluation.during=['knn']")
    record = reproduce(find_table(str(folder / "mine.toml"), ["plain"], settings, out=folder / "early"))
    lines = (folder / "early/plain-seed0/metrics.jsonl").read_text().splitlines()
    last = max(json.loads(line)["round"] for line in lines)
    assert last < 5
    note = f"stopped early: FedAlignUniform, seed 0, after round {last} of 5"
    assert note in remarks(record)
    assert f"- {note}" in (folder / "early/table.md").read_text().splitlines()


def test_a_row_whose_run_fails_stays_empty_and_says_why(folder: Path) -> None:
    job = find_table(str(folder / "mine.toml"), ["plain"], ["train.first_norm=1e-9"], out=folder / "failing")
    record = reproduce(job)
    assert cells(record)[1][0][1] == "–"
    assert record["failures"]["plain-seed0"].startswith("FedAlignUniform: round 1 failed: ")
    assert "Failed: FedAlignUniform: round 1 failed: " in printed(shown(record))


def test_a_plan_shows_the_runs_and_runs_none(
    folder: Path, done: dict, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reproduce", str(folder / "mine.toml"), "--dry-run", "--out", str(folder / "none")]) == 0
    said = capsys.readouterr().out
    assert "Mine [1]" in said
    assert "plain-elsewhere" in said
    assert "0/1" in said
    assert not (folder / "none").exists()
    finished = find_table(str(folder / "mine.toml"), seeds=2, out=folder / "out")
    assert "2/2" in printed(plan_table(finished, dry_run(finished)))


def test_a_plan_says_once_what_all_rows_share(folder: Path) -> None:
    job = find_table(str(folder / "mine.toml"))
    table, _, below = printed(plan_table(job, dry_run(job))).partition("all rows: ")
    shared = below.splitlines()[0]
    assert "encoder" in shared
    assert "encoder" not in table
    assert "rounds" in table


PARTITIONS = """
title = "Small clients"
recipe = "tiny.toml"
columns = ["kNN %"]
rows = [[["sit_out", "refused", "elsewhere"]]]
measures."kNN %".of = "knn/accuracy"
changes.partition = { kind = "dirichlet", clients = 12, alpha = 0.05, variant = "l-dawa", min_size = 1 }

[choices.sit_out]
title = "small clients sit out"
changes.partition.sit_out_below = 2

[choices.refused]
title = "small clients are refused"

[choices.elsewhere]
title = "images that are not here"
changes.data = { source = "parquet", path = "not-here" }
"""


@pytest.fixture
def partitions(folder: Path) -> str:
    (folder / "partitions.toml").write_text(PARTITIONS)
    return str(folder / "partitions.toml")


def test_a_dry_run_builds_every_row_whose_images_are_here(
    partitions: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sit_out, refused, elsewhere = dry_run(find_table(partitions))
    sizes = load_partition(replace(sit_out.row.recipe, partition=replace(refused.row.recipe.partition)))[
        1
    ].sizes
    small = sum(size < 2 for size in sizes)
    assert small > 0
    assert (
        sit_out.clients == f"{12 - small}: {min(s for s in sizes if s > 1)} – {max(sizes)}, {small} sit out"
    )
    assert "partition.sit_out_below = 2" in refused.fault
    assert "not-here" in elsewhere.missing
    assert (elsewhere.clients, elsewhere.fault) == ("", "")
    command = ["reproduce", partitions, "--dry-run", "--rows"]
    assert main([*command, "sit_out", "elsewhere"]) == 0
    assert "not on this machine: not-here (parquet)" in capsys.readouterr().out
    assert main([*command, "sit_out", "refused"]) == 2
    assert (
        "1 of 2 rows cannot run, such as refused: 1 client is too small to train: 10 (1 image)"
        in capsys.readouterr().err
    )


def test_runs_with_other_settings_fail_the_dry_run_too_and_start_again_on_demand(
    folder: Path, done: dict, capsys: pytest.CaptureFixture[str]
) -> None:
    out = shutil.copytree(folder / "out", folder / "changed")
    command = ["reproduce", str(folder / "mine.toml"), "--rows", "ssd", "plain", "--out", str(out)]
    other = [*command, "--set", "options.dsr.scale=3"]
    for words in (other, [*other, "--dry-run"]):
        assert main([*words, "--rows", "ssd"]) == 2
        said = capsys.readouterr().err
        assert "was started with options.dsr.scale = 5.0" in said
        assert "--restart" in said
    assert main([*command, "--dry-run"]) == 0
    changed = [*command, "--set", "train.lr=0.01", "--restart"]
    capsys.readouterr()
    assert main([*changed, "--dry-run"]) == 0
    assert "0.01" not in (out / "ssd-seed0/recipe.toml").read_text()
    assert main([*changed, "--rows", "ssd"]) == 0
    assert "lr = 0.01" in (out / "ssd-seed0/recipe.toml").read_text()
    assert "lr = 0.05" in (out / "ssd-seed1/recipe.toml").read_text()  # no run of this command


def test_the_others_train_when_small_clients_sit_out(folder: Path, partitions: str) -> None:
    with pytest.warns(UserWarning, match="too small to train and sit"):
        record = reproduce(find_table(partitions, ["sit_out"], out=folder / "small"))
    assert record["failures"] == {}
    sit_out = json.loads((folder / "small/sit_out-seed0/partition.json").read_text())["sit_out"]
    assert all(
        f"{name} ({size} image)" in (folder / "small/report.html").read_text()
        for name, size in sit_out.items()
    )
    assert sit_out


def test_all_tables_and_figures_are_listed_with_their_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATOLL_DATA", raising=False)
    shown = " ".join(printed(listing()).split())
    assert "ssd-1" in shown
    assert "cifar10 (parquet), CIFAR100 (torchvision)" in shown
    assert "dec-ssl-1-right" in shown
    assert "a drawing: it measures nothing" in shown


def test_the_images_of_a_row_are_those_of_its_prerequisites_too() -> None:
    needed = images_of(find_table("fedca-1", ["cifar10-cnn-iid-fedca"]).rows)
    assert [data.path for data in needed] == ["cifar10", "STL10"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["ssd-11"], "did you mean 'ssd-1'?"),
        (["dec-ssl-3"], "is not covered"),
        (["ssd-3", "--rows", "sds"], "has no row 'sds'; did you mean 'ssd'?"),
        (["ssd-3"], "4 of 4 rows of ssd-3 (such as fed_align_uniform) need the images cifar10 (parquet)"),
        (["ssd-3", "--set", "train.ronds=1"], "did you mean 'train.rounds'"),
        (["ssd-3", "--seeds", "0"], "--seeds is 0; it must be at least 1"),
        (["ssd-3", "--seeds", "0", "--dry-run"], "--seeds is 0; it must be at least 1"),
        (["--set", "train.rounds=1", "ssd-3"], "needs a TABLE, before --set and --rows"),
        (["mine.toml"], "there is no table mine.toml"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_2(
    arguments: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ATOLL_DATA", raising=False)
    assert main(["reproduce", *arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("atoll: ")
    assert sentence in said
    assert said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_missing_images_name_what_to_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ATOLL_DATA", raising=False)
    with pytest.raises(UserError, match=r"data\.path.*ATOLL_DATA.*or choose other rows with --rows"):
        reproduce(find_table("ssd-3", out=tmp_path / "out"))


def test_a_missing_library_of_detection_is_found_before_the_first_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pycocotools.cocoeval", None)  # as if it were not installed
    (folder / "objects.toml").write_text(TABLE + f'\n[detection]\ndata = "{tmp_path}"\n')
    job = find_table(str(folder / "objects.toml"), ["ssd"], out=tmp_path / "out")
    with pytest.raises(UserError, match="needs pycocotools; install Atoll's extra 'detect'"):
        reproduce(job)
    assert not (tmp_path / "out").exists()
    (check,) = dry_run(job)
    assert "needs pycocotools" in check.fault


def test_a_dry_run_of_a_figure_needs_what_draws_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not installed
    said = []
    for more in ["--dry-run"], []:
        assert main(["reproduce", "ssd-fig-4", *more]) == 2
        said.append(capsys.readouterr())
    assert said[0] == said[1]
    assert "needs matplotlib; install Atoll's extra 'figures'" in said[0].err
    assert list(tmp_path.iterdir()) == []


OWN = """
title = "Does the rate matter?"
recipe = "tiny.toml"
columns = ["kNN %"]
rows = [[["slow"]]]

[measures."kNN %"]
of = "knn/accuracy"
times = 100

[choices.slow]
title = "slow"
changes.train.lr = 0.01
"""


def test_a_table_without_published_values_is_no_papers(folder: Path) -> None:
    (folder / "own.toml").write_text(OWN)
    job = find_table(str(folder / "own.toml"), settings=["train.epochs=2"], out=folder / "own")
    assert job.changed() == {"train.epochs": "2; in the table's setting 1"}
    record = reproduce(job)
    assert cells(record)[0] == ["row", "kNN %"]
    assert [len(row) for row in cells(record)[1]] == [2]
    assert remarks(record)[0] == "NOT the table's setting:"
    assert "paper" not in printed(plan_table(job, dry_run(job))) + markdown(record)


def test_a_row_that_cannot_be_evaluated_costs_no_other_row(folder: Path, tmp_path: Path) -> None:
    unlabelled = TABLE.replace("limit = 80 }", "labels = false }")
    assert unlabelled != TABLE
    (tmp_path / "mine.toml").write_text(unlabelled)
    (tmp_path / "tiny.toml").write_text(tiny_recipe())
    record = reproduce(
        find_table(str(tmp_path / "mine.toml"), ["plain", "plain-elsewhere"], out=tmp_path / "out")
    )
    assert [line[1] == "–" for line in cells(record)[1]] == [False, True]
    (why,) = record["failures"].values()
    assert "labels" in why
    assert (tmp_path / "out" / "table.md").is_file()
