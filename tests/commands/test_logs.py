"""Logs for other tools, read back by the tools' own libraries."""

from __future__ import annotations

import json
import struct
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

import atoll
from atoll.cli.main import main
from atoll.commands import logs
from atoll.core.errors import UserError
from atoll.core.metrics_lines import numbers
from atoll.core.run_folder import Run
from tests.harness import TINY, tiny


class Interrupt:
    """Interrupts a run as a round ends, before the log of this round."""

    def __init__(self, at: int = 1) -> None:
        self.at = at

    def round(self, record: Any, line: Any) -> None:
        if record.round == self.at:
            raise KeyboardInterrupt


def interrupted_and_resumed(folder: Path, tool: str, at: int = 1) -> Run:
    recipe = tiny("evaluation.every=1")
    with pytest.raises(KeyboardInterrupt):
        atoll.simulate(recipe, folder, callbacks=[Interrupt(at)], log=[tool])
    return atoll.simulate(recipe, folder, resume=True, log=[tool])


def expected(run: Run) -> dict[str, dict[int, float]]:
    """Every number of every round, from the run's own file."""
    found: dict[str, dict[int, float]] = {}
    for text in (run.folder / "metrics.jsonl").read_text().splitlines():
        line = json.loads(text)
        for name, value in numbers(line).items():
            if name != "round":
                found.setdefault(name, {})[line["round"]] = value
    return found


