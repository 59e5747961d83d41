"""What a dry run says of a run is what the run then does: steps, bytes and files; nothing is written."""

import sys
from dataclasses import replace

import pytest
import torch

from atoll.aggregation.private import PrivateFedAvg
from atoll.cli.main import main
from atoll.commands import cost as cost_of
from atoll.commands.cost import Cost, at_sites, estimate, estimate_at_sites
from atoll.commands.run import run_recipe
from atoll.commands.stopwatch import Enough, Stopwatch
from atoll.core.tree import load, num_bytes
from tests.harness import tiny

SETTINGS = (
    "data.limit=150", "partition.clients=5", "train.participation=0.6", "train.rounds=3", "train.epochs=2",
    "evaluation.at_end=[]",
)  # fmt: skip


@pytest.mark.parametrize("method", ["fed_simclr", "fedema", "multi_krum", "scaffold"])
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
    if method != "scaffold":  # whose first round differs
        lines = run.metrics[1:]
        assert 3 * cost.up == lines[-1]["bytes_up"]
        assert {3 * cost.down + n * cost.once for n in range(4)} & {line["bytes_down"] for line in lines}
    files = [path.stat().st_size for path in run.checkpoints.glob("round-*")]
    assert cost.checkpoints == pytest.approx(sum(files), rel=0.3)  # beside numbers, a file has names
    assert cost.seconds > 0
    assert cost.memory > 2**26
    assert (cost.states > 0) == (method in ("fedema", "scaffold"))


@pytest.mark.parametrize("rounds", [2, 5])
@pytest.mark.parametrize("method", ["fed_simclr", "scaffold", "fedca", "local_only", "dcco", "lagoon"])
def test_the_estimated_traffic_is_that_of_the_run(tmp_path, method, rounds):
    """Control variates come after the first round, a dictionary too; who trains alone receives one model, once."""
    settings = [*SETTINGS, f"method.name={method}", f"train.rounds={rounds}", "train.epochs=1"]
    settings += ["train.participation=1.0", *(["data.limit=20"] if method == "fedca" else [])]
    alignment = [
        "options.fedca_alignment.train_epochs=3",
        "options.fedca_alignment.data={source='digits',limit=20}",
    ]
    needs = alignment if method == "fedca" else []
    cost = estimate(tiny(*settings, *needs), warm=1, timed=1)[-1]
    lines = run_recipe(tiny(*settings, *needs), tmp_path / "run").metrics[1:]
    took_part = min(cost.clients, rounds * cost.cohort)
    down = sum(line["bytes_down"] for line in lines)
    assert rounds * cost.cohort * cost.down + took_part * cost.once == pytest.approx(down)
    up = sum(line["bytes_up"] for line in lines)
    assert rounds * cost.cohort * cost.up == pytest.approx(up)


COST = Cost(
    name="tens", rounds=10, cohort=3, clients=6, images=600, steps=1200, step_seconds=0.5, switch_seconds=2.0,
    workers=("cpu", "cpu"), at_once=1, memory=3_000_000_000, checkpoints=50_000_000, states=12_000_000,
    down=2_000_000, up=1_500_000, once=4_000_000,
)  # fmt: skip


def test_the_totals_are_those_by_hand():
    """1,200 steps of 0.5 s and 30 clients of 2 s: 660 s, on two workers 330 s; 5 rounds of a site: 21.5 MB."""
    assert COST.seconds == 330.0
    assert list(COST.lines()) == [
        "tens: 10 rounds, 3 of 6 clients each, 1,200 steps",
        "  time    6 min with 2 workers on cpu: 500.0 ms a step, 2000.0 ms a client beside its steps; "
        "evaluations come on top",
        "  memory  3.0 GB a process, 3 processes; evaluations may need more",
        "  disk    50.0 MB of checkpoints, 12.0 MB of client states",
        "  a site  2.0 MB down and 1.5 MB up a round, 4.0 MB once; 21.5 MB in the 5 rounds of an average site",
    ]
    alone = replace(COST, workers=("cpu",))
    assert alone.seconds == 660.0
    assert "  memory  3.0 GB a process; evaluations may need more" in alone.lines()


def test_the_totals_of_sites_are_those_by_hand():
    """330 s in ten rounds are 33 s each, and 12 MB of six sites are 2 MB at each."""
    said = list(COST.site_lines(1))
    assert said[0] == "tens: 10 rounds, 3 of 6 sites each, 1 image at each"
    assert said[1].startswith("  time    33 s of training a round, 6 min in all, where a step takes 500.0 ms")
    assert said[3] == "  disk    50.0 MB of checkpoints at the coordinator, 2.0 MB of state at a site"
    assert said[4] == list(COST.lines())[4]


