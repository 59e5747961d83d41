"""Promise 4: updates are checked at the door."""

import json
import math
from dataclasses import replace

import pytest
import torch

from atoll.aggregation.fedavg import FedAvg
from atoll.aggregation.private import PrivateFedAvg
from atoll.aggregation.secure_sum import SecureSum
from atoll.aggregation.update_geometry import UpdateGeometry
from atoll.core.tree import clone, same
from atoll.engines.server import TooFewUpdatesError
from atoll.engines.update_checks import UpdateChecks
from atoll.methods.euc import EUC
from atoll.methods.method import Method
from atoll.objectives.simclr import SimCLR
from tests.folds import model, setting
from tests.harness import run_tiny
from tests.rounds import Fixed, Rounds

METHOD = Method(objective=SimCLR(), merge=EUC(), aggregation=FedAvg())
MODEL = model(0)
A_LOSS = "not a float from -1e+06 to 1e+06 (of the first round)"
DIVERGED = "training diverged; lower train.lr"
LOSSES = {"loss": 1.0, "simclr": 1.0}


def update(**changes):
    """A good update, with changes laid over it."""
    weights = {n: t + 0.1 if t.is_floating_point() else t + 1 for n, t in MODEL.items()}
    return {"weights": weights, "samples": 10, "losses": LOSSES, "parts": {}, **changes}


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
        (
            with_weights(**{"conv.bias": [0.0] * 3}),
            "'conv.bias' is [0.0, 0.0, 0.0], not a tensor of shape (3,)",
        ),
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
        (
            {k: v for k, v in update().items() if k != "samples"},
            "its 'samples' is None, not an int from 1 to 20000000",
        ),
        (update(samples="10"), "its 'samples' is '10', not an int from 1 to 20000000"),
        (update(samples=0), "its 'samples' is 0, not an int from 1 to 20000000"),
        (update(samples=-3), "its 'samples' is -3, not an int from 1 to 20000000"),
        (update(samples=True), "its 'samples' is True, not an int from 1 to 20000000"),
        (update(samples=math.nan), "its 'samples' is nan, not an int from 1 to 20000000"),
        (update(samples=math.inf), "its 'samples' is inf, not an int from 1 to 20000000"),
        (update(samples=2.5), "its 'samples' is 2.5, not an int from 1 to 20000000"),
        (update(samples=20_000_001), "its 'samples' is 20000001, not an int from 1 to 20000000"),
        (
            update(samples=10**400),
            f"its 'samples' is 1{'0' * 17}...{'0' * 19}, not an int from 1 to 20000000",
        ),
        (
            update(losses={**LOSSES, "loss": 10**400}),
            f"its loss 'loss' is 1{'0' * 17}...{'0' * 19}, {A_LOSS}",
        ),
        (update(losses={**LOSSES, "loss": -1e31}), f"its loss 'loss' is -1e+31, {A_LOSS}"),
        (update(losses={**LOSSES, "loss": math.nan}), f"its loss 'loss' is nan: {DIVERGED}"),
        (update(losses={**LOSSES, "simclr": -math.inf}), f"its loss 'simclr' is -inf: {DIVERGED}"),
        (update(losses={**LOSSES, "simclr": -99.0}), "its loss 'simclr' is -99, and it cannot be below 0"),
        (update(losses={**LOSSES, "loss": "low"}), f"its loss 'loss' is 'low', {A_LOSS}"),
        (update(losses=[1.0]), "its losses are not a table of numbers"),
        (
            update(parts={"dictionary": 1}),
            "it contains a slice of 'dictionary', which is not a component of this method",
        ),
        (
            update(parts={"simclr": {"deep": [torch.tensor([1.0, math.nan])]}}),
            "it holds a slice of 'simclr', which sends none",
        ),
        (
            update(parts={"simclr": [torch.zeros(2).to(torch.float8_e4m3fn)]}),
            "it holds a slice of 'simclr', which sends none",
        ),
        (
            update(parts={"simclr": torch.full((2,), math.nan, dtype=torch.complex64)}),
            "it holds a slice of 'simclr', which sends none",
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
    assert guard.history.new == {}


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
    assert guard.history.earlier["weights"] == pytest.approx([1.0, 2.0], rel=1e-5)
    assert guard.bound() == (pytest.approx(15.0, rel=1e-5), "train.norm_factor")
    assert [try_at(x) for x in (14.9, 15.1, 1000.0)] == [True, False, False]
    guard.close_round()
    assert guard.bound()[0] == pytest.approx(
        20.0, rel=1e-5
    )  # of 1, 2 and 14.9; what was refused does not count


def test_clients_without_a_gradient_do_not_make_an_ordinary_step_suspicious():
    """Weight decay alone moves a client whose loss is 0; a tenth of the weights' norm is ordinary training."""
    guard = checks(norm_factor=10.0)
    norm = math.sqrt(sum(float(t.double().square().sum()) for t in MODEL.values() if t.is_floating_point()))
    for distance in (1e-5, 1e-5, 0.5):
        guard.history.add({"weights": distance})
    guard.close_round()

    def at(distance):
        step = torch.zeros(3)
        step[1] = distance
        return guard.examine(
            update(weights={**MODEL, "conv.bias": MODEL["conv.bias"] + step}), {"global": MODEL}
        )

    assert isinstance(at(0.0999 * norm), UpdateGeometry)
    assert "beyond the bound of " + f"{0.1 * norm:.4g}" in at(0.1001 * norm)


def test_a_round_that_came_to_nothing_does_not_count():
    guard = checks()
    guard.examine(update(), {"global": MODEL})
    guard.open_round()
    guard.close_round()
    assert guard.history.earlier == {}


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
    assert len(with_it.checkpoint()["norms"]) == 7


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


def test_a_round_with_too_few_updates_for_its_aggregation_says_why_they_are_too_few():
    """Krum with f = 1 needs five; it must not answer for a client that was refused or lost."""
    rounds = Rounds("method.aggregation=multi_krum", "partition.clients=5")
    server, updates = rounds.server, {client: rounds.train(client)[0] for client in range(5)}
    with pytest.raises(TooFewUpdatesError) as error:
        server.run_round(Fixed({**updates, 2: scaled(updates[2], math.nan), 3: updates[3]}))
    sentence = str(error.value)
    assert sentence.startswith(
        "round 1 failed: 4 of 5 updates were usable and 'multi_krum' requires 5; client 2: 'encoder."
    )
    assert sentence.endswith("or change options.multi_krum to continue with fewer")
    assert server.run_round(Fixed(updates)).clients == 5


def test_an_unknown_key_is_refused(trained):
    _, good = trained
    server = server_of(trained)
    record = server.run_round(Fixed({**good, 0: {**good[0], "measure": "mine"}}))
    assert record.refused == {"0": "it contains 'measure', which was not declared (1 such keys)"}


def test_the_mean_angular_divergence_is_in_the_metrics(tmp_path):
    """μ_δ, for every method; that of a run whose clients do not train is 1."""
    lines = run_tiny(tmp_path / "a", "method.name=fed_simclr").metrics[1:]
    assert all(0.5 < line["angular_divergence"] < 1 for line in lines)
    still = run_tiny(tmp_path / "b", "method.name=fed_simclr", "train.epochs=0").metrics[1:]
    assert all(line["angular_divergence"] == 1 for line in still)


def test_the_angular_divergence_is_the_mean_over_the_accepted_clients():
    """The cosine of all weights as one vector, for each client; those refused or lost do not count."""
    rounds = Rounds("method.name=fed_simclr")
    sent = clone(rounds.server.state["models"]["global"])
    good = {client: rounds.train(client)[0] for client in range(4)}
    away = {name: -w if name.endswith("weight") else w for name, w in good[0]["weights"].items()}
    good[0] = {**good[0], "weights": away}  # so that the mean is not the median
    bad = {**good, 1: "its machine is off", 2: scaled(good[2], math.nan)}

    def cosine(weights):
        floats = [name for name, weight in sent.items() if weight.is_floating_point()]
        w, g = (torch.cat([model[name].flatten() for name in floats]).tolist() for model in (weights, sent))
        inner = math.fsum(a * b for a, b in zip(w, g, strict=True))
        return inner / math.sqrt(math.fsum(a * a for a in w) * math.fsum(b * b for b in g))

    for updates, count in ((good, (0, 1, 2, 3)), (bad, (0, 3))):
        record = Rounds("method.name=fed_simclr").server.run_round(Fixed(updates))
        assert record.clients == len(count)
        cosines = [cosine(good[client]["weights"]) for client in count]
        assert record.angular_divergence == pytest.approx(sum(cosines) / len(cosines), rel=1e-5)


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
    assert not any("refused" in line for line in run.metrics)


def asked(client=0, epochs=2):
    """What a client was asked; of four clients with 10, 11, 12 and 25 images in batches of 4."""
    return {"client": client, "epochs": epochs, "round": 1, "kept": 0, "models": {}, "parts": {}}


STATISTICS = frozenset({"bn.running_mean", "bn.running_var", "bn.num_batches_tracked"})
COUNTER = MODEL["bn.num_batches_tracked"]


def known(aggregation=METHOD.aggregation, objective=METHOD.objective, **train):
    """Checks at a server that knows the clients' sizes."""
    known = replace(setting(batch_size=4, **train), sizes=(10, 11, 12, 25))
    method = Method(objective=objective, aggregation=aggregation)
    return UpdateChecks(method, known, frozenset(MODEL), STATISTICS)


def healthy(**changes):
    """A good update with statistics that can be: variances above 0."""
    return with_weights(**{"bn.running_var": torch.ones(3), "bn.num_batches_tracked": COUNTER + 3, **changes})


@pytest.mark.parametrize(("client", "samples", "batches"), [(0, 10, 3), (1, 11, 3), (2, 12, 3), (3, 25, 6)])
def test_a_client_weighs_as_many_images_as_the_server_counted(client, samples, batches):
    """The batches by hand: 25 images in fours are six, and a last image alone is no batch."""
    for by, truth in (("samples", samples), ("batches", batches)):
        guard = known(FedAvg(weights=by))
        good = {name: value for name, value in healthy().items() if name != "samples"}
        assert isinstance(
            guard.examine({**good, by: truth}, {"global": MODEL}, asked(client)), UpdateGeometry
        )
        for claimed in (truth - 1, truth + 1, 20_000_000):
            verdict = guard.examine({**good, by: claimed}, {"global": MODEL}, asked(client))
            assert verdict == f"its {by!r} is {claimed}, not {truth}"


@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        (
            {"bn.running_var": torch.tensor([1.0, -1e-3, 1.0])},
            "'bn.running_var' contains a negative variance",
        ),
        ({"bn.running_var": torch.full((3,), -1e6)}, "'bn.running_var' contains a negative variance"),
        (
            {"bn.running_mean": torch.full((3,), 1e18)},
            "the distance of its running statistics from those that it received is 1.732e+18, beyond the bound of "
            "1e+06 (of the first round)",
        ),
        ({"bn.num_batches_tracked": torch.tensor(-5)}, "'bn.num_batches_tracked' counts -5 batches"),
        ({"bn.num_batches_tracked": COUNTER - 1}, "'bn.num_batches_tracked' counts 9 batches"),
        ({"bn.num_batches_tracked": torch.tensor(2**63 - 1)}, "counts 9223372036854775807 batches"),
        ({"bn.num_batches_tracked": COUNTER + 6 * 8 + 1}, "counts 59 batches"),
    ],
)
def test_impossible_statistics_are_refused(bad, sentence):
    verdict = known().examine(healthy(**bad), {"global": MODEL}, asked())
    assert isinstance(verdict, str)
    assert sentence in verdict


