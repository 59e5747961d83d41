import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck

from atoll.functional import clipped_correlation, spectral_contrast

from . import oracles
from .oracles import rows


def test_known():
    z = torch.eye(2).double()
    assert float(spectral_contrast(z, z)) == pytest.approx(-1.5, rel=1e-12)
    assert float(spectral_contrast(z, z, others=0.5 * z, share=0.2)) == pytest.approx(-1.1, rel=1e-12)


@settings(max_examples=20, deadline=None)
@given(
    n=st.integers(1, 6),
    d=st.integers(1, 5),
    seed=st.integers(0, 99),
    mu=st.sampled_from([0.5, 2.0, 40.0]),
    share=st.sampled_from([0.0, 0.2, 1.0]),
)
def test_against_loops(n, d, seed, mu, share):
    z1, z2, others = rows(n, d, seed), rows(n, d, seed + 1), rows(d, d, seed + 2)
    expected = oracles.spectral_contrast(z1, z2, mu, others, share)
    found = float(spectral_contrast(z1, z2, mu, others, share))
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-12)
    matrix = sum(torch.outer(u, u) for u in torch.tensor(oracles.clipped(z1, mu), dtype=torch.float64)) / n
    torch.testing.assert_close(clipped_correlation(z1, mu), matrix, rtol=1e-9, atol=1e-12)


def test_rows_are_clipped_to_norm_two_by_default():
    """FedSC's μ of 4."""
    long = 5 * torch.eye(2).double()
    assert torch.equal(clipped_correlation(long), 2 * torch.eye(2))
    assert spectral_contrast(long, long) == spectral_contrast(long, long, mu=4.0) == 2 * 2**2 - 2 * 4


def test_one_row_changes_the_matrix_by_no_more_than_its_bound():
    z = 10 * rows(8, 4)
    other = z.clone()
    other[3] = -100 * rows(1, 4, 5)[0]
    moved = clipped_correlation(z, 2.0) - clipped_correlation(other, 2.0)
    assert 0 < float(moved.norm()) <= 2 * 2.0 / 8


def test_gradients():
    z1, z2 = rows(5, 3).requires_grad_(), rows(5, 3, 1).requires_grad_()
    others = rows(3, 3, 2)
    assert gradcheck(lambda a, b: spectral_contrast(a, b, 2.0, others, 0.3), (z1, z2))
    zero = torch.zeros(2, 3, requires_grad=True)
    spectral_contrast(zero, zero).backward()
    assert torch.equal(zero.grad, torch.zeros(2, 3))


def test_bad_arguments_are_named():
    z = torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"expected shape \(3, 3\), got others \(2, 2\)"):
        spectral_contrast(z, z, others=torch.ones(2, 2))
    for pair in ((z, z[:1]), (z[:1], z)):  # PyTorch would repeat the row
        with pytest.raises(ValueError, match=r"of one shape \(N, d\)"):
            spectral_contrast(*pair)
    with pytest.raises(ValueError, match=r"got z \(3,\)"):
        clipped_correlation(z[0])
    with pytest.raises(ValueError, match="mu must be above 0"):
        clipped_correlation(z, mu=0.0)
