"""Promise 4: updates are checked at the door."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

from atoll.aggregation.fedavg import FedAvg
from atoll.aggregation.private import PrivateFedAvg
from atoll.aggregation.secure_sum import SecureSum
from atoll.aggregation.update_geometry import UpdateGeometry
from atoll.components.base import Term
from atoll.components.declaration import TensorSpec
from atoll.engines.update_checks import UpdateChecks
from atoll.methods.method import Method
from tests.folds import setting
from tests.updates import (
    A_LOSS,
    COUNTER,
    DIVERGED,
    LOSSES,
    METHOD,
    MODEL,
    STATISTICS,
    asked,
    checks,
    healthy,
    known,
    spoiled,
    update,
    with_weights,
    without,
)


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
        (
            update(losses=dict.fromkeys(LOSSES, math.nan)),
            f"its loss 'simclr' is nan: {DIVERGED}",
        ),  # the cause
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


def test_running_statistics_must_be_finite_but_do_not_count_in_the_distance():
    (name,) = [n for n in MODEL if n.endswith("running_var")][:1]
    strict = checks(first_norm=50.0)
    of_one = replace(setting(first_norm=50.0), running_statistics=frozenset({name}))
    lenient = UpdateChecks(METHOD, of_one, frozenset(MODEL))
    far = with_weights(**{name: MODEL[name] + 1000})
    assert "beyond the bound" in strict.examine(far, {"global": MODEL})
    assert isinstance(lenient.examine(far, {"global": MODEL}), UpdateGeometry)
    broken = with_weights(**{name: MODEL[name] * math.nan})
    assert "not finite" in lenient.examine(broken, {"global": MODEL})


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
        ({"bn.num_batches_tracked": COUNTER + 6 * 8000 + 1}, "counts 48011 batches"),
    ],
)
def test_impossible_statistics_are_refused(bad, sentence):
    verdict = known().examine(healthy(**bad), {"global": MODEL}, asked())
    assert isinstance(verdict, str)
    assert sentence in verdict


def test_a_counter_may_grow_by_the_batches_of_the_requested_steps():
    """Ten images in fours, two epochs: six steps of at most 8 × 1,000 calls each; without an epoch, none."""
    guard = known()
    most = healthy(**{"bn.num_batches_tracked": COUNTER + 6 * 8000})
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
    """Six steps, each of so many parts, each of at most 8,000 batches."""
    guard = known(accumulate=parts)
    for grown, fits in ((6 * 8000 * parts, True), (6 * 8000 * parts + 1, False)):
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
    if "loss" in aggregation.statistics:
        assert guard.weighed({"loss": 0.0}) == {"loss": 0.0}


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


@dataclass(frozen=True)
class Embeddings(Term):
    """A term that sends numbers on the scale of embeddings, or on that of weights."""

    name: ClassVar[str] = "embeddings"
    follows: bool = True

    def declares(self, setting):
        return TensorSpec((2,), follows_embeddings=self.follows)


@pytest.mark.parametrize(
    ("follows", "norms", "bound"),
    [
        (False, [], 3.0),
        (False, [0.1, 0.1, 9.0], 1.0),
        (True, [], 1e6),
        (True, [0.1, 0.1, 9.0], 1e6),
        (True, [5e5, 5e5, 9.0], 5e6),
    ],
)
def test_a_slice_on_the_scale_of_embeddings_may_grow_by_orders_of_magnitude(follows, norms, bound):
    """Its bound is 10⁶ or follows from earlier rounds, whichever is larger."""
    method = Method(objective=METHOD.objective, terms=(Embeddings(follows=follows),), aggregation=FedAvg())
    guard = UpdateChecks(method, setting(norm_factor=10.0, first_norm=3.0), frozenset(MODEL))
    for norm in norms:
        guard.history.add({"slice of embeddings": norm})
    guard.close_round()

    def of(norm):
        losses = {"loss": 1.0, "simclr": 1.0, "embeddings": 1.0}
        parts = {"embeddings": torch.tensor([0.6, 0.8]) * norm}
        return guard.examine(update(weights=MODEL, losses=losses, parts=parts), {"global": MODEL})

    assert isinstance(of(bound * 0.999), UpdateGeometry)
    assert f"beyond the bound of {bound:.4g}" in of(bound * 1.001)


@dataclass(frozen=True)
class Undeclared(Term):
    """A term that declares nothing of what it sends."""

    name: ClassVar[str] = "undeclared"

    def finish(self, context):
        return {"anything": 1}


@pytest.mark.parametrize(
    ("sent", "fault"),
    [
        ({"a": [torch.ones(2), torch.tensor([0.0, math.inf])]}, "values that are not finite"),
        (torch.tensor([1.0, math.nan]), "values that are not finite"),
        ([torch.zeros(2).to(torch.float8_e4m3fn)], "torch.float8_e4m3fn, which is not supported"),
        (torch.zeros(2, dtype=torch.complex64), "torch.complex64, which is not supported"),
        ([torch.ones(2), torch.tensor([3])], None),
    ],
)
def test_tensors_of_a_slice_without_a_declaration_are_finite_and_of_a_known_type(sent, fault):
    method = Method(objective=METHOD.objective, terms=(Undeclared(),), aggregation=FedAvg())
    losses = {**LOSSES, "undeclared": 1.0}
    verdict = UpdateChecks(method, setting(), frozenset(MODEL)).examine(
        update(losses=losses, parts={"undeclared": sent}), {"global": MODEL}
    )
    if fault is None:
        assert isinstance(verdict, UpdateGeometry)
    else:
        assert verdict == f"its slice of 'undeclared' contains {fault}"


def test_a_variance_may_be_0():
    """As of a channel that is constant."""
    still = healthy(**{"bn.running_var": torch.zeros(3)})
    assert isinstance(known().examine(still, {"global": MODEL}, asked()), UpdateGeometry)


@pytest.mark.parametrize(("counted", "fits"), [(9, True), (0, True), (-1, False)])
def test_a_merge_may_retain_a_counter_below_that_of_the_model(counted, fits):
    where = replace(setting(), running_statistics=STATISTICS)
    update = healthy(**{"bn.num_batches_tracked": torch.tensor(counted)})
    verdict = UpdateChecks(METHOD, where, frozenset(MODEL)).examine(update, {"global": MODEL})
    assert isinstance(verdict, UpdateGeometry) == fits
    assert fits or f"counts {counted} batches" in verdict


@pytest.mark.parametrize("name", ["loss", "simclr"])
def test_a_loss_at_its_least_value_may_be_below_it_by_rounding(name):
    def of(value):
        return checks().examine(update(losses={**LOSSES, name: value}), {"global": MODEL})

    assert isinstance(of(-9e-4), UpdateGeometry)
    assert of(-1.1e-3) == f"its loss {name!r} is -0.0011, and it cannot be below 0"


def test_long_and_strange_names_are_shortened_in_the_sentence():
    for name in ("x" * 1_000_000, "<script>alert(1)</script>", "a\nb\x1b[2J"):
        for bad in (update(**{name: 1}), with_weights(**{name: 1}), update(parts={name: 1})):
            verdict = checks().examine(bad, {"global": MODEL})
            assert len(verdict) < 150
            assert verdict.isprintable()