def test_a_counter_may_grow_by_the_batches_of_the_requested_steps():
    """Ten images in fours, two epochs: six steps, each with at most eight batches; without an epoch, none."""
    guard = known()
    most = healthy(**{"bn.num_batches_tracked": COUNTER + 6 * 8})
    assert isinstance(guard.examine(most, {"global": MODEL}, asked()), UpdateGeometry)
    still = {**healthy(**{"bn.num_batches_tracked": COUNTER}), "losses": {}}
    assert isinstance(guard.examine(still, {"global": MODEL}, asked(epochs=0)), UpdateGeometry)
    assert "counts 11 batches" in guard.examine(
        {**still, "weights": {**still["weights"], "bn.num_batches_tracked": COUNTER + 1}},
        {"global": MODEL},
        asked(epochs=0),
    )


@pytest.mark.parametrize("parts", [2, 5])
def test_a_counter_may_grow_by_the_batches_of_accumulated_parts(parts):
    """Six steps, each of so many parts, each of at most eight batches."""
    guard = known(accumulate=parts)
    for grown, fits in ((6 * 8 * parts, True), (6 * 8 * parts + 1, False)):
        update = healthy(**{"bn.num_batches_tracked": COUNTER + grown})
        verdict = guard.examine(update, {"global": MODEL}, asked())
        assert isinstance(verdict, UpdateGeometry) == fits
        assert fits or f"counts {int(COUNTER) + grown} batches" in verdict


