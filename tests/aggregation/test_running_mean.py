"""Running means, and the bound on one model's share."""

import gc
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.aggregation.fedavg import FedAvg
from atoll.aggregation.loss_weighted import LossWeighted
from atoll.aggregation.running_mean import CappedMean, RunningMean
from atoll.methods.calibre import PrototypeDivergence
from atoll.methods.fedu2 import EUA
from atoll.methods.ldawa import LDAWA
from tests.folds import BUFFERS, copies, fold, model, setting
from tests.trees import same


def test_the_running_mean_is_as_exact_as_a_sum_that_is_divided():
    """Over a hundred models, no entry is farther from the float64 mean than 1e-6 of the entries' size."""
    draw = torch.Generator().manual_seed(0)
    models = torch.randn(100, 2000, generator=draw) + 3
    sizes = torch.randint(1, 1000, (100,), generator=draw).tolist()
    mean, total = RunningMean(), torch.zeros(2000)
    for row, size in zip(models, sizes, strict=True):
        mean.add({"x": row}, size)
        total += size * row
    exact = (torch.tensor(sizes).double() @ models.double()) / sum(sizes)
    error = float((mean.mean["x"].double() - exact).abs().max())
    plain = float(((total / sum(sizes)).double() - exact).abs().max())
    assert error < 3e-6
    assert error < 3 * plain


