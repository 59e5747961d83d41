"""The coordinator's entry point: what it reads, and what it says."""

from __future__ import annotations

import errno
import stat
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr", reason="the extra atoll[flower] is not installed")

from atoll.commands.flower_server_app import LogLines, _settings, main, run_federation
from atoll.core.errors import UserError
from atoll.core.run_folder import Run
from atoll.engines.flower.app_options import FlowerOptions
from atoll.engines.record import Record
from atoll.engines.server import TooFewUpdatesError
from tests.engines.flower.grid import shares
from tests.engines.flower.test_engine import SECRET, dropping
from tests.harness import tiny


@pytest.fixture
def written(tmp_path, monkeypatch):
    """A function that writes a recipe and gives the options of a run with it."""
    monkeypatch.setenv("ATOLL_STATE", str(tmp_path / "state"))

    def write(*settings, **options):
        (tmp_path / "recipe.toml").write_text(tiny(*settings).to_toml())
        return {"recipe": str(tmp_path / "recipe.toml"), "out": str(tmp_path / "run"), "wait": 3.0, **options}

    return write


def test_settings_may_hold_blanks(written):
    text = "title=Four sites, one model  evaluation.at_end=['knn', 'geometry'] train.rounds=1"
    folder = run_federation(shares(4), FlowerOptions(**written(set=text)))
    run = Run(folder)
    assert 'title = "Four sites, one model"' in run.recipe_path.read_text()
    assert [line["round"] for line in run.metrics] == [0, 1]
    assert {"knn/accuracy", "geometry/alignment"} <= run.read_json("evaluation.json").keys()
    assert (folder / "report.html").is_file()
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*.safetensors")}
    assert modes
    assert set(modes.values()) == {0o600}


def test_settings_may_hold_tables_and_keys_with_hyphens():
    text = (
        "options.x.data={source='folder', path='a b=c'}  method.terms=['my-mod:X'] options.my-term.weight=1"
    )
    assert _settings(text) == [
        "options.x.data={source='folder', path='a b=c'}",
        "method.terms=['my-mod:X']",
        "options.my-term.weight=1",
    ]


def test_a_round_with_too_few_updates_is_one_sentence_in_the_log(written, caplog):
    grid = dropping({1: (2, 3)})
    with pytest.raises(TooFewUpdatesError):
        main(grid, SimpleNamespace(run_config=written("train.min_accepted=0.75", deadline=1.0)))
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert said.startswith("round 1 failed: 2 of 4 updates were usable and train.min_accepted requires 75%")


def test_the_log_names_the_keys_of_the_app_for_the_options_of_the_command(written, caplog):
    run_federation(shares(4), FlowerOptions(**written("train.rounds=1")))
    with pytest.raises(UserError):
        main(shares(4), SimpleNamespace(run_config=written("train.rounds=1", "train.lr=0.5")))
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert said.endswith(
        "choose another --out, or start the run again with --restart (in the app's pyproject.toml: --out is "
        "'out'; in place of --restart, choose another 'out')"
    )


def test_a_full_disk_asks_for_no_option_that_an_app_lacks(written, caplog, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("atoll.core.files.sync", full)
    with pytest.raises(UserError):
        main(shares(4), SimpleNamespace(run_config=written("train.rounds=1")))
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert said.startswith("the disk is full")
    assert said.endswith(
        "(in the app's pyproject.toml: --resume is not needed, because a run in 'out' is continued)"
    )


def test_the_log_names_sites_and_tells_epsilon(caplog):
    caplog.set_level("INFO", "flwr")
    lines = LogLines()
    recipe = SimpleNamespace(train=SimpleNamespace(rounds=9))
    lines.begin(
        SimpleNamespace(recipe=recipe, partition=SimpleNamespace(names=["east", "1"])),
        SimpleNamespace(round=2),
    )
    record = Record(3, clients=5, seconds=1.25)
    record.losses, record.privacy = {"loss": 0.5}, {"epsilon": 1.2345, "delta": 1e-5}
    record.lost, record.refused = {"0": "no answer within 2 s"}, {"1": "it lacks 'w'"}
    lines.round(record, record.to_dict())
    lines.round(Record(4, clients=1, seconds=1.25), {})
    assert [line.getMessage() for line in caplog.records] == [
        "continuing after round 2 of 9",
        "round 3/9: 5 clients, 1.2 s, loss 0.5000, ε = 1.23 at δ = 1e-05",
        "round 3 continued without client 1: it lacks 'w'",
        "round 3 continued without client 0 (east): no answer within 2 s",
        "round 4/9: 1 client, 1.2 s",
    ]


def test_a_private_run_tells_epsilon_each_round(written, caplog):
    pytest.importorskip("dp_accounting", reason="the extra atoll[dp] is not installed")
    caplog.set_level("INFO", "flwr")
    run = Run(run_federation(shares(4), FlowerOptions(**written(*SECRET))))
    told = [line["privacy"]["epsilon"] for line in run.metrics[1:]]
    assert 0 < told[0] < told[1]
    for round, epsilon in enumerate(told, 1):
        (line,) = [text for text in caplog.messages if text.startswith(f"round {round}/2")]
        assert line.endswith(f"ε = {epsilon:.3g} at δ = 1e-05")


def test_apps_of_0_1_find_the_server_app_under_its_old_name():
    from atoll.commands import flower_server_app
    from atoll.engines.flower import server_app as old

    with pytest.warns(DeprecationWarning, match=r"is now atoll\.commands\.flower_server_app"):
        assert old.app is flower_server_app.app