@pytest.mark.parametrize("rounds", [1, 5, 6])
@pytest.mark.parametrize("every", [1, 3])
def test_the_states_are_as_many_as_a_run_leaves(tmp_path, rounds, every):
    settings = (*SETTINGS, "method.name=local_only", "train.participation=1.0")
    settings += (f"train.rounds={rounds}", f"engine.checkpoint_every={every}")
    (cost,) = estimate(tiny(*settings), warm=1, timed=1)
    run = run_recipe(tiny(*settings), tmp_path / "run")
    files = [load(path) for path in (run.checkpoints / "clients").glob("*/*.safetensors")]
    assert cost.states == sum(map(num_bytes, files)) > 0


def test_states_are_those_of_the_clients_that_are_expected_to_have_taken_part(monkeypatch):
    """Three of five in each of three rounds: the last three, and 5 (1 − 0.4²) = 4.2 of the rounds before."""
    monkeypatch.setattr(cost_of, "_timed_steps", lambda *_: (0.25, torch.zeros(50)))
    monkeypatch.setattr(cost_of, "_switch", lambda *_: 0.5)
    monkeypatch.setattr(cost_of, "_traffic", lambda *_: cost_of._Traffic(4, 12, 8))
    (cost,) = estimate(tiny(*SETTINGS, "method.name=fedema"))
    assert cost.states == round((3 + 4.2) * 200)
    assert cost.up == 12
    assert cost.seconds == pytest.approx((36 * 0.25 + 9 * 0.5) / len(cost.workers))
    (idle,) = estimate(tiny(*SETTINGS, "train.epochs=0"))
    assert (idle.steps, idle.step_seconds) == (0, 0.0)


def test_the_duration_of_a_step_is_the_median_after_the_warm_ones(monkeypatch):
    class Watch(Stopwatch):
        def __init__(self, most, device):
            assert most == 5
            self.seconds, self.images = [99.0, 98.0, 3.0, 1.0, 1.5], 20
            self.making = [0.05, 0.1, 0.8]

        def over(self, data, epochs):
            return data

        def __call__(self, images):
            raise Enough

    monkeypatch.setattr(cost_of, "Stopwatch", Watch)
    monkeypatch.setattr(cost_of, "_switch", lambda *_: 0.5)
    monkeypatch.setattr(cost_of, "_traffic", lambda *_: cost_of._Traffic(0, 0, 0))
    (cost,) = estimate(tiny(*SETTINGS), warm=2, timed=3)
    assert cost.step_seconds == 1.5 + 20 * 0.1


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


def test_federations_of_many_sites_and_of_no_round_have_a_cost():
    (cost,) = estimate_at_sites(tiny("method.name=fed_simclr"), 2000, 2, warm=1, timed=2)
    assert (cost.clients, len(cost.workers)) == (2000, 2000)  # each site of a round computes by itself
    (cost,) = estimate_at_sites(tiny("train.rounds=0"), 2, 20, warm=1, timed=2)
    assert "0 rounds" in next(iter(cost.site_lines(20)))
    assert "training a round" in "".join(cost.site_lines(20))


@pytest.mark.parametrize("library", ["flwr", "ray"])  # `pip install flwr` leaves out Ray
def test_a_dry_run_on_flower_needs_what_the_run_does(library, tmp_path, monkeypatch, capsys):
    if library == "ray":
        pytest.importorskip("flwr", reason="the extra atoll[flower] is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, library, None)  # as if it were not installed
    said = []
    for more in ["--dry-run"], []:
        assert main(["run", "digits-ssd", "--engine", "flower-sim", *more]) == 2
        said.append(capsys.readouterr())
    assert said[0] == said[1]
    assert f"needs {library}; install Atoll's extra 'flower'" in said[0].err
    assert list(tmp_path.iterdir()) == []


def test_the_command_writes_nothing_and_counts_the_runs_before(tmp_path, monkeypatch, capsys):
    pytest.importorskip("flwr", reason="the extra atoll[flower] is not installed")
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


@pytest.mark.parametrize("option", ["stack", "streams"])
def test_the_estimate_of_clients_that_train_at_once_says_what_it_is_of(option):
    (cost,) = estimate(tiny(*SETTINGS, f"engine.{option}=10"), warm=1, timed=1)
    said = "  at once 3 clients; time and memory above are those of one at a time"
    assert said in cost.lines()
    assert not any("at once" in line for line in replace(cost, at_once=1).lines())


def test_runs_that_are_needed_first_come_first():
    settings = ("method.name=fedca", "options.fedca_alignment.data={source='digits'}")
    costs = estimate(tiny(*SETTINGS, *settings), warm=1, timed=1)
    assert len(costs) == 2
    assert (costs[0].clients, costs[1].clients) == (1, 5)


def test_the_workers_are_those_of_the_run(monkeypatch):
    """Also where several share a GPU by default."""
    monkeypatch.setattr(cost_of, "worker_devices", lambda federation: [torch.device("cuda")] * 3)
    (cost,) = estimate(tiny(*SETTINGS, "engine.workers=auto"), warm=1, timed=1)
    assert cost.workers == ("cuda",) * 3
