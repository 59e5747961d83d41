import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck

from atoll.functional import adaptive_mmd, mean_distance, mmd

from . import oracles
from .oracles import rows

sizes = st.integers(2, 6)


@settings(max_examples=20, deadline=None)
@given(n=sizes, m=sizes, d=st.integers(1, 4), seed=st.integers(0, 99), sigma=st.sampled_from([0.3, 1.0, 4.0]))
def test_against_loop(n, m, d, seed, sigma):
    x, y = rows(n, d, seed), 2 * rows(m, d, seed + 1) + 1
    assert float(mean_distance(x)) == pytest.approx(oracles.mean_distance(x), rel=1e-9)
    assert float(mmd(x, y, sigma)) == pytest.approx(oracles.mmd(x, y, sigma), rel=1e-9, abs=1e-12)
    adaptive = oracles.mmd(x, y, oracles.mean_distance(x))
    assert float(adaptive_mmd(x, y)) == pytest.approx(adaptive, rel=1e-9, abs=1e-12)


def test_of_two_points_the_values_are_known():
    x = torch.tensor([[0.0], [2.0]]).double()
    assert float(mmd(x, x, 2.0)) == pytest.approx(math.exp(-1 / 2) - 1)
    assert float(adaptive_mmd(x, x + 1e6)) == pytest.approx(2 * math.exp(-1 / 2))
    assert float(mmd(x, x + 1e6, 1e-3)) == 0


def test_of_samples_of_one_distribution_it_is_zero_on_average():
    same = [float(mmd(rows(20, 3, 2 * seed), rows(20, 3, 2 * seed + 1), 2.0)) for seed in range(200)]
    apart = [float(mmd(rows(20, 3, 2 * seed), rows(20, 3, 2 * seed + 1) + 1, 2.0)) for seed in range(200)]
    assert abs(sum(same) / 200) < 3 * torch.tensor(same).std() / math.sqrt(200)
    assert sum(apart) / 200 > 0.2


def test_scale_and_place_of_the_batch_do_not_matter():
    z, reference = rows(5, 3), rows(6, 3, 1) + 1
    expected = float(adaptive_mmd(z, reference))
    assert float(adaptive_mmd(1e3 * z, 1e3 * reference)) == pytest.approx(expected)
    far = adaptive_mmd((z + 1e3).float(), (reference + 1e3).float())
    assert float(far) == pytest.approx(expected, abs=1e-3)  # the inputs' own rounding


def test_gradients():
    y = rows(4, 3, 1)
    assert gradcheck(lambda x: mmd(x, y, 1.3), (rows(5, 3).requires_grad_(),))
    z, reference = rows(5, 3).requires_grad_(), y.requires_grad_()
    (given,) = torch.autograd.grad(adaptive_mmd(z, reference), z)
    (expected,) = torch.autograd.grad(mmd(z, y.detach(), oracles.mean_distance(z.detach())), z)
    torch.testing.assert_close(given, expected)  # the bandwidth is a constant
    assert not adaptive_mmd(z.detach(), reference).requires_grad


def test_the_gradient_of_the_mean_distance_is_finite_where_rows_are_equal():
    apart = rows(5, 3).requires_grad_()
    assert gradcheck(mean_distance, (apart,))
    twins = torch.tensor([[1.0, 2.0], [1.0, 2.0], [4.0, 6.0]], dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(mean_distance(twins), twins)
    away = (
        torch.tensor([3.0, 4.0], dtype=torch.float64) / 5 / 3
    )  # 1 of 3 pairs, both of whose rows move apart
    torch.testing.assert_close(gradient, torch.stack([-away, -away, 2 * away]))


def test_a_collapsed_batch_has_a_finite_loss_and_gradient():
    z = torch.ones(3, 2, requires_grad=True)
    for reference in (torch.ones(4, 2), torch.zeros(4, 2)):
        loss = adaptive_mmd(z, reference)
        (gradient,) = torch.autograd.grad(loss, z)
        assert torch.isfinite(loss)
        assert torch.isfinite(gradient).all()


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match=r"with N >= 2, got x \(1, 3\)"):
        mmd(torch.ones(1, 3), torch.ones(2, 3), 1.0)
    with pytest.raises(ValueError, match=r"shape \(M, 3\) with M >= 2, got y \(2, 4\)"):
        mmd(torch.ones(2, 3), torch.ones(2, 4), 1.0)
    with pytest.raises(ValueError, match=r"one bandwidth, got bandwidth \(2, 1\)"):
        mmd(torch.ones(2, 3), torch.ones(2, 3), torch.ones(2, 1))
    with pytest.raises(ValueError, match=r"with N >= 2, got z \(1, 3\)"):
        mean_distance(torch.ones(1, 3))
