"""The board: its rows and runs are the protocol's, its pages are what its records say, its arithmetic is right."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

import atoll
import board as tool
import board_page
from atoll.components.base import Setting
from atoll.core.config import read_settings
from atoll.methods.lagoon import Relay
from atoll.methods.registry import METHODS
from board_rows import RESULTS, Board, Entry
from tests.boards import TABLE

ROOT = Path(__file__).parents[1]


def put(board: Board, entry: Entry, accuracy: float | None) -> None:
    """A record with nothing in it but what the tables read; None: a run that came to nothing."""
    results = {"knn/accuracy": 0.5, "geometry/uniformity": -1.0, "geometry/effective_rank": 9.0}
    evaluation = {} if accuracy is None else {**results, "probe/accuracy": accuracy}
    failed = {"failed": "it diverged"} if accuracy is None else {}
    path = board.results / f"{entry.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    made = {"capability": f"AVX{entry.seed}"}
    begun = [{"round": 0, "evaluation": {**results, "probe/accuracy": 0.3}}]
    path.write_text(json.dumps({"rounds": begun, "evaluation": evaluation, "made": made, **failed}))


def turns(recipe: atoll.Recipe) -> int:
    """The rounds in which every client trains once: equal images for all rows."""
    aggregation, clients = recipe.composed.aggregation, recipe.partition.clients
    groups = aggregation.groups or clients if isinstance(aggregation, Relay) else 1
    return round(groups / recipe.train.participation)


# The page and its records.


def test_the_pages_say_what_the_records_say():
    for page, made in ((board_page.PAGE, board_page.made), (board_page.OWN_PAGE, board_page.ablation)):
        text = page.read_text("utf-8")
        assert board_page.filled(text, made(Board()), board_page.BEGIN, board_page.END) == text
    drawn = board_page.PAGE.with_suffix(".svg")
    assert (drawn.read_text("utf-8") if drawn.is_file() else "") == board_page.picture(Board())


def intervals(text: str) -> set[tuple[float, ...]]:
    """Each difference with its interval, such as +1.60 [−0.64, +3.83]."""
    number = r"([+−]?\d+\.\d\d)"
    found = re.findall(rf"{number} \[{number},\s{number}\]", text.replace("\n", " "))
    return {tuple(float(part.replace("−", "-")) for part in one) for one in found}


def test_the_intervals_in_the_prose_of_our_own_page_are_the_boards():
    board = intervals(board_page.PAGE.read_text("utf-8"))
    board |= {
        (-mean, -high, -low) for mean, low, high in board
    }  # "2.02 points behind" is a difference of −2.02
    text = board_page.OWN_PAGE.read_text("utf-8")
    prose = re.sub(r"<!-- made by \S+: begin -->.*?: end -->", "", text, flags=re.S)
    assert intervals(prose)
    assert intervals(prose) <= board


def test_the_page_lists_the_rows_in_their_order():
    titles = [row.title for row in Board().rows.values() if not row.line]
    text = board_page.PAGE.read_text("utf-8").partition("## Rows")[2].partition("New rows follow")[0]
    listed = [name for line in re.findall(r"^\| ([^|]+) \|", text, re.M)[2:] for name in line.split(", ")]
    assert [name.partition(" (")[0] for name in listed] == titles[: len(listed)]


def test_records_follow_the_protocol_and_name_their_commit_and_no_place():
    for path in RESULTS.rglob("*.json"):
        record = json.loads(path.read_text("utf-8"))
        name = path.relative_to(RESULTS).with_suffix("").as_posix()
        assert record["entry"] == name
        assert re.fullmatch(r"[\d.a-z]+\+g[0-9a-f]{7,40}", record["made"]["version"]), (
            f"{name} has no clean commit"
        )
        assert not re.search(r'"(/|~|[A-Z]:\\)', path.read_text("utf-8")), f"{name} names a place"
        recipe, tuning = record["recipe"], name.startswith("tuning/")
        preset = "board-long" if name.startswith("long/") else "board-short"
        plain = atoll.load_recipe(preset)
        assert recipe["data"]["limit"] == plain.data.limit
        assert recipe["train"]["batch_size"] == plain.train.batch_size
        assert recipe["seed"] == record["seed"] == (17 if tuning else int(name[-1]))
        row = name.partition("/")[2].partition("-")[0]
        groups = recipe["options"].get("relay", {"groups": 1})["groups"] or plain.partition.clients
        turns = round(groups / recipe["train"]["participation"])
        rounds = turns * (2 if tuning else plain.train.rounds)
        assert (Board().rows[row].line and not tuning) or recipe["train"]["rounds"] == rounds
        for text in Board().rows[row].settings:
            assert contains(recipe, tool.without_places(read_settings([text]))), (
                f"{name} was made without {text}"
            )


def contains(table: Any, part: Any) -> bool:
    """Whether a table has all values of another one."""
    if not isinstance(part, dict):
        return table == part
    return all(key in table and contains(table[key], value) for key, value in part.items())


# Rows.


@pytest.mark.parametrize("name", list(Board().rows))
def test_a_row_is_a_recipe(name):
    board = Board()
    row = board.rows[name]
    assert row.base == "" or row.base in board.rows
    for method in [row.method] if row.method else board.objectives:
        assert ":" in method or method in METHODS
        base = board.rows[method] if not row.method else row
        made = replace(row, method=method, temperature=base.temperature, choice_of="")
        for entry in board.tunings(made):
            recipe = atoll.load_recipe(entry.recipe, entry.settings)
            assert recipe.data.validation_fraction == 0.1
            assert recipe.train.rounds == 2 * turns(recipe)
        for protocol in board.protocols:
            preset = board.protocols[protocol]["recipe"]
            settings = [f"method.name={method}", *row.settings, *getattr(row, protocol)]
            recipe = atoll.load_recipe(preset, settings)
            assert recipe.data.validation_fraction == 0
            assert row.line or recipe.train.rounds == turns(recipe) * atoll.load_recipe(preset).train.rounds


@pytest.mark.parametrize(
    "row", [row for row in Board().rows.values() if row.method], ids=lambda row: row.name
)
def test_clients_of_all_sizes_train_for_the_protocol_s_epochs(row):
    """Images are equal: no method trains some clients longer, or none in a round, but for Orchestra's first."""
    recipe = atoll.load_recipe("board-short", [f"method.name={row.method}", *row.settings])
    setting = Setting(
        0, 4, (3, 32, 32), 10, 8, 8, recipe.train, recipe.model, cohort_size=4, sizes=(64, 400, 5000, 9000)
    )
    for round in (1, 2, 3):
        epochs = {recipe.composed.epochs(setting, client, range(4), round) for client in range(4)}
        assert epochs == {0 if (row.name, round) == ("orchestra", 1) else recipe.train.epochs}


