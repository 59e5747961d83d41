"""Every row of every table against what the paper's own line says of its setting."""

from __future__ import annotations

import csv
import math
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest

import atoll
from atoll.aggregation.fedavg import Weighing
from atoll.components.base import Update
from atoll.core.errors import UserError
from atoll.engines.update_checks import WEIGHING, UpdateChecks
from atoll.papers.figures import figure_of
from atoll.papers.published import find_published
from atoll.papers.rows import Row, make_rows
from atoll.papers.tables import listed, load_table, table_names
from tests.folds import setting

PUBLISHED = Path(atoll.__file__).parent / "tables" / "published.csv"
ROMAN = {"I": "1", "II": "2", "III": "3", "IV": "4", "V": "5"}
ENCODERS = {
    "ResNet-18 (CIFAR stem)": "resnet18",
    "ResNet-18 (CIFAR stem) for FeatARC": "resnet18",
    "3-block CNN + FC128": "fedquad-cnn",
    "5-layer CNN": "fedca-cnn",
    "ResNet-50": "resnet50",
    "ResNet-18 FPN Mask R-CNN": "resnet18",
}
IMAGES = {
    "CIFAR-10": "cifar10",
    "CIFAR-100": "CIFAR100",
    "TinyImageNet": "tiny-imagenet",
    "TinyImageNet-200": "tiny-imagenet",
    "MiniImageNet": "mini-imagenet",
    "STL-10": "STL10",
    "ImageNet-100": "imagenet-100",
    "Amazon (package segmentation)": "amazon-packages",
}
LEFT_OUT = {  # published rows of covered tables that no run of ours stands for; the tables' notes say so
    "dec-ssl-2-top": {"FURL (=FedCA ResNet-50)", "FedEMA", "Per-SSFL", "FedU"},
}


def published() -> dict[str, list[dict[str, str]]]:
    """The papers' numbers by our tables' names."""
    found: dict[str, list[dict[str, str]]] = {}
    for row in csv.DictReader(PUBLISHED.read_text("utf-8").splitlines()):
        if "(extra)" not in row["table"]:
            name = f"{row['paper']}-{ROMAN.get(row['table'], row['table'])}".lower()
            found.setdefault(name, []).append(row)
    return found


NUMBERS = published()


@pytest.fixture(scope="module")
def rows() -> dict[str, list[Row]]:
    return {name: make_rows(load_table(name)[0]) for name in table_names()}


def test_every_table_of_the_papers_is_covered_or_named_as_not() -> None:
    assert sorted(NUMBERS) == sorted([*table_names(), *(name for name in NUMBERS if "why" in listed()[name])])


@pytest.mark.parametrize("name", table_names())
def test_each_published_number_of_a_column_stands_in_one_row(name: str, rows: dict[str, list[Row]]) -> None:
    table = load_table(name)[0]
    columns = table.columns
    metrics = {*columns, *(choice.published.get("metric", "") for choice in table.choices.values())}
    expected = [
        row
        for row in NUMBERS[name]
        if row["metric"] in metrics and row["method"] not in LEFT_OUT.get(name, set())
    ]
    shown = [row.published[column] for row in rows[name] for column in columns]
    distinct = {tuple(one.items()) for one in shown}
    assert distinct == {tuple(one.items()) for one in expected}
    assert len({row.name for row in rows[name]}) == len(rows[name])
    repeated = len(shown) - len(distinct)
    assert repeated == (6 if name == "l-dawa-1" else 0)  # one time an aggregation, three local epochs


@pytest.mark.parametrize("name", table_names())
def test_a_rows_recipe_is_the_setting_that_its_published_number_names(
    name: str, rows: dict[str, list[Row]]
) -> None:
    for row in rows[name]:
        recipe, line = row.recipe, next(iter(row.published.values()))
        said = dict(re.findall(r"\b(K|R|E|part|alpha|beta)=([\d.]+)", line["setting"]))
        partition, train = recipe.partition, recipe.train
        where = f"{name} {row.name}: {line['setting']}"
        assert partition.clients == int(said.get("K", partition.clients)), where
        assert train.participation == float(said.get("part", 1)), where
        if train.rounds and line["method"] != "Dec-SSL Non-IID Less Comm.":
            assert train.rounds == int(said.get("R", train.rounds)), where
            assert train.epochs == int(said.get("E", train.epochs)), where
        if "500 epochs total" in line["setting"] and train.rounds:
            assert train.rounds * train.epochs == 500, where
        central = line["method"].startswith("Central")
        if "alpha" in said and not central:
            assert (partition.kind, partition.alpha) == ("dirichlet", float(said["alpha"])), where
        if re.search(r"(?<!Non-)(?<!non-)\b(IID|i\.i\.d\.)", line["setting"]):
            assert partition.kind == "iid", where
        if "Non-IID" in line["setting"] or "one class per client" in line["setting"]:
            assert partition.kind in ("shards", "single-class", "skew"), where
        assert (partition.kind == "centralised") == ("centralised" in line["setting"] or central), where
        assert recipe.model.encoder == ENCODERS[line["encoder"]], where
        assert recipe.model.stem == ("standard" if row.detection else "cifar"), where
        trained, _, measured = line["dataset"].partition("->")
        assert recipe.data.path == IMAGES[trained], where
        assert (row.measured_on.path if row.measured_on else "") == IMAGES.get(measured, ""), where
        assert (row.detection is not None) == ("Mask R-CNN" in line["encoder"]), where
        assert recipe.data.limit is None, where
        if line["ssl"] in ("SimCLR", "SimCLR presumed", "Barlow Twins") and line["method"] != "no pretrain":
            wanted = "barlow_twins" if line["ssl"] == "Barlow Twins" else "simclr"
            supervised = "SLRep" in line["method"]
            assert recipe.composed.objective.name == ("cross_entropy" if supervised else wanted), where


