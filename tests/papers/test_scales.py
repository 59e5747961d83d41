"""Scales: what they change, what they leave, and that no result of theirs can be taken for the paper's."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.core.errors import UserError
from atoll.papers.reproduction import find_table
from atoll.papers.scales import scale_names, shared_scales
from atoll.papers.tables import figure_names, load_table, table_names
from atoll.report.reproduction import remarks

NAMES = [*table_names(), *figure_names()]

TABLE = """
title = "Mine"
recipe = "digits-ssd"
columns = ["kNN %"]
rows = [[["ssd", "untrained", "plain"]]]
measures."kNN %".of = "knn/accuracy"

[scale.cpu]
changes = { train.lr = 0.5, options.dsr.scale = 3.0 }
at_most.train.rounds = 7

[scale.mine]
about = "for me"
at_most.data.limit = 50

[choices.ssd]
title = "SSD"

[choices.untrained]
title = "untrained"
changes.train.rounds = 0

[choices.plain]
title = "plain"
changes.method.name = "fed_align_uniform"
scale.cpu.at_most.train.epochs = 1
"""


@pytest.fixture
def mine(tmp_path: Path) -> str:
    (tmp_path / "mine.toml").write_text(TABLE)
    return str(tmp_path / "mine.toml")


def test_the_tables_scale_lies_over_the_shared_one_and_the_choices_over_both(mine: str) -> None:
    ssd, untrained, plain = (row.recipe for row in find_table(mine, scale="cpu").rows)
    paper = find_table(mine).rows[0].recipe
    shared = shared_scales()["cpu"]
    assert ssd.model.encoder == shared.changes["model"]["encoder"]
    assert (ssd.train.lr, ssd.train.rounds) == (0.5, 7)
    assert ssd.train.epochs == min(paper.train.epochs, shared.at_most["train"]["epochs"])
    assert plain.train.epochs == 1
    assert untrained.train.rounds == 0  # a maximum leaves smaller numbers
    assert ssd.data.limit == shared.at_most["data"]["limit"]  # and sets what was open
    assert ssd.options["dsr"]["scale"] == 3.0
    assert "dsr" not in plain.options


def test_settings_lie_over_a_scale(mine: str) -> None:
    assert find_table(mine, settings=["train.rounds=9"], scale="cpu").rows[0].recipe.train.rounds == 9


def test_a_scale_of_its_own_and_one_that_is_not_there(mine: str) -> None:
    assert scale_names(load_table(mine)[0]) == ["paper", "cpu", "test", "mine"]
    assert {row.recipe.data.limit for row in find_table(mine, scale="mine").rows} == {50}
    with pytest.raises(UserError, match="no scale 'tset'; did you mean 'test'"):
        find_table(mine, scale="tset")


@pytest.mark.parametrize("scale", ["cpu", "test"])
@pytest.mark.parametrize("name", NAMES)
def test_every_result_at_a_scale_says_that_it_is_not_the_papers(
    name: str, scale: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ATOLL_DATA", raising=False)  # a copy of the images would be a change too
    job, paper = find_table(name, scale=scale), find_table(name)
    record = {**job.header(), "failures": {}}
    assert remarks(record)[0].startswith("NOT the paper's setting (scale ")
    assert f"'{scale}'" in record["title"]
    assert job.out != paper.out
    assert paper.changed() == {}
    for row in job.rows:
        assert f"'{scale}'" in row.recipe.title
        assert row.paper == next(one.recipe for one in paper.rows if one.name == row.name)


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith(("l-dawa", "ssd"))])
def test_a_warm_up_ends_before_the_run_at_every_scale(name: str) -> None:
    for scale in scale_names(load_table(name)[0]):
        for row in find_table(name, scale=scale).rows:
            warm_up = getattr(row.recipe.composed.aggregation, "warmup_rounds", 0)
            assert ("dawa" in row.recipe.composed.aggregation.name) == (warm_up > 0), row.name
            assert warm_up < row.recipe.train.rounds, (row.name, scale)


@pytest.mark.parametrize("name", ["fedca-1", "fedca-fig-4", "fedca-fig-5"])
@pytest.mark.parametrize("scale", ["cpu", "test"])
def test_rows_of_a_scale_align_to_the_same_small_images(name: str, scale: str) -> None:
    options = [row.recipe.options.get("fedca_alignment") for row in find_table(name, scale=scale).rows]
    sources = {str(one["data"]["path"]) for one in options if one}
    assert sources == {"tiny-imagenet"}


@pytest.mark.parametrize("cap", ["model.encoder = 5", "train.keep_local_models = 5", "data.image_size = 'x'"])
def test_a_maximum_of_what_is_no_number_is_refused(tmp_path: Path, cap: str) -> None:
    (tmp_path / "mine.toml").write_text(f"{TABLE}scale.cpu.at_most.{cap}\n")
    with pytest.raises(UserError, match=r"at_most lowers numbers, and .* set it in changes"):
        find_table(str(tmp_path / "mine.toml"), scale="cpu")
