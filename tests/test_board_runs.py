"""Runs of the board: what becomes a record, what stops them, and that they can be repeated."""

from __future__ import annotations

import json
import os
import signal
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import board as tool
from atoll.core.config import flatten
from atoll.core.errors import RunError
from atoll.core.provenance import version
from atoll.recipe.recipe import make_recipe
from board_rows import Board, Entry
from tests.boards import TABLE

TINY = (
    "data.source=digits", "data.path=", "data.limit=200", "partition.clients=4", "partition.kind=iid",
    "train.batch_size=16", "evaluation.probe_epochs=2",
)  # fmt: skip


def same_but_made(record: dict[str, Any]) -> str:
    return tool.to_json({key: value for key, value in record.items() if key != "made"})


def first(board: Board) -> Entry:
    return board.tunings(board.rows["ssd"])[0]


@pytest.fixture
def simulated(monkeypatch):
    """Runs whose rounds a test plays: a function of the callback and the written lines."""

    def install(play):
        def simulate(recipe, folder, resume, callback):
            Path(folder).mkdir(parents=True, exist_ok=True)
            (Path(folder) / "recipe.toml").write_text(recipe.to_toml())
            lines = Path(folder) / "metrics.jsonl"
            for line in play():
                with lines.open("a") as file:
                    file.write(json.dumps(line) + "\n")
                callback.round(None, line)

        monkeypatch.setattr(tool.atoll, "simulate", simulate)

    before = signal.getsignal(signal.SIGTERM)
    yield install
    signal.signal(signal.SIGTERM, before)


def command(monkeypatch, tmp_path, *arguments: str) -> int:
    monkeypatch.setattr(tool, "Board", lambda results: Board(results, TABLE))
    places = ("--results", str(tmp_path / "results"), "--work", str(tmp_path / "work"))
    monkeypatch.setattr(sys, "argv", ["board.py", *arguments, *places])
    return tool.main()


def test_a_run_that_failed_becomes_a_record(tmp_path, monkeypatch, simulated):
    def diverge():
        yield {"round": 0, "evaluation": {"probe/accuracy": 0.1}}
        yield {"round": 1, "loss": 9.0, "seconds": 1.25}
        raise RunError("training diverged; lower train.lr")

    simulated(diverge)
    assert command(monkeypatch, tmp_path, "next") == 0
    board = Board(tmp_path / "results", TABLE)
    record = board.record("tuning/plain-lr0.1")
    assert record["failed"] == "training diverged; lower train.lr"
    assert record["evaluation"] == {}
    assert record["rounds"] == [
        {"round": 0, "evaluation": {"probe/accuracy": 0.1}},
        {"round": 1, "loss": 9.0},
    ]
    assert record["made"]["training_seconds"] == 1.2
    assert record["made"]["version"] == version()
    assert board.missing("short").name == "tuning/plain-lr0.3"  # it is not run again


def test_sigterm_stops_after_the_round_and_leaves_no_record(tmp_path, monkeypatch, simulated, capsys):
    played = []

    def interrupted():
        for round in range(4):
            if round == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            played.append(round)
            yield {"round": round}

    simulated(interrupted)
    assert command(monkeypatch, tmp_path, "all") == 0
    assert played == [0, 1]  # the round in which it came is complete
    assert "stopped; repeat the command" in capsys.readouterr().out
    assert not list((tmp_path / "results").rglob("*"))


def test_another_mistake_does_not_become_a_record(tmp_path, monkeypatch, simulated):
    def broken():
        yield {"round": 0}
        raise RuntimeError("a fault in the code")

    simulated(broken)
    with pytest.raises(RuntimeError, match="a fault in the code"):
        command(monkeypatch, tmp_path, "next")
    assert not list((tmp_path / "results").rglob("*"))


@pytest.mark.slow
def test_an_entry_run_twice_leaves_the_same_bytes(tmp_path):
    """A tenth of its length, on few images; once in a go, and once stopped after its first round."""
    entry, watcher = first(Board()), SimpleNamespace(begin=print, step=print, round=stop)
    once = tool.run(entry, tmp_path / "once", TINY)
    with pytest.raises(tool.StopAsked):
        tool.run(entry, tmp_path / "twice", TINY, watcher)
    twice = tool.run(entry, tmp_path / "twice", TINY)
    assert same_but_made(once) == same_but_made(twice)
    assert len(once["rounds"]) == 3


def stop(record: object, line: object) -> None:
    raise tool.StopAsked


@pytest.mark.slow
def test_a_tuning_run_comes_out_as_recorded(tmp_path):
    """On the real images, where they are, and on a machine of the record's kind."""
    board = Board()
    entry = first(board)
    record = board.record(entry.name)
    if record is None or not (Path(os.environ.get("ATOLL_DATA", "")) / "cifar10/train.parquet").is_file():
        pytest.skip("no record yet, or no images under ATOLL_DATA")
    here = tool.hardware_and_versions()
    if any(record["made"][key] != here[key] for key in ("capability", "torch", "torchvision", "numpy")):
        pytest.skip("the record is of another CPU capability, or of other versions")
    played = tool.run(entry, tmp_path)
    newer = {key: played["evaluation"].pop(key) for key in ("users_by_model", "supervised")}
    clients = list(range(record["recipe"]["partition"]["clients"]))
    assert newer == {"users_by_model": {"global": clients}, "supervised": False}
    assert same_but_made(played) == same_but_made(with_later_options(record))


def with_later_options(record: dict[str, Any]) -> dict[str, Any]:
    """A record with the defaults of options that its recipe did not have yet."""
    return {**record, "recipe": tomllib.loads(make_recipe(record["recipe"]).to_toml())}


@pytest.mark.parametrize(
    "path", sorted((tool.RESULTS / "tuning").glob("*-lr0.1.json")), ids=lambda path: path.stem
)
def test_a_record_s_recipe_is_today_s_but_for_options_that_came_later(path):
    before = json.loads(path.read_text("utf-8"))["recipe"]
    after = with_later_options({"recipe": before})["recipe"]
    assert flatten(before).items() <= flatten(after).items()
