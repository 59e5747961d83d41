"""Promise 4: updates are checked at the door."""

import json
import math
from dataclasses import replace

import pytest
import torch

from atoll.aggregation.fedavg import FedAvg
from atoll.aggregation.update_geometry import UpdateGeometry
from atoll.core.tree import clone, same
from atoll.engines.server import Result, TooFewUpdatesError
from atoll.engines.update_checks import UpdateChecks
from atoll.methods.euc import EUC
from atoll.methods.method import Method
from atoll.objectives.simclr import SimCLR
from tests.folds import model, setting
from tests.harness import run_tiny
from tests.rounds import Rounds

METHOD = Method(objective=SimCLR(), merge=EUC(), aggregation=FedAvg())
MODEL = model(0)


def update(**changes):
    """A good update, with changes laid over it."""
    weights = {n: t + 0.1 if t.is_floating_point() else t + 1 for n, t in MODEL.items()}
    return {"weights": weights, "samples": 10, "losses": {"loss": 1.0}, "parts": {}, **changes}


def with_weights(**changes):
    """The same, with tensors replaced."""
    good = update()
    return {**good, "weights": {**good["weights"], **changes}}


def spoiled(value):
    tensor = MODEL["conv.weight"].clone()
    tensor[2, 1, 1, 1] = value
    return with_weights(**{"conv.weight": tensor})


def without(name):
    good = update()
    return {**good, "weights": {n: t for n, t in good["weights"].items() if n != name}}


def checks(**train):
    return UpdateChecks(METHOD, setting(**train), frozenset(MODEL), frozenset())


def test_a_good_update_passes_and_is_measured():
    verdict = checks().examine(update(), {"global": MODEL})
    assert isinstance(verdict, UpdateGeometry)
    floats = [t for t in MODEL.values() if t.is_floating_point()]
    assert verdict.distance() == pytest.approx(0.1 * math.sqrt(sum(t.numel() for t in floats)), rel=1e-5)


@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        (None, "it is not an update"),
        ([], "it is not an update"),
        ({"weights": [], "parts": {}}, "it is not an update"),
        ({"weights": {}}, "it lacks its components' slices"),
        (without("conv.bias"), "it lacks 'conv.bias' (1 names missing)"),
        (with_weights(head=torch.zeros(2)), "it contains 'head', which was not requested (1 such names)"),
        (with_weights(**{"conv.bias": torch.zeros(4)}), "'conv.bias' has shape (4,), not (3,)"),
        (with_weights(**{"conv.bias": torch.zeros(1)}), "'conv.bias' has shape (1,), not (3,)"),
        (with_weights(**{"conv.bias": [0.0] * 3}), "'conv.bias' has shape (), not (3,)"),
        (
            with_weights(**{"conv.bias": torch.zeros(3).double()}),
            "'conv.bias' is torch.float64, not torch.float32",
        ),
        (
            with_weights(**{"conv.bias": torch.zeros(3).long()}),
            "'conv.bias' is torch.int64, not torch.float32",
        ),
        (
            with_weights(**{"bn.num_batches_tracked": torch.tensor(3.0)}),
            "'bn.num_batches_tracked' is torch.float32, not torch.int64",
        ),
        (spoiled(math.nan), "'conv.weight' contains values that are not finite, or that overflow"),
        (spoiled(math.inf), "'conv.weight' contains values that are not finite, or that overflow"),
        (spoiled(-math.inf), "'conv.weight' contains values that are not finite, or that overflow"),
        (spoiled(1e30), "'conv.weight' contains values that are not finite, or that overflow"),
        (
            with_weights(**{"conv.bias": MODEL["conv.bias"] + 5000}),
            "its distance from the model that it received is 8660, beyond the bound of 1000 (train.first_norm)",
        ),
        ({k: v for k, v in update().items() if k != "samples"}, "its 'samples' is None"),
        (update(samples="10"), "its 'samples' is '10'"),
        (update(samples=0), "its 'samples' is 0"),
        (update(samples=-3), "its 'samples' is -3"),
        (update(samples=True), "its 'samples' is True"),
        (update(samples=math.nan), "its 'samples' is nan"),
        (update(samples=math.inf), "its 'samples' is inf"),
        (update(samples=2.5), "its 'samples' is 2.5"),
        (update(samples=20_000_001), "its 'samples' is 20000001"),
        (update(samples=10**400), f"its 'samples' is 1{'0' * 17}...{'0' * 19}"),
        (update(losses={"loss": 10**400}), "its losses are not finite numbers"),
        (update(losses={"loss": -1e31}), "its losses are not finite numbers"),
        (update(losses={"loss": math.nan}), "its losses are not finite numbers"),
        (update(losses={"loss": "low"}), "its losses are not finite numbers"),
        (update(losses=[1.0]), "its losses are not finite numbers"),
        (
            update(parts={"dictionary": 1}),
            "it contains a slice of 'dictionary', which is not a component of this method",
        ),
        (
            update(parts={"simclr": {"deep": [torch.tensor([1.0, math.nan])]}}),
            "its slice of 'simclr' contains values that are not finite",
        ),
        (
            update(parts={"simclr": [torch.zeros(2).to(torch.float8_e4m3fn)]}),
            "its slice of 'simclr' contains torch.float8_e4m3fn, which is not supported",
        ),
        (
            update(parts={"simclr": torch.full((2,), math.nan, dtype=torch.complex64)}),
            "its slice of 'simclr' contains torch.complex64, which is not supported",
        ),
        (
            update(parts={"euc": {"conv.weight": [1.0, torch.ones(2)]}}),
            "entry 1 of 'conv.weight' in its slice of 'euc' is a tensor of shape (2,), not an int from 1 to 1e+30",
        ),
        (
            update(parts={"euc": {"conv.weight": [1.0, 7]}}),
            "its slice of 'euc' says that 'conv.weight' has 7 values; it has 24",
        ),
    ],
)
def test_bad_updates_are_refused_and_the_sentence_names_what_is_wrong(bad, sentence):
    guard = checks()
    assert guard.examine(bad, {"global": MODEL}) == sentence
    assert guard.distances == []


