import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck

from atoll.functional import fedquad, quadruplet, triplet

from .oracles import hinges, rows

ANCHOR, POSITIVE, N1, N2 = torch.tensor(
    [[[0.0, 0.0]], [[1.0, 0.0]], [[1.5, 0.0]], [[0.0, 1.2]]], dtype=torch.float64
)


def test_known():
    assert float(fedquad(ANCHOR, POSITIVE, N1, N2)) == pytest.approx(0.8, rel=1e-12)
    assert float(fedquad(ANCHOR, POSITIVE, N1, N2, power=2)) == pytest.approx(0.06, abs=1e-12)
    assert float(quadruplet(ANCHOR, POSITIVE, N1, N2, power=1)) == pytest.approx(0.5, rel=1e-12)
    assert float(quadruplet(ANCHOR, POSITIVE, N1, N2)) == 0.0
    assert float(triplet(ANCHOR, POSITIVE, N1)) == pytest.approx(0.5, rel=1e-12)


@settings(max_examples=20, deadline=None)
@given(n=st.integers(1, 6), d=st.integers(1, 5), seed=st.integers(0, 99), power=st.sampled_from([1, 2]))
def test_against_loops(n, d, seed, power):
    a, p, n1, n2 = (rows(n, d, seed + s) for s in range(4))
    margins = (0.7, 1.3)
    expected = hinges(a, p, [(a, n1), (a, n2)], margins, power)
    assert float(fedquad(a, p, n1, n2, margins, power)) == pytest.approx(expected, rel=1e-10, abs=1e-12)
    expected = hinges(a, p, [(a, n1), (n2, n1)], margins, power)
    assert float(quadruplet(a, p, n1, n2, margins, power)) == pytest.approx(expected, rel=1e-10, abs=1e-12)
    expected = hinges(a, p, [(a, n1)], (0.4,), 1)
    assert float(triplet(a, p, n1, 0.4)) == pytest.approx(expected, rel=1e-10, abs=1e-12)


def test_gradients():
    inputs = tuple(rows(4, 3, s).requires_grad_() for s in range(4))
    assert gradcheck(triplet, inputs[:3])
    for power in (1, 2):
        assert gradcheck(lambda *x, k=power: fedquad(*x, power=k), inputs)
        assert gradcheck(lambda *x, k=power: quadruplet(*x, power=k), inputs)


@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize("n", [1, 4])
def test_coinciding_points_have_finite_gradients(power, n):
    """A class of one sample is its own positive, so the distance 0 does occur."""
    inputs = [torch.zeros(n, 3, requires_grad=True) for _ in range(3)]
    value = triplet(*inputs)
    value.backward()
    assert value.item() == 1.0
    assert all(float(x.grad.abs().max()) == 0.0 for x in inputs)
    for loss in (fedquad, quadruplet):
        inputs = [torch.zeros(n, 3, requires_grad=True) for _ in range(4)]
        value = loss(*inputs, power=power)
        value.backward()
        assert value.item() == 1.5
        assert all(float(x.grad.abs().max()) == 0.0 for x in inputs)


def test_zero_when_negatives_are_far():
    far = torch.full((3, 2), 9.0).double()
    near = torch.zeros(3, 2).double()
    assert float(fedquad(near, near, far, -far)) == 0.0
    assert float(triplet(near, near, far)) == 0.0


def test_bad_arguments():
    x = torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"n2 \(2, 4\)"):
        fedquad(x, x, x, torch.ones(2, 4))
    for loss, count in ((triplet, 3), (quadruplet, 4), (fedquad, 4)):
        for short in range(count):  # PyTorch would repeat the row
            with pytest.raises(ValueError, match=r"of one shape \(N, d\) .*\(1, 3\)"):
                loss(*(x[:1] if k == short else x for k in range(count)))
    with pytest.raises(ValueError, match=r"n \(3, 3\)"):
        triplet(x, x, torch.ones(3, 3))
    with pytest.raises(ValueError, match="power must be 1"):
        quadruplet(x, x, x, x, power=3)