def test_entries_come_in_the_documented_order(tmp_path):
    """All rates and temperatures, then the seeds; a row over the best objective takes that one's grid."""
    board = Board(tmp_path, TABLE)
    order = []
    for accuracy in (0.4, None, 0.4, 0.4, *[0.3] * 2, 0.5, None, *[0.3] * 2, *[0.3] * 3, 0.6, *[0.3] * 4):
        entry = board.missing("short")
        order.append(entry.name)
        put(board, entry, accuracy)
    assert board.missing("short") is None
    warm = [f"lr{rate}-t{tau}" for rate in (0.1, 0.3) for tau in (0.2, 0.5)]
    assert order == [
        *("tuning/plain-lr0.1", "tuning/plain-lr0.3", "short/plain-seed0", "short/plain-seed1"),
        *(f"tuning/warm-{point}" for point in warm), *("short/warm-seed0", "short/warm-seed1"),
        *(f"tuning/over-{point}" for point in warm), *("short/over-seed0", "short/over-seed1"),
        *("short/line-seed0", "short/line-seed1"),
    ]  # fmt: skip
    over = board.tunings(board.resolve(board.rows["over"]))
    assert all(entry.settings[-2:] == ("train.rounds=1", "train.rounds=3") for entry in over)
    *_, last = board.entries(board.rows["line"], "short")
    assert last.settings == (
        "method.name=fed_simclr", "partition.kind=centralised", "train.lr=0.3",
        "options.simclr.temperature=0.5", "train.rounds=2",
    )  # fmt: skip
    made = board_page.made(board)
    assert "| Over over Warm | 50.00 ± 0.00 | 30.00 ± 0.00 |" in made
    assert "| 0.3 | 0.5 | 2 | AVX0, AVX1 |" in made  # the CPU of each seed
    assert "| Plain | – | **40.00** | failed |" in made
    assert "| Untrained | 50.00 ± 0.00 | 30.00 ± 0.00 |" in made
    assert "| Warm | Plain | −10.00 [−10.00, −10.00] | +0.00 [+0.00, +0.00], cannot tell | 2 |" in made
    assert board_page.picture(board).count("<circle") == 8


def test_our_own_row_is_compared_with_the_best_of_the_papers(tmp_path):
    board = Board(tmp_path, {**TABLE, "own": "plain", "papers": ["warm", "over", "line"]})
    while entry := board.missing("short"):
        scores = {"short/plain": 0.5, "short/warm": 0.4, "short/over": 0.45}
        put(board, entry, scores.get(entry.name.partition("-")[0], 0.3))
    (row,) = [row for row in board_page.differences(board, "short") if row[1].endswith("papers')")]
    assert row[:3] == ["Plain", "Over (the best of the papers')", "+5.00 [+5.00, +5.00]"]


