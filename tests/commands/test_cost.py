"""What a dry run says of a run is what the run then does: steps, bytes and files; nothing is written."""

import pytest

from atoll.aggregation.private import PrivateFedAvg
from atoll.cli.main import main
from atoll.commands.cost import at_sites, estimate
from atoll.commands.run import run_recipe
from tests.harness import tiny

SETTINGS = (
    "data.limit=150", "partition.clients=5", "train.participation=0.6", "train.rounds=3", "train.epochs=2",
    "evaluation.at_end=[]",
)  # fmt: skip


@pytest.mark.parametrize("method", ["fed_simclr", "fedema", "multi_krum"])
def test_the_estimate_is_what_the_run_does(tmp_path, method):
    needs = ("options.multi_krum.byzantine=0",) if method == "multi_krum" else ()
    settings = (*SETTINGS, f"method.name={method}", *needs)
    (cost,) = estimate(tiny(*settings), warm=1, timed=2)
    images = []

    class Count:
        def begin(self, federation, server):
            self.sizes = federation.setting.sizes

        def step(self, count):
            images.append(count)

        def round(self, record, line):
            pass

    run = run_recipe(tiny(*settings), tmp_path / "run", callback=Count())
    assert cost.steps == len(images) == 3 * 3 * 2 * 2  # rounds, cohort, epochs, batches of 30 images
    lines = run.metrics[1:]
    assert 3 * cost.up == lines[-1]["bytes_up"]
    assert {3 * cost.down + n * cost.once for n in range(4)} & {line["bytes_down"] for line in lines}
    files = [path.stat().st_size for path in run.checkpoints.glob("round-*")]
    assert cost.checkpoints == pytest.approx(sum(files), rel=0.5)  # beside numbers, a file has names
    assert cost.seconds > 0
    assert cost.memory > 2**26
    assert (cost.states > 0) == (method == "fedema")


@pytest.mark.parametrize(("method", "rounds"), [("orchestra", 2), ("dcco", 1), ("fedsc", 1)])
def test_rounds_without_training_take_no_steps(method, rounds):
    """Round 1 trains nothing, and with `gather = "rounds"` round 3 does not either."""
    (cost,) = estimate(tiny(*SETTINGS, f"method.name={method}"), warm=1, timed=1)
    assert cost.steps == rounds * 3 * 2 * 2  # cohort, epochs, batches of 30 images
    assert cost.seconds > 0


def test_a_round_whose_draw_is_empty_costs_what_the_others_do(monkeypatch):
    monkeypatch.setattr(PrivateFedAvg, "cohort", lambda *_: [])
    private = ("method.name=fed_simclr", "method.aggregation=private_fedavg", "train.bn_buffers=local")
    (cost,) = estimate(tiny(*SETTINGS, *private), warm=1, timed=1)
    assert (cost.cohort, cost.steps) == (3, 3 * 3 * 2 * 2)


def test_a_federation_costs_what_its_sites_and_images_say(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    recipe = tiny("method.name=fedema", "train.rounds=3", "data.source=clients", "data.path=elsewhere")
    (cost,) = estimate(at_sites(recipe, 4, 50), warm=1, timed=2)
    assert cost.steps == 3 * 4 * 3  # rounds, sites, batches of 50 images
    assert (cost.cohort, cost.clients) == (4, 4)
    arguments = ["federate", "init", "app", "--recipe", "digits-ssd", "--dry-run"]
    small = ["model.width=4", "train.rounds=2", "train.batch_size=16"]
    assert main([*arguments, "--sites", "3", "--site-images", "32", "--set", *small]) == 0
    assert "2 rounds, 3 of 3 sites each, 32 images at each" in capsys.readouterr().out
    assert main([*arguments, "--set", *small]) == 2
    assert "needs the number of --sites" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_command_writes_nothing_and_counts_the_runs_before(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    settings = [
        "train.rounds=2",
        "train.epochs=1",
        "data.limit=100",
        "partition.clients=2",
        "partition.kind=iid",
    ]
    assert main(["run", "digits-ssd", "--dry-run", "--engine", "flower-sim", "--set", *settings]) == 0
    said = capsys.readouterr()
    assert "2 rounds, 2 of 2 clients each" in said.out
    assert "a site" in said.out
    assert "Flower's simulation comes on top" in said.err
    assert list(tmp_path.iterdir()) == []


def test_the_workers_and_their_devices_are_named():
    (cost,) = estimate(tiny(*SETTINGS, "engine.devices=['cpu', 'cpu:0']"), warm=1, timed=1)
    said = "\n".join(cost.lines())
    assert "with 2 workers on cpu, cpu:0: " in said
    assert "a process, 3 processes" in said


def test_runs_that_are_needed_first_come_first():
    settings = ("method.name=fedca", "options.fedca_alignment.data={source='digits'}")
    costs = estimate(tiny(*SETTINGS, *settings), warm=1, timed=1)
    assert len(costs) == 2
    assert (costs[0].clients, costs[1].clients) == (1, 5)
