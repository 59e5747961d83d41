import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck
from torch.nn.functional import normalize

from atoll.functional import sigreg

from . import oracles
from .oracles import rows


@settings(max_examples=20, deadline=None)
@given(
    n=st.integers(1, 6),
    d=st.integers(1, 4),
    seed=st.integers(0, 99),
    limit=st.sampled_from([3.0, 5.0]),
    points=st.sampled_from([2, 9, 17]),
)
def test_against_loop(n, d, seed, limit, points):
    z, slices = rows(n, d, seed), normalize(rows(3, d, seed + 1))
    expected = oracles.sigreg(z, slices, limit, points)
    assert float(sigreg(z, slices, limit, points)) == pytest.approx(expected, rel=1e-9)


def test_of_a_collapsed_batch():
    """φ̂ = 1, so the integral is √2π (1 − 2/√2 + 1/√3)."""
    expected = 7 * math.sqrt(2 * math.pi) * (1 - math.sqrt(2) + 1 / math.sqrt(3))
    loss = sigreg(torch.zeros(7, 5).double(), torch.eye(5).double(), 12.0, 99)
    assert float(loss) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("n", [8, 64])
def test_of_gaussian_embeddings_the_expectation_is_known(n):
    """E N|φ̂ − φ|² = 1 − e^(−t²), so the expectation is √2π (1 − 1/√3), whatever N; anything else is larger."""
    draws = [float(sigreg(rows(n, 6, seed), torch.eye(6).double())) for seed in range(200)]
    assert sum(draws) / 200 == pytest.approx(math.sqrt(2 * math.pi) * (1 - 1 / math.sqrt(3)), rel=0.05)
    scaled = [float(sigreg(2 * rows(n, 6, seed), torch.eye(6).double())) for seed in range(200)]
    assert sum(scaled) > 1.5 * sum(draws)


def test_gradients():
    slices = normalize(rows(4, 3, 1))
    assert gradcheck(lambda z: sigreg(z, slices), (rows(5, 3).requires_grad_(),))


def test_bad_arguments_are_named():
    with pytest.raises(
        ValueError, match=r"expected float shape \(M, 3\) with M >= 1, got directions \(4, 2\)"
    ):
        sigreg(torch.ones(2, 3), torch.ones(4, 2))
    with pytest.raises(ValueError, match="points must be at least 2, got 1"):
        sigreg(torch.ones(2, 3), torch.ones(4, 3), points=1)
    with pytest.raises(ValueError, match="limit must be above 0"):
        sigreg(torch.ones(2, 3), torch.ones(4, 3), limit=0.0)