def test_every_single_value_is_looked_at():
    """A value that is not finite is found wherever it stands, in whichever tensor."""
    for name, tensor in MODEL.items():
        if not tensor.is_floating_point():
            continue
        for place in range(tensor.numel()):
            bad = tensor.clone()
            bad.view(-1)[place] = math.nan
            assert name in checks().examine(with_weights(**{name: bad}), {"global": MODEL})


def test_the_bound_is_ten_times_the_running_median_of_earlier_rounds():
    guard = checks(norm_factor=10.0, first_norm=3.0)

    def try_at(distance):
        step = torch.zeros(3)
        step[1] = distance
        moved = {**MODEL, "conv.bias": MODEL["conv.bias"] + step}
        verdict = guard.examine(update(weights=moved), {"global": MODEL})
        return not isinstance(verdict, str)

    assert guard.bound() == (3.0, "train.first_norm")
    assert [try_at(x) for x in (1.0, 2.0, 3.5)] == [True, True, False]
    assert guard.bound()[0] == 3.0  # nothing counts before its round is closed
    guard.close_round()
    assert guard.norms == pytest.approx([1.0, 2.0], rel=1e-5)
    assert guard.bound() == (pytest.approx(15.0, rel=1e-5), "train.norm_factor")
    assert [try_at(x) for x in (14.9, 15.1, 1000.0)] == [True, False, False]
    guard.close_round()
    assert guard.bound()[0] == pytest.approx(
        20.0, rel=1e-5
    )  # of 1, 2 and 14.9; what was refused does not count


def test_a_round_that_came_to_nothing_does_not_count():
    guard = checks()
    guard.examine(update(), {"global": MODEL})
    guard.open_round()
    guard.close_round()
    assert guard.norms == []


class Fixed:
    """An executor whose clients return what a test lays down."""

    def __init__(self, updates):
        self.updates = updates

    def run(self, jobs, progress):
        for job in jobs:
            made = self.updates[job.client]
            yield Result(job.client, lost=made) if isinstance(made, str) else Result(job.client, made)


@pytest.fixture(scope="module")
def trained():
    """A server after round 1, and good updates of round 2."""
    rounds = Rounds("method.name=l_dawa")
    for round in (1, 2):
        updates = {client: rounds.train(client, round)[0] for client in range(4)}
        if round == 1:
            record = rounds.server.run_round(Fixed(updates))
            assert record.clients == 4
    return rounds.server.checkpoint(), updates


def server_of(trained):
    server = Rounds("method.name=l_dawa").server
    server.restore(clone(trained[0]))
    return server


def scaled(update, factor):
    floats = {n: t * factor if t.is_floating_point() else t for n, t in update["weights"].items()}
    return {**update, "weights": floats}


