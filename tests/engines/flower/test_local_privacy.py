"""Noise at the site: its size, its clipping, and ε."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("flwr", reason="the extra atoll[flower] is not installed")

import torch

from atoll.core.errors import UserError
from atoll.engines.flower.local_privacy import LocalPrivacy, joint_epsilon


@pytest.fixture
def model():
    draws = torch.Generator().manual_seed(0)
    return {name: torch.randn(200, 300, generator=draws) for name in ("a", "b")}


@pytest.mark.parametrize("length", [0.5, 40.0])
def test_the_step_is_clipped_and_the_noise_has_its_size(model, length):
    direction = {name: torch.ones_like(weight) for name, weight in model.items()}
    scale = length / math.sqrt(120_000)
    moved = {name: weight + scale * direction[name] for name, weight in model.items()}
    privacy = LocalPrivacy(clip=2.0, noise_multiplier=0.001)
    noisy = privacy.apply(moved, model)
    step = torch.cat([(noisy[name] - model[name]).double().flatten() for name in model])
    expected = min(length, 2.0) / math.sqrt(120_000)
    assert step.mean() == pytest.approx(expected, abs=5 * 0.002 / math.sqrt(120_000))
    assert step.std() == pytest.approx(0.002, rel=0.02)


def test_noise_differs_each_time_and_the_weights_are_unchanged(model):
    before = {name: weight.clone() for name, weight in model.items()}
    privacy = LocalPrivacy(clip=1.0, noise_multiplier=1.0)
    one, two = privacy.apply(model, model), privacy.apply(model, model)
    assert not torch.equal(one["a"], two["a"])
    assert not torch.equal(one["a"] - model["a"], one["b"] - model["b"])
    assert all(torch.equal(model[name], before[name]) for name in model)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_step_that_diverged_leaves_as_noise_alone(model, value):
    moved = {name: weight.clone() for name, weight in model.items()}
    moved["a"][0, 0] = value
    noisy = LocalPrivacy(clip=1.0, noise_multiplier=0.5).apply(moved, model)
    step = torch.cat([(noisy[name] - model[name]).double().flatten() for name in model])
    assert step.isfinite().all()
    assert step.std() == pytest.approx(0.5, rel=0.02)
    assert abs(step.mean()) < 5 * 0.5 / math.sqrt(120_000)


def test_whole_numbers_leave_as_they_came(model):
    received = {**model, "index": torch.arange(3)}
    noisy = LocalPrivacy(clip=1.0, noise_multiplier=1.0).apply(
        {**model, "index": torch.tensor([7, 8, 9])}, received
    )
    assert torch.equal(noisy["index"], received["index"])
    assert not torch.equal(noisy["a"], model["a"])


def test_without_weights_nothing_leaves(model):
    assert LocalPrivacy(clip=1.0, noise_multiplier=1.0).apply({}, model) == {}


def test_epsilon_is_that_of_the_gaussian_between_any_two_sets_of_images():
    """Steps of norm C lie up to 2C apart: sensitivity 2C at noise zC. The exact ε of that is below RDP's bound."""
    pytest.importorskip("dp_accounting", reason="the extra atoll[dp] is not installed")
    privacy = LocalPrivacy(clip=3.0, noise_multiplier=4.0, delta=1e-5)

    def delta(epsilon, distance):  # Balle and Wang 2018, Theorem 5
        phi = torch.distributions.Normal(0.0, 1.0).cdf
        a, b = distance / 2 - epsilon / distance, -distance / 2 - epsilon / distance
        return float(phi(torch.tensor(a))) - math.exp(epsilon) * float(phi(torch.tensor(b)))

    epsilon = privacy.epsilon(1)
    assert delta(epsilon, 2 / 4.0) < 1e-5
    assert delta(0.7 * epsilon, 2 / 4.0) > 1e-5  # within 30% of the best
    assert privacy.epsilon(10) > 2 * epsilon


def test_noise_of_different_size_is_accounted_for_update_by_update():
    pytest.importorskip("dp_accounting", reason="the extra atoll[dp] is not installed")
    from dp_accounting import GaussianDpEvent, rdp

    accountant = rdp.RdpAccountant([*range(2, 65), 80, 96, 128, 192, 256, 512])
    for z in (0.7, 3.0, 3.0, 20.0):
        accountant.compose(GaussianDpEvent(z / 2))
    assert joint_epsilon([0.7, 3.0, 3.0, 20.0], 1e-6) == pytest.approx(accountant.get_epsilon(1e-6), rel=1e-9)


def test_a_clip_of_nothing_is_refused():
    with pytest.raises(UserError, match=r"policy\.privacy\.clip"):
        LocalPrivacy(clip=0.0, noise_multiplier=1.0)