@pytest.mark.parametrize("aggregation", [PrivateFedAvg(), SecureSum(weights="loss")])
def test_other_clients_do_not_decide_over_updates_that_are_clipped(aggregation):
    """The bounds stay those of the first round, however small the updates of earlier rounds were."""
    guard = known(aggregation, first_norm=3.0)

    def of(distance, loss=1.0, weighs=5.0):
        bias = MODEL["conv.bias"] + torch.tensor([distance, 0.0, 0.0])
        weights = {**healthy()["weights"], "conv.weight": MODEL["conv.weight"], "conv.bias": bias}
        update = {"weights": weights, "losses": {"loss": loss, "simclr": loss}, "parts": {}}
        if "loss" in aggregation.statistics:
            update["loss"] = weighs
        return guard.examine(update, {"global": MODEL}, asked())

    for _ in range(2):
        assert isinstance(of(0.01), UpdateGeometry)
        guard.close_round()
    assert guard.bound() == (3.0, "train.first_norm")
    assert isinstance(of(2.9), UpdateGeometry)
    assert "beyond the bound of 3 (train.first_norm)" in of(3.1)
    assert isinstance(of(0.01, loss=9e5), UpdateGeometry)  # a hundred at most, if earlier losses counted
    assert isinstance(of(0.01, weighs=0.0), UpdateGeometry)  # exp(5) times the largest weight so far


