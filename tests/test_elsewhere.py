"""Rows of the board in other federations: equal images, and a page that is what the records say."""

from __future__ import annotations

import json

import pytest

import atoll
import elsewhere as tool
from board_rows import Board

TABLE = {
    "seeds": [1],
    "methods": ["fed_align_uniform", "lagoon"],
    "turns": ["lagoon"],
    "federations": [
        {
            "name": "a",
            "title": "A",
            "recipe": "digits",
            "settings": ["train.epochs=3"],
            "rounds": 2,
            "clients": 10,
        },
        {"name": "b", "title": "B", "recipe": "digits", "settings": [], "rounds": 1, "clients": 10},
    ],
}


@pytest.fixture
def study(tmp_path):
    """A study whose methods were tuned: 0.3 is the best rate of one, 0.03 of the other."""
    board = Board(tmp_path / "board")
    for name, best in (("fed_align_uniform", 0.3), ("lagoon", 0.03)):
        for entry in board.tunings(board.rows[name]):
            path = board.results / f"{entry.name}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            accuracy = 0.5 if f"lr{best}" in entry.name else 0.4
            path.write_text(json.dumps({"evaluation": {"probe/accuracy": accuracy}}))
    return tool.Elsewhere(tmp_path / "records", TABLE, board)


def test_the_page_is_what_the_records_say():
    text = tool.PAGE.read_text("utf-8")
    assert tool.filled(text, tool.made(tool.Elsewhere()), tool.BEGIN, tool.END) == text


def test_each_method_has_its_rate_and_equal_images(study):
    recipes = {entry.name: atoll.load_recipe(entry.recipe, entry.settings) for entry in study.entries()}
    plain, own = recipes["a-fed_align_uniform-seed1"], recipes["a-lagoon-seed1"]
    assert (plain.train.lr, own.train.lr) == (0.3, 0.03)
    assert plain.train.epochs == own.train.epochs == 3
    turns = own.partition.clients
    assert own.train.rounds == turns * plain.train.rounds == turns * 2


def test_the_last_method_is_compared_with_the_others(study):
    study.results.mkdir()
    for name, accuracy in (("a-fed_align_uniform", 0.5), ("a-lagoon", 0.55), ("b-lagoon", 0.6)):
        record = {"evaluation": {"probe/accuracy": accuracy}}
        (study.results / f"{name}-seed1.json").write_text(json.dumps(record))
    assert list(tool.rows(study)) == [
        ["A", "50.00", "55.00", "+5.00, cannot tell (one seed)"],
        ["B", "–", "60.00", "–"],
    ]


def test_every_federation_has_a_turn_for_each_client():
    study, natural = tool.Elsewhere(), {"pacs": 4, "solar": 2}
    for place in study.table["federations"]:
        run = study.runs[f"{place['name']}-lagoon"]
        loaded = atoll.load_recipe(run["recipe"], run["settings"])
        assert place["clients"] == natural.get(place["name"], loaded.partition.clients)
