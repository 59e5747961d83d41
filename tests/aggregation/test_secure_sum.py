"""Sums of whole numbers against the folds of single updates, and against Flower's quantisation."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from atoll.aggregation.fedavg import FedAvg
from atoll.aggregation.loss_weighted import LossWeighted
from atoll.aggregation.secure_sum import MODULUS, SecureSum, summed, vector_size
from atoll.aggregation.update_geometry import Reference
from atoll.core.errors import RunError, UserError
from atoll.engines.federation import Federation
from atoll.methods.ldawa import LDAWA, MDAWA
from tests.folds import copies, fold, setting
from tests.harness import tiny

BASE = {"a": torch.randn(40, 30, generator=torch.Generator().manual_seed(0)), "b": torch.linspace(-1, 1, 17)}


def near(seed, size=0.05):
    draws = torch.Generator().manual_seed(seed)
    return {name: weight + size * torch.randn(weight.shape, generator=draws) for name, weight in BASE.items()}


def known(clients, **train):
    """A setting with the sizes of the clients."""
    return replace(setting(clients, **train), sizes=tuple(range(10, 10 + clients)))


def summed_fold(options, updates, of):
    opened = options.open({"global": BASE}, of, 1, None)
    for client, update in enumerate(updates):
        opened.add(client, update, Reference(BASE).measure(update["weights"]))
    return opened.close()["global"]


def updates(count, **numbers):
    return [
        {
            "weights": near(k),
            "losses": {"loss": 2.0 + k},
            "parts": {},
            **{name: values[k] for name, values in numbers.items()},
        }
        for k in range(count)
    ]


CASES = {
    "fedavg": (SecureSum(), FedAvg(), {"samples": [10, 11, 12, 13]}),
    "batches": (SecureSum(weights="batches"), FedAvg(weights="batches"), {"batches": [1, 1, 1, 1]}),
    "uniform": (SecureSum(weights="uniform"), FedAvg(weights="uniform"), {}),
    "loss": (SecureSum(weights="loss", least_loss=1.0), LossWeighted(), {"loss": [2.0, 3.0, 4.0, 5.0]}),
    "l_dawa": (SecureSum(weights="uniform", divergence="layers"), LDAWA(), {}),
    "m_dawa": (SecureSum(weights="uniform", divergence="model"), MDAWA(), {}),
    "l_dawa_loss": (
        SecureSum(weights="loss", divergence="layers", least_loss=1.0),
        LDAWA(weights="loss"),
        {"loss": [2.0, 3.0, 4.0, 5.0]},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_sum_gives_the_model_of_the_fold_of_single_updates(case):
    options, plain, numbers = CASES[case]
    mine = summed_fold(options, updates(4, **numbers), known(4))
    theirs = fold(plain, BASE, copies([near(k) for k in range(4)]), **numbers)
    for name in BASE:
        torch.testing.assert_close(mine[name], theirs[name], rtol=0, atol=2e-6)


def test_terms_are_whole_numbers_whose_sum_stays_below_the_modulus():
    options, of = SecureSum(weights="uniform", clip=1e6), known(7)
    extreme = {name: weight + 5.0 for name, weight in BASE.items()}  # beyond the largest change
    update = {"weights": extreme, "losses": {"loss": 1e9}, "parts": {}}
    term = options.encode(update, Reference(BASE).measure(extreme), BASE, of, 1)
    assert term.shape == (1217 + 3,) == (vector_size(BASE, of),)
    assert int(term.min()) >= 0
    assert 7 * int(term.max()) < MODULUS
    moved, loss = options.decode(7 * term, 7, BASE, of)
    for name, weight in BASE.items():
        torch.testing.assert_close(moved["global"][name], weight + 1.0, rtol=0, atol=1e-6)
    assert loss == pytest.approx(1000.0)


def test_the_mean_loss_is_of_all_clients_or_there_is_none():
    options, of = SecureSum(weights="uniform"), known(3)

    def total(losses):
        updates = [{"weights": near(1), "losses": each, "parts": {}} for each in losses]
        terms = [options.encode(one, Reference(BASE).measure(one["weights"]), BASE, of, 1) for one in updates]
        return options.decode(sum(terms), len(terms), BASE, of)[1]

    assert total([{"loss": 1.0}, {"loss": 2.0}, {"loss": 6.0}]) == pytest.approx(3.0, abs=1e-4)
    assert total([{"loss": 1.0}, {}, {"loss": 6.0}]) is None  # half of it was shown as the mean


def test_a_step_is_clipped_to_its_norm():
    options = SecureSum(weights="uniform", clip=0.5)
    moved = summed_fold(options, [{"weights": near(1, 1.0), "losses": {}, "parts": {}}], known(1))
    step = torch.cat([(moved[name] - BASE[name]).flatten() for name in BASE])
    assert float(step.norm()) == pytest.approx(0.5, rel=1e-4)


def test_each_change_is_clipped_before_it_is_weighted():
    """Clients of 100 and of 10 images change one weight each, by five times the most that is allowed."""
    base = {"w": torch.zeros(3)}
    of = replace(setting(2), sizes=(100, 10))
    opened = SecureSum(clip=100.0, largest_change=1.0).open({"global": base}, of, 1, None)
    for client, (samples, step) in enumerate(((100, [5.0, 0, 0.2]), (10, [0, -5.0, 0.2]))):
        weights = {"w": torch.tensor(step)}
        update = {"weights": weights, "losses": {}, "parts": {}, "samples": samples}
        opened.add(client, update, Reference(base).measure(weights))
    expected = torch.tensor([100 / 110, -10 / 110, 0.2])
    torch.testing.assert_close(opened.close()["global"]["w"], expected, rtol=0, atol=1e-6)


def test_levels_are_those_of_flowers_quantisation_within_its_rounding():
    quantization = pytest.importorskip("flwr.common.secure_aggregation.quantization")
    options, of = SecureSum(weights="uniform", clip=1e6, largest_change=0.25), known(4)
    update = {"weights": near(3), "losses": {"loss": 3.0}, "parts": {}}
    term = options.encode(update, Reference(BASE).measure(update["weights"]), BASE, of, 1).numpy()
    step = np.concatenate(
        [(near(3)[name].double() - BASE[name].double()).flatten().numpy() for name in sorted(BASE)]
    )
    levels = (MODULUS - 1) // 4
    (theirs,) = quantization.quantize([step], 0.25, levels)
    assert np.abs(term[:-3] - theirs).max() <= 1


def test_a_sum_that_clipped_terms_cannot_give_is_refused():
    options, of = SecureSum(weights="uniform", clip=0.5), known(4)
    update = {"weights": near(1), "losses": {}, "parts": {}}
    term = options.encode(update, Reference(BASE).measure(update["weights"]), BASE, of, 1)
    options.decode(4 * term, 4, BASE, of)
    hostile = term.clone()
    hostile[:1217] = 0  # every weight changed by the most, which is far beyond the norm
    with pytest.raises(RunError, match=r"the sum of 4 updates has the norm .* clipped to 0\.5 cannot give"):
        options.decode(3 * term + hostile, 4, BASE, of)
    with pytest.raises(RunError, match="and the weight"):
        options.decode((term * 0 + 17) % MODULUS, 4, BASE, of)


def decoded(norm, weight, clients=4, clip=0.5):
    """The models of a sum whose step has this norm, and whose clients have this weight together."""
    options, of = SecureSum(weights="uniform", clip=clip), known(clients)
    step = torch.linspace(-1, 2, 1217, dtype=torch.float64)
    values = torch.cat([norm * step / step.norm(), torch.tensor([weight, 0.0, 0.0]).double()])
    total = torch.round((values + clients) / 2 * ((MODULUS - 1) // clients)).long()
    return options.decode(total, clients, BASE, of)[0]["global"]


@pytest.mark.parametrize(("norm", "weight"), [(2.0018, 4.0), (1.0, 4.0038), (2.0018, 0.001)])
def test_a_sum_just_inside_its_bounds_is_decoded(norm, weight):
    """Four terms of norm at most 0.5 and weight at most 1, and a thousandth for the rounding."""
    moved = decoded(norm, weight)
    step = torch.cat([(moved[name].double() - BASE[name].double()).flatten() for name in sorted(BASE)])
    assert float(step.norm()) == pytest.approx(norm / weight, rel=1e-4)


@pytest.mark.parametrize(("norm", "weight"), [(2.0022, 4.0), (1.0, 4.0042), (1.0, -0.001)])
def test_a_sum_just_beyond_its_bounds_is_refused(norm, weight):
    with pytest.raises(RunError, match=r"which updates clipped to 0\.5 cannot give"):
        decoded(norm, weight)


@pytest.mark.parametrize("spoiled", ["weights", "losses", "loss"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_term_that_is_not_finite_is_not_made(spoiled, value):
    options, of = SecureSum(weights="loss"), known(1)
    update = {"weights": near(1), "losses": {"loss": 1.0}, "parts": {}, "loss": 1.0}
    if spoiled == "weights":
        update["weights"]["a"][0, 0] = value
    else:
        update[spoiled] = {"loss": value} if spoiled == "losses" else value
    with pytest.raises(UserError, match="training diverged"):
        options.encode(update, Reference(BASE).measure(update["weights"]), BASE, of, 1)


def loss_weighted_step(loss):
    """The mean step, over the true one, of four clients with this loss and the same step."""
    options, of = SecureSum(weights="loss"), known(4)
    ends = {name: weight + 0.01 for name, weight in BASE.items()}
    sent = [{"weights": ends, "losses": {"loss": loss}, "parts": {}, "loss": loss}] * 4
    moved = summed_fold(options, sent, of)
    return float((moved["a"] - BASE["a"]).mean()) / 0.01


def test_weights_that_vanish_in_the_rounding_are_refused():
    """Of 2³² / 4 levels, the weights' sum must be 4·10⁻⁶, so losses may be ln 10⁶ = 13.8 above the least.

    There, the rounding of a step is a thousandth of the largest change of 1, a tenth of this step.
    """
    assert loss_weighted_step(13.7) == pytest.approx(1.0, abs=0.1)
    with pytest.raises(RunError, match=r"lost in the rounding .* raise options\.secure_sum\.least_loss"):
        loss_weighted_step(13.9)
    with pytest.raises(RunError, match=r"set options\.secure_sum\.weights = 'uniform'"):
        decoded(1.0, 0.0)


def test_a_client_whose_term_is_lost_in_the_rounding_does_not_spoil_the_sum():
    """Of 2³² / 100 levels and a bound of 99 · 10⁶ images, the small client's weight is below one level."""
    of = replace(setting(100), sizes=(2,) + (10**6,) * 99)
    ends = {name: weight + 0.01 for name, weight in BASE.items()}
    sent = [
        {"weights": ends, "losses": {"loss": 1.0}, "parts": {}, "samples": of.sizes[k]} for k in range(100)
    ]
    moved = summed_fold(SecureSum(), sent, of)
    torch.testing.assert_close(moved, ends, atol=1e-4, rtol=0)


def test_no_term_leaves_the_model_and_counters_are_no_part():
    assert summed_fold(SecureSum(), [], known(2)) is BASE
    weights = {**BASE, "n": torch.tensor(3), "mean": torch.zeros(2)}
    assert summed(weights, replace(known(2), local_only=frozenset({"mean"}))) == ["a", "b"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("train.bn_buffers=average", "set train.bn_buffers = 'local' or 'leave' for secure aggregation"),
        ("method.name=scaffold", "'secure_sum' covers weights only, and 'scaffold' sends more"),
        ("method.name=fedca", "'secure_sum' covers weights only"),
        ("method.name=orchestra", "'secure_sum' covers weights only"),
        ("train.keep_local_models=[1]", "must not reveal the update of a single client"),
        ("evaluation.measures=['angles']", "must not reveal the update of a single client"),
        ("train.max_share=0.5", "caps a client's weight against the others'"),
        ("train.participation=0.1", "'secure_sum' needs at least 2 updates in a round, and there are 1"),
    ],
)
def test_what_needs_single_updates_is_refused_with_a_sentence(settings, words):
    with pytest.raises(UserError) as error:
        Federation(tiny("method.aggregation=secure_sum", "train.bn_buffers=leave", settings))
    assert words in str(error.value)