def capped_shares(weights, share):
    """The shares by bisection for c in float64; equal ones if fewer than 1/s models take part."""
    if len(weights) * share <= 1:
        return [1 / len(weights)] * len(weights)
    low, high = 0.0, max(weights)
    for _ in range(200):
        c = (low + high) / 2
        low, high = (low, c) if c > share * math.fsum(min(w, c) for w in weights) else (c, high)
    capped = [min(w, high) for w in weights]
    return [w / math.fsum(capped) for w in capped]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=12),
    st.sampled_from([0.05, 0.1, 0.25, 1 / 3, 0.4, 0.5, 0.9]),
)
def test_no_model_has_more_than_its_share(weights, share):
    """Each model is a unit vector, so that the mean is the shares."""
    mean = CappedMean(share)
    for row, weight in zip(torch.eye(len(weights), dtype=torch.float64), weights, strict=True):
        mean.add({"x": row}, weight)
        row.zero_()  # the caller may overwrite it
    shares = mean.close().mean["x"]
    assert float(shares.sum()) == pytest.approx(1)
    if len(weights) * share > 1 + 1e-6:
        assert float(shares.max()) <= share + 1e-9
    if abs(len(weights) * share - 1) > 1e-6:
        assert shares.tolist() == pytest.approx(capped_shares(weights, share), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(("share", "room"), [(1.0, 0), (0.5, 2), (1 / 3, 3), (0.05, 20)])
def test_only_models_that_a_bound_may_cap_are_kept(share, room):
    """Of a hundred models, the mean itself and the heaviest ones are in memory."""
    mean = CappedMean(share)
    for weight in torch.randperm(100).tolist():
        mean.add({"x": torch.zeros(2, 3, 5, 7)}, weight + 1)
    kept = [each for each in gc.get_objects() if type(each) is torch.Tensor and each.shape == (2, 3, 5, 7)]
    assert len(kept) == room + 1


@pytest.mark.parametrize("share", [0.3, 0.4, 1.0])
def test_a_bound_on_the_weights_of_falling_losses(share):
    """Each lower loss makes all earlier weights smaller, also those that wait for the cap."""
    models, losses = [model(k) for k in range(5)], [1.0, 0.0, -1.0, -2.5, -2.0]
    found = fold(LossWeighted(), models[0], copies(models), max_share=share, loss=losses)
    shares = capped_shares([math.exp(-loss) for loss in losses], share)
    for name in ("conv.weight", "bn.running_mean"):
        expected = sum(p * m[name].double() for p, m in zip(shares, models, strict=True))
        torch.testing.assert_close(found[name].double(), expected, rtol=1e-5, atol=1e-6)


def test_a_client_that_says_it_has_all_images_has_its_share():
    models = [model(k) for k in range(4)]
    mean = fold(FedAvg(), models[0], copies(models), max_share=0.4, samples=[20_000_000, 30, 20, 10])
    shares = [0.4, 0.3, 0.2, 0.1]
    for name in ("conv.weight", "bn.running_mean"):
        expected = sum(share * m[name].double() for share, m in zip(shares, models, strict=True))
        torch.testing.assert_close(mean[name].double(), expected, rtol=1e-5, atol=1e-6)
    lowest = fold(LossWeighted(), models[0], copies(models), max_share=0.4, loss=[-90.0, 0.0, 0.0, 0.0])
    for name in ("conv.weight", "bn.running_mean"):
        expected = sum(
            share * m[name].double() for share, m in zip([0.4, 0.2, 0.2, 0.2], models, strict=True)
        )
        torch.testing.assert_close(lowest[name].double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("share", [0.26, 0.5])
def test_l_dawa_uses_the_capped_shares(share):
    """Capped p_k by hand: L-DAWA with these as its numbers of samples gives the same."""
    models = [model(k) for k in range(4)]
    samples = [1000, 30, 20, 10]
    by_hand = capped_shares(samples, share)
    capped = fold(LDAWA(weights="samples"), model(9), copies(models), max_share=share, samples=samples)
    plain = fold(LDAWA(weights="samples"), model(9), copies(models), samples=by_hand)
    for name in ("conv.weight", "conv.bias", "bn.running_var"):
        torch.testing.assert_close(capped[name], plain[name], rtol=1e-4, atol=1e-6)


def test_l_dawas_warm_up_caps_the_shares_of_samples():
    models = [model(k) for k in range(4)]
    samples = [1000, 30, 20, 10]
    shares = capped_shares(samples, 0.4)
    dawa = LDAWA(warmup_rounds=2)
    warm = fold(dawa, model(9), copies(models), round=2, max_share=0.4, samples=samples)
    for name in ("conv.weight", "conv.bias", "bn.running_var"):
        expected = sum(share * m[name].double() for share, m in zip(shares, models, strict=True))
        torch.testing.assert_close(warm[name].double(), expected, rtol=1e-5, atol=1e-6)


def test_eua_averages_buffers_with_capped_shares():
    models = [model(k) for k in range(4)]
    samples = [1000, 30, 20, 10]
    capped = fold(EUA(), model(9), copies(models), buffers=BUFFERS, max_share=0.4, samples=samples)
    free = fold(EUA(), model(9), copies(models), buffers=BUFFERS, samples=samples)
    for name in ("bn.running_mean", "bn.running_var"):
        for found, shares in (
            (capped, capped_shares(samples, 0.4)),
            (free, [n / sum(samples) for n in samples]),
        ):
            expected = sum(share * m[name].double() for share, m in zip(shares, models, strict=True))
            torch.testing.assert_close(found[name].double(), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(capped["conv.weight"], free["conv.weight"])  # weights have no shares


def test_calibre_caps_the_shares_of_samples_over_divergence():
    models, samples, divergences = [model(k) for k in range(4)], [100, 30, 20, 10], [0.5, 2.0, 0.01, 1.0]
    raw = [100 / 0.5, 30 / 2.0, 20 / 0.05, 10 / 1.0]  # no divergence counts as less than 0.05
    for share in (0.4, 1.0):
        aggregation = PrototypeDivergence()
        opened = aggregation.open({"global": model(9)}, setting(4, max_share=share), 1, None)
        for client, weights in enumerate(copies(models)):
            parts = {aggregation.name: divergences[client]}
            update = {"weights": weights, "losses": {}, "parts": parts, "samples": samples[client]}
            opened.add(client, update)
        found = opened.close()["global"]
        shares = capped_shares(raw, share)
        for name in ("conv.weight", "bn.running_mean"):
            expected = sum(p * m[name].double() for p, m in zip(shares, models, strict=True))
            torch.testing.assert_close(found[name].double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("aggregation", [FedAvg(), LossWeighted(), LDAWA(weights="samples")])
def test_without_a_bound_nothing_changes(aggregation):
    models = [model(k) for k in range(4)]
    numbers = {"samples": [4, 3, 2, 1], "loss": [0.4, 0.3, 0.2, 0.1]}
    plain = fold(aggregation, model(9), copies(models), **numbers)
    assert same(fold(aggregation, model(9), copies(models), max_share=1.0, **numbers), plain)