@pytest.mark.parametrize("name", table_names())
def test_no_two_rows_are_the_same_run(name: str, rows: dict[str, list[Row]]) -> None:
    unnamed = [
        repr((replace(row.recipe, name="", title=""), row.measured_on, row.detection)) for row in rows[name]
    ]
    assert len(set(unnamed)) == len(unnamed)


@pytest.mark.parametrize("name", [name for name in table_names() if name.startswith("l-dawa")])
def test_a_row_that_weighs_by_losses_weighs_by_their_softmax_in_all_rounds(
    name: str, rows: dict[str, list[Row]]
) -> None:
    """Also while losses fall by tens from one round to the next, as Barlow Twins' do."""
    weighing = [row for row in rows[name] if "loss" in row.recipe.composed.aggregation.statistics]
    assert len(weighing) == sum(not {"loss", "l_dawa_loss"}.isdisjoint(row.choices) for row in rows[name])
    for row in weighing:
        guard = UpdateChecks(row.recipe.composed, setting(**asdict(row.recipe.train)), frozenset())
        guard.history.earlier[WEIGHING] = [49.4, 167.0]
        updates: list[Update] = [
            {"weights": {}, "losses": {}, "parts": {}, "loss": loss} for loss in (20.0, 21.0)
        ]
        weigh = Weighing("loss")
        weights = [weigh(guard.weighed(update))[0] for update in updates]
        assert weights == [1.0, pytest.approx(math.exp(-1.0))], row.name


def test_a_choice_of_another_method_leaves_no_option_of_the_first() -> None:
    ssd, plain = (
        next(row for row in make_rows(load_table("ssd-3")[0]) if row.name == name)
        for name in ("ssd", "fed_align_uniform")
    )
    assert set(ssd.recipe.options) == {"dsr", "fedavg"}
    assert set(plain.recipe.options) == {"fedavg"}


def test_settings_are_laid_over_every_row_and_the_papers_stays() -> None:
    for row in make_rows(load_table("ssd-5")[0], ["train.rounds=2", "data.limit=300"]):
        assert (row.recipe.train.rounds, row.recipe.data.limit) == (2, 300)
        assert (row.paper.train.rounds, row.paper.data.limit) == (100, None)
    assert all(row.measured_on.limit == 30 for row in make_rows(load_table("ssd-2")[0], ["data.limit=30"]))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("rows = [[['a', 'c']]]", "rows names the choice 'c'"),
        ("columns = ['kNN', 'LP']", "columns names the measure 'LP'"),
        ("colums = []", "'table.colums'; did you mean 'table.columns'"),
        ("measures.kNN.of = 'knnn/accuracy'", "no protocol 'knnn'.*did you mean 'knn'"),
        ("measures.kNN.missing = 'no time'", "set one of 'of' and 'missing'"),
        ("published.paper = 'SSD'", "no published values have metric = 'kNN', paper = 'SSD'"),
        ("choices.a.changes.train.rounds = -1", "row a of the table: train.rounds is -1"),
        ("measured_on.source = 'nowhere'", "row a of the table: data.source is 'nowhere'"),
        ("recipe = 'digit'", "no recipe 'digit'.*did you mean 'digits'"),
        ("base = 'ssd-11'", "no table 'ssd-11'.*did you mean 'ssd-1"),
        ("measures.kNN.of = 'classifier/accuracy'\nmeasured_on.source = 'digits'", "a classifier cannot"),
    ],
)
def test_a_mistake_in_a_table_is_one_sentence(text: str, sentence: str, tmp_path: Path) -> None:
    own = {
        "title": "title = 'mine'",
        "recipe": "recipe = 'digits'",
        "columns": "columns = ['kNN']",
        "rows": "rows = [[['a']]]",
        "measures": "measures.kNN.of = 'knn/accuracy'",
    }
    changed = [re.match(r"\w+", line)[0] for line in text.splitlines()]  # type: ignore[index]
    kept = [line for key, line in own.items() if key not in changed or ".missing" in text]
    (tmp_path / "own.toml").write_text("\n".join([*kept, "choices.a.title = 'A'", text]))
    with pytest.raises(UserError, match=sentence):
        make_rows(*_loaded(tmp_path / "own.toml"))


def _loaded(path: Path) -> tuple:  # type: ignore[type-arg]
    table, folder = load_table(str(path))
    return table, (), folder


def test_published_values_are_found_by_keys_that_fit_one() -> None:
    keys = {"paper": "SSD", "table": "5", "method": "SSD (KL)"}
    assert find_published(keys, "LP acc %")["value"] == "81.32"
    with pytest.raises(UserError, match="no published values"):
        find_published({**keys, "method": "SSD (KLL)"}, "LP acc %")
    with pytest.raises(UserError, match="3 published values"):
        find_published({"paper": "SSD", "table": "5"}, "LP acc %")


def test_the_table_on_the_page_is_one(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "reproduce.md").read_text()
    parts = re.findall(r"^```text\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    (tmp_path / "page.toml").write_text("".join(parts))
    table, *rest = _loaded(tmp_path / "page.toml")
    rows = make_rows(table, *rest)
    assert [row.name for row in rows] == ["iid-scale5", "iid-scale10", "skewed-scale5", "skewed-scale10"]
    assert [row.recipe.composed.terms[0].scale for row in rows[:2]] == [5.0, 10.0]
    figure = figure_of(table)
    assert figure is not None
    (panel,) = figure.panels
    assert [row.name for row in panel.choose(rows)] == ["skewed-scale5", "skewed-scale10"]
