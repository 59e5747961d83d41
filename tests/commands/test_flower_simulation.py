"""What a run on Flower's simulation does when its nodes die; here the nodes are functions."""

from __future__ import annotations

import secrets

import pytest

pytest.importorskip("flwr", reason="the extra atoll[flower] is not installed")

from flwr.app import Error, Message

from atoll.cli.main import main
from atoll.commands.flower_simulation import ATTEMPTS, run_on_flower
from atoll.commands.resume import Recovery
from atoll.core.run_folder import SITES, Run
from atoll.engines.federation import Federation
from atoll.engines.flower import simulation
from atoll.engines.flower.app_options import FlowerOptions
from atoll.engines.flower.engine import FlowerEngine
from atoll.engines.flower.executor import NodeLostError
from tests.engines.flower.grid import shares
from tests.harness import final_models, run_tiny, tiny
from tests.trees import same


class Nodes(simulation.FlowerSimulation):
    """A simulation whose nodes die in these requests to train, counted over all its starts; 0 is the first."""

    dies: frozenset[int] = frozenset()
    asked = 0
    starts = 0

    def gather(self, recipe, folder, restart=False):
        Nodes.starts += 1
        federation = Federation(recipe)
        grid = shares(federation.setting.num_clients, state=str(folder / "checkpoints/nodes"))
        for number, handle in list(grid.nodes.items()):
            grid.nodes[number] = lambda message, handle=handle: self._answer(message, handle)
        grid.keys = {number: secrets.token_bytes(32) for number in grid.nodes}  # as Flower draws them
        options = FlowerOptions(wait=2.0, deadline=30.0)
        self._engine = FlowerEngine(grid, options, recipe.to_toml(), federation)
        return self._engine.gather(recipe, folder, restart)

    def _answer(self, message, handle):
        if message.metadata.message_type != "train":
            return handle(message)
        Nodes.asked += 1
        if Nodes.asked - 1 in self.dies:
            return Message(Error(code=0, reason="ActorDiedError"), reply_to=message)
        return handle(message)


@pytest.fixture
def nodes(monkeypatch):
    monkeypatch.setattr(simulation, "FlowerSimulation", Nodes)
    monkeypatch.setattr(Nodes, "asked", 0)
    monkeypatch.setattr(Nodes, "starts", 0)
    return Nodes


SETTINGS = ("method.name=fedema", "train.rounds=2")


def test_a_round_whose_nodes_die_is_repeated_with_equal_weights(tmp_path, monkeypatch, nodes):
    monkeypatch.setattr(nodes, "dies", frozenset({0, 6}))  # in round 1, and in round 2
    said: list[str] = []
    run = run_on_flower(tiny(*SETTINGS), tmp_path / "theirs", say=said.append)
    assert [line["round"] for line in run.metrics] == [0, 1, 2]
    assert len(said) == 2
    assert said[0].startswith(
        "client 0 was lost: its node failed: ActorDiedError; the run continues on the nodes"
    )
    assert same(final_models(run), final_models(run_tiny(tmp_path / "ours", *SETTINGS)))


@pytest.mark.slow
def test_a_run_whose_nodes_always_die_ends_and_resumes(tmp_path, monkeypatch, nodes):
    monkeypatch.setattr(nodes, "dies", frozenset(range(4, 100)))  # from round 2 on
    with pytest.raises(NodeLostError):
        run_on_flower(tiny(*SETTINGS), tmp_path / "theirs", say=lambda sentence: None)
    assert nodes.starts == ATTEMPTS
    monkeypatch.setattr(nodes, "dies", frozenset())
    run = run_on_flower(tiny(*SETTINGS), tmp_path / "theirs", resume=True)
    assert same(final_models(run), final_models(run_tiny(tmp_path / "ours", *SETTINGS)))


def test_the_command_resumes_a_run_on_the_engine_that_is_named(tmp_path, monkeypatch, nodes, capsys):
    settings = ("method.name=fedema", "train.rounds=1")
    run_on_flower(tiny(*settings), tmp_path / "run")
    resume = ["resume", str(tmp_path / "run"), "--engine", "flower-sim", "--set", "train.rounds=2"]
    assert main(resume) == 0
    assert nodes.starts == 2
    assert same(final_models(Run(tmp_path / "run")), final_models(run_tiny(tmp_path / "ours", *SETTINGS)))


def test_a_restart_may_have_another_number_of_clients(tmp_path, nodes):
    two, three = ((*SETTINGS, f"partition.clients={count}") for count in (2, 3))
    began = run_on_flower(tiny(*two), tmp_path / "run").read_json(SITES)
    run = run_on_flower(tiny(*three), tmp_path / "run", recovery=Recovery(restart=True))
    now = run.read_json(SITES)
    assert [site["name"] for site in now["sites"]] == ["0", "1", "2"]
    assert now["federation"] != began["federation"]
    assert same(final_models(run), final_models(run_tiny(tmp_path / "ours", *three)))