def test_tensorboard_reads_each_round_and_the_results(tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = interrupted_and_resumed(tmp_path / "run", "tensorboard")
    events = reader.EventAccumulator(str(run.folder / "tensorboard"))
    events.Reload()
    found = {
        name: {scalar.step: scalar.value for scalar in events.Scalars(name)}
        for name in events.Tags()["scalars"]
    }
    want = expected(run)
    assert set(want["evaluation/knn/accuracy"]) == {0, 1, 2}
    assert {name for name in found if not name.startswith("final/")} == set(want)
    for name, values in want.items():
        assert found[name] == pytest.approx(values, rel=1e-6)
    assert found["final/knn/accuracy"] == pytest.approx({2: run.results["knn/accuracy"]})
    text = events.Tensors("recipe/text_summary")[0].tensor_proto.string_val[0].decode()
    assert tomllib.loads(text.removeprefix("```toml\n").removesuffix("```"))["train"]["rounds"] == 2


def test_tensorboard_shows_a_round_as_it_ends(tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    shown = []

    class Reader:
        def round(self, record: Any, line: Any) -> None:  # before the log of this round
            events = reader.EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
            tags = events.Tags()["scalars"]
            shown.append([scalar.step for scalar in events.Scalars("loss")] if "loss" in tags else [])

    atoll.simulate(tiny(), tmp_path / "run", callbacks=[Reader()], log="tensorboard")
    assert shown == [[], [1]]


class Recorded(logs.Log):
    """Lists its calls."""

    tool = "recorded"
    calls: ClassVar[list[tuple[Any, ...]]] = []

    def open(self, rounds: int) -> None:
        self.calls.append(("open", self.identity, rounds))
        self.identity = self.identity or "first"

    def write(self, values: Any, round: int) -> None:
        assert not {"round", f"{logs.FINAL}round"} & values.keys()  # the step says it
        kind = "final" if all(name.startswith(logs.FINAL) for name in values) else "line"
        self.calls.append((kind, round))

    def close(self, finished: bool) -> None:
        self.calls.append(("close", finished))


class Broken(Recorded):
    tool = "broken"
    when = "open"

    def open(self, rounds: int) -> None:
        super().open(rounds)
        self.fail_at("open")

    def write(self, values: Any, round: int) -> None:
        self.fail_at("write")

    def fail_at(self, place: str) -> None:
        if place == self.when:
            raise ConnectionError("no server\nanswers")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The calls of the tools "recorded" and "broken"."""
    monkeypatch.setattr(Recorded, "calls", [])
    monkeypatch.setattr(logs, "TOOLS", {**logs.TOOLS, "recorded": Recorded, "broken": Broken})
    monkeypatch.setattr(logs, "missing", lambda *names: None)
    return Recorded.calls


def test_each_line_is_written_once_as_its_round_ends(tmp_path: Path, calls: list[tuple[Any, ...]]) -> None:
    interrupted_and_resumed(tmp_path / "run", "recorded", at=2)
    assert calls == [
        *(("open", "", 0), ("line", 0), ("line", 1), ("close", False)),
        *(("open", "first", 2), ("line", 2), ("final", 2), ("close", True)),
    ]


def test_a_run_without_rounds_logs_the_untrained_encoder(
    tmp_path: Path, calls: list[tuple[Any, ...]]
) -> None:
    atoll.simulate(tiny("train.rounds=0", "evaluation.every=1"), tmp_path / "run", log="recorded")
    assert calls == [("open", "", 0), ("line", 0), ("final", 0), ("close", True)]


def test_the_results_of_a_run_that_stopped_early_belong_to_its_last_round(
    tmp_path: Path, calls: list[tuple[Any, ...]]
) -> None:
    settings = ("train.rounds=5", "train.lr=1e-12", "evaluation.every=1", "evaluation.patience=1")
    run = atoll.simulate(tiny(*settings), tmp_path / "run", log="recorded")
    last = run.metrics[-1]["round"]
    assert last < 5
    assert calls[-3:] == [("line", last), ("final", last), ("close", True)]


@pytest.mark.parametrize(
    ("when", "kind", "closed"), [("open", UserError, []), ("write", atoll.RunError, [("close", False)])]
)
def test_a_tool_that_fails_is_named(
    when: str,
    kind: type[Exception],
    closed: list[tuple[Any, ...]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    calls: list[tuple[Any, ...]],
) -> None:
    monkeypatch.setattr(Broken, "when", when)
    with pytest.raises(kind, match="--log broken failed: no server answers; "):
        atoll.simulate(tiny(), tmp_path / "run", log="broken")
    assert calls == [("open", "", 0), *closed]
    assert atoll.simulate(tiny(), tmp_path / "run", resume=True).finished  # without the log


def test_a_federation_logs_at_its_coordinator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    pytest.importorskip("flwr")
    from atoll.commands.flower_server_app import run_federation
    from atoll.engines.flower.app_options import FlowerOptions
    from tests.engines.flower.grid import shares

    monkeypatch.setenv("ATOLL_STATE", str(tmp_path / "state"))
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(tiny("evaluation.every=1").to_toml())
    options = FlowerOptions(
        recipe=str(recipe), out=str(tmp_path / "run"), wait=5.0, deadline=30.0, log="tensorboard"
    )
    run = Run(run_federation(shares(4), options))
    events = reader.EventAccumulator(str(run.folder / "tensorboard"))
    events.Reload()
    losses = {scalar.step: scalar.value for scalar in events.Scalars("loss")}
    assert losses == pytest.approx(expected(run)["loss"], rel=1e-6)
    assert events.Scalars("final/knn/accuracy")[0].value == pytest.approx(run.results["knn/accuracy"])


def wandb_records(path: Path) -> Iterator[Any]:
    """The records of an offline run: LevelDB's log format around W&B's own messages."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, whole = path.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # the whole of a record, or its last part
            record = Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def test_wandbs_offline_folder_holds_each_round_and_the_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")
    for name, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_CONSOLE": "off"}.items():
        monkeypatch.setenv(name, value)
    run = interrupted_and_resumed(tmp_path / "run", "wandb")
    wandb.teardown()  # ends its service, which writes the files
    found: dict[str, dict[int, float]] = {}
    ids, final, exits = set(), {}, []
    for path in sorted(run.folder.glob("wandb/offline-run-*/*.wandb")):
        for record in wandb_records(path):
            if record.HasField("run"):
                ids.add((record.run.run_id, record.run.project))
            if record.HasField("exit"):
                exits.append(record.exit.exit_code)
            if record.HasField("summary"):
                for item in record.summary.update:
                    final[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
            if record.HasField("history"):
                for item in record.history.item:
                    name = item.key or "/".join(item.nested_key)
                    found.setdefault(name, {})[record.history.step.num] = json.loads(item.value_json)
    assert ids == {(json.loads((run.folder / "logs.json").read_text())["wandb"]["id"], "atoll")}
    for name, values in expected(run).items():
        assert found[name] == pytest.approx(values)
    assert final["final/knn/accuracy"] == run.results["knn/accuracy"]
    assert exits == [1, 0]  # the interrupted run, and the resumed one


@pytest.mark.slow
def test_mlflows_local_store_holds_each_round_and_the_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    run = interrupted_and_resumed(tmp_path / "run", "mlflow")
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("atoll")
    (saved,) = client.search_runs([experiment.experiment_id])
    assert (saved.info.run_name, saved.info.status) == ("run", "FINISHED")
    assert saved.data.params["train.rounds"] == "2"
    for name, values in expected(run).items():
        history = client.get_metric_history(saved.info.run_id, name)
        assert {metric.step: metric.value for metric in history} == pytest.approx(values)
    assert saved.data.metrics["final/knn/accuracy"] == run.results["knn/accuracy"]


def test_the_command_logs_a_comparison_and_a_restart_begins_anew(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    settings = ["--set", *TINY, "train.rounds=0"]
    assert main(["compare", "digits", "--out", str(tmp_path), "--log", "tensorboard", *settings]) == 0
    (first,) = (tmp_path / "digits-seed0" / "tensorboard").iterdir()
    arguments = ["run", "digits", "--out", str(tmp_path / "digits-seed0"), "--restart"]
    assert main([*arguments, "--log", "tensorboard", *settings]) == 0
    (again,) = (tmp_path / "digits-seed0" / "tensorboard").iterdir()
    assert again.name != first.name


def test_an_unknown_or_missing_tool_is_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="did you mean 'tensorboard'"):
        atoll.simulate(tiny(), tmp_path / "run", log=["tensorbord"])
    monkeypatch.setattr(logs, "missing", lambda *words: "it is missing")
    with pytest.raises(UserError, match="it is missing"):
        atoll.simulate(tiny(), tmp_path / "run", log=["wandb"])
    assert not (tmp_path / "run").exists()


def test_none_logs_nothing_and_what_is_no_name_gets_a_sentence(tmp_path: Path) -> None:
    assert not (atoll.simulate(tiny(), tmp_path / "none", log=None).folder / "logs.json").exists()
    for wrong in (True, [None], ["tensorboard", ["wandb"]]):
        with pytest.raises(UserError, match="no such tool"):
            atoll.simulate(tiny(), tmp_path / "run", log=wrong)  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()