def test_a_refused_update_is_named_and_the_round_goes_on(trained):
    """A thousand times too large: it is as if the client had not been there."""
    _, good = trained
    with_it, without_it = server_of(trained), server_of(trained)
    record = with_it.run_round(Fixed({**good, 2: scaled(good[2], 1000.0)}))
    assert list(record.refused) == ["2"]
    assert "beyond the bound of" in record.refused["2"]
    assert record.clients == 3
    assert json.loads(json.dumps(record.to_dict()))["refused"] == record.refused
    gone = without_it.run_round(Fixed({**good, 2: "its machine is off"}))
    assert gone.lost == {"2": "its machine is off"}
    assert same(with_it.checkpoint()["state"], without_it.checkpoint()["state"])
    assert with_it.valid == {0: 2, 1: 2, 2: 1, 3: 2}
    assert len(with_it.checks.norms) == 7


def test_too_few_accepted_updates_are_an_error_and_change_nothing(trained):
    _, good = trained
    server = server_of(trained)
    before = clone(server.checkpoint())
    bad = {**good, 0: scaled(good[0], math.nan), 1: "its machine is off", 3: {**good[3], "weights": {}}}
    with pytest.raises(TooFewUpdatesError) as error:
        server.run_round(Fixed(bad))
    sentence = str(error.value)
    assert sentence.startswith(
        "round 2 failed: 1 of 4 updates were usable and train.min_accepted requires 50%; "
    )
    assert "client 0: 'encoder." in sentence
    assert "client 1: its machine is off" in sentence
    assert sentence.endswith(
        "; lower train.lr if training diverges, or raise a bound that is too tight, or resume when the lost "
        "clients are back, or lower train.min_accepted to continue with fewer"
    )
    assert "\n" not in sentence
    assert same(server.checkpoint(), before)
    # The same server plays the round again, as if nothing had been.
    fresh = server_of(trained)
    fresh.run_round(Fixed(good))
    server.run_round(Fixed(good))
    assert same(server.checkpoint(), fresh.checkpoint())


def test_half_is_not_too_few(trained):
    _, good = trained
    server = server_of(trained)
    assert server.run_round(Fixed({**good, 0: "off", 1: "off"})).clients == 2
    server = server_of(trained)
    server.recipe = replace(server.recipe, train=replace(server.recipe.train, min_accepted=0.75))
    with pytest.raises(TooFewUpdatesError, match="requires 75%"):
        server.run_round(Fixed({**good, 0: "off", 1: "off"}))


def test_what_a_client_calls_its_measure_is_not_used(trained):
    _, good = trained
    honest, lying = server_of(trained), server_of(trained)
    honest.run_round(Fixed(good))
    lying.run_round(Fixed({**good, 0: {**good[0], "measure": "mine"}}))
    assert same(honest.checkpoint(), lying.checkpoint())


def test_the_mean_angular_divergence_is_in_the_metrics(tmp_path):
    """μ_δ, for every method; that of a run whose clients do not train is 1."""
    lines = run_tiny(tmp_path / "a", "method.name=fed_simclr").metrics()[1:]
    assert all(0.5 < line["angular_divergence"] < 1 for line in lines)
    still = run_tiny(tmp_path / "b", "method.name=fed_simclr", "train.epochs=0").metrics()[1:]
    assert all(line["angular_divergence"] == 1 for line in still)


def test_running_statistics_must_be_finite_but_do_not_count_in_the_distance():
    (name,) = [n for n in MODEL if n.endswith("running_var")][:1]
    strict = checks(first_norm=50.0)
    lenient = UpdateChecks(METHOD, setting(first_norm=50.0), frozenset(MODEL), frozenset({name}))
    far = with_weights(**{name: MODEL[name] + 1000})
    assert "beyond the bound" in strict.examine(far, {"global": MODEL})
    assert isinstance(lenient.examine(far, {"global": MODEL}), UpdateGeometry)
    broken = with_weights(**{name: MODEL[name] * math.nan})
    assert "not finite" in lenient.examine(broken, {"global": MODEL})


def test_a_whole_run_tells_the_door_which_names_are_running_statistics(tmp_path):
    from atoll.engines.federation import Federation
    from tests.harness import tiny

    names = Federation(tiny()).buffer_names()
    assert "encoder.bn1.running_var" in names
    assert "encoder.bn1.weight" not in names
    run = run_tiny(tmp_path / "run", "train.first_norm=30", "train.lr=0.001")
    assert not any("refused" in line for line in run.metrics())