def test_our_own_row_is_compared_with_the_best_of_all_others(tmp_path):
    """Neither with a change of itself nor with a baseline."""
    table = {**TABLE, "own": "plain", "papers": ["over"], "ablation": [["over", "plain"]]}
    board = Board(tmp_path, table)
    while entry := board.missing("short"):
        scores = {"short/plain": 0.5, "short/warm": 0.4, "short/over": 0.45, "short/line": 0.6}
        put(board, entry, scores.get(entry.name.partition("-")[0], 0.3))
    rows = [row[:3] for row in board_page.differences(board, "short") if row[1].endswith("others)")]
    assert rows == [["Plain", "Warm (the best of all others)", "+10.00 [+10.00, +10.00]"]]
    shown = board_page.ablation(board).splitlines()[-1]
    assert shown == "| Over | 0.1 | 45.00 ± 0.00 | Plain | −5.00 [−5.00, −5.00] | 2 |"


def test_the_best_of_the_papers_is_the_one_with_the_highest_mean(tmp_path):
    """Neither the best seed nor the first seed decides, and failed runs do not count."""
    board = Board(tmp_path, {**TABLE, "own": "plain", "papers": ["warm", "over", "line"]})
    scores: dict[str, float | None] = {
        "short/warm-seed0": 0.6, "short/warm-seed1": 0.2,
        "short/over-seed0": 0.4, "short/over-seed1": 0.5,
        "short/line-seed0": None, "short/line-seed1": None,
    }  # fmt: skip
    assert board_page.best_of(board.papers, board, "short") is None
    while entry := board.missing("short"):
        put(board, entry, scores.get(entry.name, 0.3))
    assert board_page.best_of(board.papers, board, "short") == "over"


def test_the_untrained_encoder_is_that_of_a_row_that_begins_with_one_model(tmp_path):
    board = Board(tmp_path, TABLE)
    while entry := board.missing("short"):
        put(board, entry, 0.4)
    for seed in (0, 1):  # the first row's initial models are several, as FeatARC's
        path = tmp_path / f"short/plain-seed{seed}.json"
        record = json.loads(path.read_text())
        record["rounds"][0]["evaluation"] |= {"probe/accuracy": 0.9, "by_model": {"cluster-0": {}}}
        path.write_text(json.dumps(record))
    assert board_page.untrained(board, "short")[:3] == ["Untrained", "50.00 ± 0.00", "30.00 ± 0.00"]


def test_one_seed_needs_its_tuning_runs_alone(tmp_path):
    board = Board(tmp_path, TABLE)
    names = []
    while entry := board.missing("short", rows=["plain"], seed=1):
        names.append(entry.name)
        put(board, entry, 0.4)
    assert names == ["tuning/plain-lr0.1", "tuning/plain-lr0.3", "short/plain-seed1"]


# Arithmetic.


def test_paired_differences_are_students():
    mine, base = {0: 54.1, 1: 53.0, 2: 55.2, 7: 1.0}, {0: 53.5, 1: 52.9, 2: 53.1, 8: 2.0}
    n, mean, half = board_page.paired(mine, base)
    test = stats.ttest_rel([54.1, 53.0, 55.2], [53.5, 52.9, 53.1])
    interval = test.confidence_interval(0.95)
    assert n == 3
    assert (mean - half, mean + half) == pytest.approx((interval.low, interval.high))
    assert board_page.verdict(n, mean, half).endswith("cannot tell")
    assert board_page.paired({0: 2.5}, {0: 1.0}) == (1, 1.5, None)
    assert board_page.verdict(2, 3.0, 1.0) == "+3.00 [+2.00, +4.00]"
    assert board_page.verdict(2, -1.0, 1.0).endswith("cannot tell")


def test_paths_lose_their_places():
    table = {"data": {"path": "/home/me/cifar10"}, "options": {"part": {"data": {"path": "b/c"}}}}
    assert tool.without_places(table) == {
        "data": {"path": "cifar10"},
        "options": {"part": {"data": {"path": "c"}}},
    }


def test_a_page_without_its_markers_is_not_filled():
    text = "above\n<b>\n\nold\n\n<e>\nbelow\n"
    made = board_page.filled(text, "new", "<b>", "<e>")
    assert made == "above\n<b>\n\nnew\n\n<e>\nbelow\n"
    assert board_page.filled(made, "new", "<b>", "<e>") == made
    for broken in ("above\nbelow\n", "above\n<b>\nold\nbelow\n", "above\nold\n<e>\n", "<e>\n<b>\nbelow\n"):
        with pytest.raises(ValueError, match="the page needs the line '<b>'"):
            board_page.filled(broken, "new", "<b>", "<e>")
