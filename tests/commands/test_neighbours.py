"""The neighbours of a run's images: in its folder, in the terminal, on the page."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import torch
from PIL import Image

from atoll.cli.main import main
from atoll.commands.check import check_run
from atoll.commands.neighbours import find_neighbours
from atoll.core import tree
from atoll.core.errors import UserError
from atoll.core.run_folder import NEIGHBOURS, Run
from atoll.data.sources import load_data
from atoll.recipe.recipe import recipe_of
from atoll.report.neighbours import neighbours_table
from tests.harness import run_tiny
from tests.trees import same


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_tiny(tmp_path_factory.mktemp("neighbours") / "run", "method.name=ssd")


def test_the_neighbours_are_images_with_their_clients(run: Run) -> None:
    record = find_neighbours(run, queries=3, k=4)
    assert [len(names) for names in record["names"]] == [4, 4, 4]
    train = load_data(recipe_of(run).data, 0).train
    for query, names, pictures in zip(record["queries"], record["names"], record["pictures"], strict=True):
        assert query not in names
        rows = torch.tensor([int(name[1:]) for name in names])
        assert torch.equal(pictures, train.images.gather(rows))
    partition = run.read_json("partition.json")
    held = {f"#{i}": client["name"] for client in partition["clients"] for i in client["indices"]}
    assert record["clients"] == [[held[name] for name in names] for names in record["names"]]
    assert all(a >= b for row in record["similarity"] for a, b in itertools.pairwise(row))


def test_two_searches_are_equal_and_the_run_stays_sound(run: Run) -> None:
    first = find_neighbours(run, queries=2, k=3)
    assert same(first, find_neighbours(run, queries=2, k=3))
    assert same(first, tree.load(run.folder / NEIGHBOURS))
    assert not check_run(run).damaged


def test_every_column_of_the_pictures_has_a_heading(run: Run) -> None:
    written = neighbours_table(find_neighbours(run, queries=1, k=2), "Nearest neighbours")
    headings = re.findall(r'<th scope="col">(.*?)</th>', written)
    assert headings == ["image", "picture", "neighbours, nearest first", "their clients", "cosine"]


def test_an_image_finds_itself_among_others(run: Run, tmp_path: Path) -> None:
    train = load_data(recipe_of(run).data, 0).train
    for i in range(12):
        Image.fromarray(train.images.gather(torch.tensor([i]))[0, 0].numpy()).save(tmp_path / f"{i:02}.png")
    record = find_neighbours(run, tmp_path / "07.png", tmp_path, k=2)
    assert record["queries"] == ["07.png"]
    assert record["names"][0][0] == "07.png"
    assert record["similarity"][0][0] == pytest.approx(1)
    assert record["clients"] == []


def test_training_images_that_have_moved_are_searched_where_they_are(tmp_path: Path) -> None:
    images = tmp_path / "images"
    images.mkdir()
    for i in range(20):
        Image.new("L", (8, 8), 12 * i).save(images / f"{i:02}.png")
    settings = ("data.source=images", f"data.path={images}", "partition.clients=2", "train.rounds=1")
    moved = run_tiny(tmp_path / "run", *settings)
    expected = find_neighbours(moved)
    images.rename(tmp_path / "there")
    with pytest.raises(UserError, match=str(images)):
        find_neighbours(moved)
    found = find_neighbours(moved, settings=[f"data.path={tmp_path / 'there'}"])
    assert (found["names"], found["clients"]) == (expected["names"], expected["clients"])
    assert found["clients"]
    (tmp_path / "there" / "03.png").unlink()
    with pytest.warns(UserWarning, match="not the images that the run's clients had, so whose"):
        fewer = find_neighbours(moved, settings=[f"data.path={tmp_path / 'there'}"])
    assert fewer["clients"] == []
    assert main(["neighbours", str(moved.folder), "--set", "train.lr=1"]) == 2


def test_a_page_that_cannot_be_written_is_no_error(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*arguments: object) -> None:
        raise UserError("cannot write report.html: Permission denied")

    monkeypatch.setattr("atoll.report.write_report", refuse)
    with pytest.warns(UserWarning, match="shown and not kept: cannot write report"):
        assert main(["neighbours", str(run.folder), "--queries", "1"]) == 0
    assert "Effective rank" in capsys.readouterr().out


def test_the_page_and_the_terminal_show_them(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["neighbours", str(run.folder), "--queries", "2", "-k", "3"]) == 0
    shown = capsys.readouterr().out
    assert "Effective rank" in shown
    lines = re.findall(r"^(#\d+)? +│ (#\d+) +│ (\d) +│ (0\.\d{3})", shown, re.MULTILINE)
    record = find_neighbours(run, queries=2, k=3)
    firsts = [record["queries"][0], "", "", record["queries"][1], "", ""]
    assert [line[0] for line in lines] == firsts
    assert [line[1] for line in lines] == [name for names in record["names"] for name in names]
    assert [line[2] for line in lines] == [owner for owners in record["clients"] for owner in owners]
    assert [line[3] for line in lines] == [f"{one:.3f}" for some in record["similarity"] for one in some]
    page = (run.folder / "report.html").read_text()
    assert "Nearest neighbours" in page
    assert page.count("neighbours of #") == 2


def test_a_search_that_cannot_be_made_is_a_mistake(run: Run, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="at least 1 image"):
        find_neighbours(run, queries=0)
    with pytest.raises(UserError, match="there is no file or folder"):
        find_neighbours(run, tmp_path / "nothing")