def test_running_statistics_are_bounded_by_earlier_ones():
    """At most 10 × the larger of the usual distance and the norm of those that were received."""
    guard = known()
    received = math.sqrt(
        float(MODEL["bn.running_mean"].square().sum() + MODEL["bn.running_var"].square().sum())
    )

    def moved_by(distance):
        step = torch.tensor([distance, 0.0, 0.0])
        mean = {
            "bn.running_mean": MODEL["bn.running_mean"] + step,
            "bn.running_var": MODEL["bn.running_var"].abs(),
        }
        return guard.examine(healthy(**mean), {"global": MODEL}, asked())

    rest = float((MODEL["bn.running_var"].abs() - MODEL["bn.running_var"]).norm())
    assert isinstance(moved_by(50.0), UpdateGeometry)
    guard.close_round()
    usual = math.hypot(50.0, rest)
    assert usual > received
    assert isinstance(moved_by(math.sqrt((10 * usual) ** 2 - rest**2) * 0.999), UpdateGeometry)
    assert "beyond the bound" in moved_by(math.sqrt((10 * usual) ** 2 - rest**2) * 1.001)
    guard = known()
    assert isinstance(moved_by(received / 100), UpdateGeometry)
    guard.close_round()
    assert isinstance(moved_by(5 * received), UpdateGeometry)


def test_a_clients_control_variate_is_bounded_like_its_weights(trained):
    rounds = Rounds("method.name=scaffold")
    updates = {client: rounds.train(client)[0] for client in range(4)}
    assert rounds.server.run_round(Fixed(updates)).clients == 4
    again = {client: rounds.train(client, 2)[0] for client in range(4)}
    slices = {name: 1e4 * value for name, value in again[1]["parts"]["scaffold"].items()}
    record = rounds.server.run_round(Fixed({**again, 1: {**again[1], "parts": {"scaffold": slices}}}))
    assert list(record.refused) == ["1"]
    assert record.refused["1"].startswith("the norm of its slice of 'scaffold' is")


def test_long_and_strange_names_are_shortened_in_the_sentence():
    for name in ("x" * 1_000_000, "<script>alert(1)</script>", "a\nb\x1b[2J"):
        for bad in (update(**{name: 1}), with_weights(**{name: 1}), update(parts={name: 1})):
            verdict = checks().examine(bad, {"global": MODEL})
            assert len(verdict) < 150
            assert verdict.isprintable()


def test_a_reason_in_the_metrics_is_one_clean_line(trained, monkeypatch):
    _, good = trained
    server = server_of(trained)
    monkeypatch.setattr(server.checks, "examine", lambda *_: "bad\n\x1b[2J" + "x" * 10**6)
    with pytest.raises(TooFewUpdatesError) as error:
        server.run_round(Fixed(good))
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 5000
