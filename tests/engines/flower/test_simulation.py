"""Flower's simulation, started by Atoll on this machine or on a Ray cluster."""

from __future__ import annotations

import socket
import sys

import pytest

pytest.importorskip("ray", reason="the extra atoll[flower] is not installed")

from atoll.cli.main import main
from atoll.commands.flower_simulation import run_on_flower
from atoll.core.run_folder import Run
from atoll.engines.callbacks import Callback
from tests.harness import TINY, final_models, run_tiny, tiny
from tests.trees import same


def run(place, *arguments):
    return main(["run", "digits", "--out", str(place / "run"), *arguments, "--set", *TINY])


@pytest.mark.parametrize("address", ["ray://there:1", "6379", "there:port", ":6379"])
def test_an_address_that_is_none_is_refused(tmp_path, capsys, address):
    assert run(tmp_path, "--engine", "flower-sim", "--ray", address) == 2
    assert f"--ray is {address!r}; give HOST:PORT" in capsys.readouterr().err


def test_a_cluster_that_is_not_there_is_a_sentence(tmp_path, capsys):
    with socket.socket() as taken:  # a port at which nobody listens
        taken.bind(("127.0.0.1", 0))
        assert run(tmp_path, "--engine", "flower-sim", "--ray", f"127.0.0.1:{taken.getsockname()[1]}") == 2
    assert "there is no Ray cluster at --ray 127.0.0.1" in capsys.readouterr().err
    assert run(tmp_path, "--ray", "127.0.0.1:6379") == 2
    assert "--ray needs --engine flower-sim" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


class KillsANode(Callback):
    """Kills the second machine of a cluster once the first update of round 2 has arrived."""

    def __init__(self, cluster, machine):
        self.cluster, self.machine, self.rounds = cluster, machine, 0

    def round(self, record, line):
        self.rounds += 1

    def step(self, images):
        if self.rounds == 1 and self.machine is not None:
            self.machine.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)
            self.machine = None


@pytest.fixture
def cluster(monkeypatch):
    """A Ray cluster of two machines, both of them this one, with a core each."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    yield cluster
    cluster.shutdown()


@pytest.mark.slow
def test_a_machine_that_dies_in_mid_round_changes_no_weight(tmp_path, cluster):
    settings = ("method.name=fedema", "train.rounds=3", "train.epochs=10")
    killer, said = KillsANode(cluster, cluster.add_node(num_cpus=1)), []
    theirs = run_on_flower(
        tiny(*settings), tmp_path / "theirs", callback=killer, address=cluster.address, say=said.append
    )
    assert killer.machine is None
    assert len(said) == 1
    assert "was lost: its node failed" in said[0]
    assert [line["round"] for line in theirs.metrics] == [0, 1, 2, 3]
    ours = run_tiny(tmp_path / "ours", *settings)
    assert same(final_models(ours), final_models(theirs))


@pytest.mark.slow
def test_nodes_find_the_code_beside_a_recipe_from_any_folder(tmp_path, monkeypatch):
    """Ray's workers have the working folder on their path, so only code elsewhere was missed."""
    code = tmp_path / "code"
    code.mkdir()
    (code / "beside_recipe.py").write_text(
        "from atoll.methods.method import Method\n"
        "from atoll.objectives.simclr import SimCLR\n\n"
        "METHOD = Method(objective=SimCLR(temperature=0.3), title='Beside')\n"
    )
    (code / "ours.toml").write_text('base = "digits"\n[method]\nname = "beside_recipe:METHOD"\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    for engine in ("flower-sim", "simulation"):
        assert main(["run", "code/ours.toml", "--engine", engine, "--out", engine, "--set", *TINY]) == 0
    assert same(final_models(Run("flower-sim")), final_models(Run("simulation")))
