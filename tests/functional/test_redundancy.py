import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck

from atoll.functional import (
    EncodingStatistics,
    barlow_twins,
    correlation_loss,
    decorrelation,
    encoding_statistics,
    vicreg,
)

from . import oracles
from .oracles import rows

Z1 = torch.tensor([[1.0, 2.0], [3.0, 1.0], [2.0, 6.0], [6.0, 3.0]], dtype=torch.float64)
Z2 = torch.tensor([[1.0, 1.0], [2.0, 2.0], [3.0, 5.0], [7.0, 4.0]], dtype=torch.float64)


def test_barlow_twins_known():
    assert float(barlow_twins(Z1, Z2)) == pytest.approx(0.02892118, abs=5e-9)
    assert float(barlow_twins(Z1, Z2, lambd=0.005, unbiased=True)) == pytest.approx(0.22229339, abs=5e-9)


def test_barlow_twins_of_equal_views():
    assert float(barlow_twins(Z1, Z1, lambd=0.0)) == pytest.approx(0.0, abs=1e-12)
    assert float(barlow_twins(Z1, Z1, lambd=0.0, unbiased=True)) == pytest.approx(2 * 0.25**2, rel=1e-12)


def test_decorrelation_known():
    assert float(decorrelation(Z1)) == pytest.approx(0.011479592, abs=5e-10)
    with_sum = torch.cat([Z1, Z1.sum(dim=1, keepdim=True)], dim=1)
    assert float(decorrelation(with_sum)) == pytest.approx(0.70025510, abs=5e-9)


def test_decorrelation_of_decorrelated_columns_is_zero():
    h = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])
    assert float(decorrelation(h)) == pytest.approx(0.0, abs=1e-12)


@settings(max_examples=20, deadline=None)
@given(n=st.integers(2, 7), d=st.integers(1, 5), seed=st.integers(0, 99), unbiased=st.booleans())
def test_against_loops(n, d, seed, unbiased):
    z1, z2 = rows(n, d, seed), rows(n, d, seed + 1)
    expected = oracles.barlow_twins(z1, z2, 0.02, unbiased)
    assert float(barlow_twins(z1, z2, 0.02, unbiased)) == pytest.approx(expected, rel=1e-9)
    if d > 1:
        assert float(decorrelation(z1)) == pytest.approx(oracles.decorrelation(z1), rel=1e-9)


def test_barlow_twins_is_invariant_to_affine_maps_of_each_dimension():
    scale, shift = torch.tensor([0.3, 20.0]).double(), torch.tensor([5.0, -7.0]).double()
    torch.testing.assert_close(barlow_twins(Z1 * scale + shift, Z2 / scale - shift), barlow_twins(Z1, Z2))


def test_gradients():
    z1, z2 = rows(5, 3).requires_grad_(), rows(5, 3, 1).requires_grad_()
    assert gradcheck(barlow_twins, (z1, z2))
    assert gradcheck(lambda a, b: barlow_twins(a, b, 0.1, True), (z1, z2))
    assert gradcheck(decorrelation, (z1,))


@pytest.mark.parametrize("value", [0.0, 0.1, 1e6])
@pytest.mark.parametrize(
    "loss", [lambda z: barlow_twins(z, z), lambda z: barlow_twins(z, z, 1.0, True), decorrelation]
)
def test_equal_rows_are_finite(loss, value):
    """A mean of many 0.1 is not 0.1 in float32: the rounding must not be taken for a signal."""
    z = torch.full((100, 3), value).requires_grad_()
    result = loss(z)
    result.backward()
    assert result.item() in (0.0, 3.0)
    assert float(z.grad.abs().max()) == 0.0


def test_one_dimension_constant_leaves_the_others_alone():
    constant = torch.full((4, 1), 0.1, dtype=torch.float64)
    with_constant = barlow_twins(torch.cat([Z1, constant], dim=1), torch.cat([Z2, constant], dim=1))
    torch.testing.assert_close(with_constant, barlow_twins(Z1, Z2) + 1.0)


def test_single_row():
    z = torch.ones(1, 3, requires_grad=True)
    loss = decorrelation(z)
    loss.backward()
    assert loss.item() == float(z.grad.abs().max()) == 0.0
    with pytest.raises(ValueError, match=r"N >= 2, got z1 \(1, 3\)"):
        barlow_twins(z, z)


def test_bad_shapes_are_named():
    with pytest.raises(ValueError, match=r"got z1 \(2, 3\) float32, z2 \(2, 4\) float32"):
        barlow_twins(torch.ones(2, 3), torch.ones(2, 4))
    with pytest.raises(ValueError, match=r"got h \(2,\)"):
        decorrelation(torch.ones(2))


@settings(max_examples=20, deadline=None)
@given(n=st.integers(2, 7), d=st.integers(1, 5), seed=st.integers(0, 99), official=st.booleans())
def test_vicreg_against_loops(n, d, seed, official):
    z1, z2 = rows(n, d, seed) / 2, rows(n, d, seed + 1) / 2  # some deviations below 1, some above
    expected = oracles.vicreg(z1, z2, 2.0, 3.0, 5.0, official)
    assert float(vicreg(z1, z2, 2.0, 3.0, 5.0, official)) == pytest.approx(expected, rel=1e-9)


def test_vicreg_of_a_collapsed_batch_is_the_hinge_alone():
    z = torch.ones(4, 3, dtype=torch.float64)
    assert float(vicreg(z, z)) == pytest.approx(2 * 25 * (1 - 0.01), rel=1e-12)
    assert float(vicreg(z, z, official=True)) == pytest.approx(25 * (1 - 0.01), rel=1e-12)


def test_vicreg_gradients_and_bad_shapes():
    assert gradcheck(vicreg, (rows(5, 3).requires_grad_(), rows(5, 3, 1).requires_grad_()))
    with pytest.raises(ValueError, match="z1"):
        vicreg(torch.ones(1, 3), torch.ones(1, 3))


@settings(max_examples=20, deadline=None)
@given(n=st.integers(2, 7), d=st.integers(1, 5), seed=st.integers(0, 99))
def test_from_statistics_the_loss_is_that_of_the_batch(n, d, seed):
    z1, z2 = rows(n, d, seed), rows(n, d, seed + 1)
    expected = oracles.barlow_twins(z1, z2, 0.02, False)
    assert float(correlation_loss(encoding_statistics(z1, z2), 0.02)) == pytest.approx(expected, rel=1e-5)


def test_clients_gradients_on_common_statistics_add_up_to_the_gradient_on_the_union():
    """DCCO: with ⟨·⟩_T = ⟨·⟩_k + sg(⟨·⟩_A − ⟨·⟩_k), the weighted mean of the clients' gradients is the union's."""
    x1, x2 = rows(12, 4, 2), rows(12, 4, 3)
    clients = [slice(0, 1), slice(1, 4), slice(4, 12)]  # one has a single image
    weights = rows(4, 3, 4).requires_grad_()
    union = torch.autograd.grad(barlow_twins(x1 @ weights, x2 @ weights, 0.1), weights)[0]
    means = [encoding_statistics(x1[k] @ weights, x2[k] @ weights) for k in clients]
    sizes = [(k.stop - k.start) / 12 for k in clients]
    cohort = [
        sum(p * m for p, m in zip(sizes, entry, strict=True)).detach() for entry in zip(*means, strict=True)
    ]
    total = torch.zeros_like(weights)
    for size, own in zip(sizes, means, strict=True):
        mixed = EncodingStatistics(*(m + (a - m).detach() for m, a in zip(own, cohort, strict=True)))
        total += (
            size * torch.autograd.grad(correlation_loss(mixed, 0.1).double(), weights, retain_graph=True)[0]
        )
    torch.testing.assert_close(total, union, rtol=1e-5, atol=1e-7)
    alone = sum(
        size * torch.autograd.grad(correlation_loss(own, 0.1), weights, retain_graph=True)[0]
        for size, own in zip(sizes, means, strict=True)
    )
    assert (alone - union).norm() > 0.1 * union.norm()


def test_from_statistics_a_constant_dimension_leaves_the_others_alone():
    z = Z1.float()
    constant = torch.full((4, 1), 0.1)
    wide = torch.cat([z, constant], dim=1).requires_grad_()
    loss = correlation_loss(encoding_statistics(wide, wide))
    loss.backward()
    assert torch.isfinite(wide.grad).all()
    assert loss.item() == pytest.approx(float(barlow_twins(Z1, Z1)) + 1.0, rel=1e-5)


@pytest.mark.parametrize("value", [0.0, 0.1, -0.7, 1.9])
def test_from_statistics_a_dimension_constant_in_one_view_has_no_correlation_and_no_gradient(value):
    x, y = rows(333, 2, 1), rows(333, 3, 2)  # so many that the mean of equal squares is rounded
    z1 = torch.cat([x.float(), torch.full((333, 1), value)], dim=1).requires_grad_()
    loss = correlation_loss(encoding_statistics(z1, y.float()), 0.3)
    (gradient,) = torch.autograd.grad(loss, z1)
    c = torch.corrcoef(torch.cat([x, y], dim=1).T)[:2, 2:]
    expected = 1 + sum(
        (1 - c[i, j]) ** 2 if i == j else 0.3 * c[i, j] ** 2 for i in range(2) for j in range(3)
    )
    assert loss.item() == pytest.approx(float(expected), rel=1e-5)
    assert not gradient[:, 2].any()
    assert gradient[:, :2].all()


def test_from_statistics_far_from_zero_float32_embeddings_keep_their_precision():
    z1, z2 = rows(50, 3, 1).float() + 4096, rows(50, 3, 2).float() - 4096
    statistics = encoding_statistics(z1, z2)
    assert {mean.dtype for mean in statistics} == {torch.float64}
    loss = correlation_loss(statistics, 0.02)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(oracles.barlow_twins(z1.double(), z2.double(), 0.02, False), rel=1e-5)


def test_products_of_other_dimensions_are_refused():
    statistics = encoding_statistics(torch.randn(4, 3), torch.randn(4, 3))
    with pytest.raises(ValueError, match="expected product"):
        correlation_loss(statistics._replace(product=torch.ones(1, 3)))


@pytest.mark.parametrize(
    "other",
    [
        {"square1": torch.ones(1)},
        {"square2": torch.ones(4, 3)},
        {"mean2": torch.ones(4), "square2": torch.ones(4), "product": torch.ones(3, 4)},
        {"mean1": torch.ones(1, 3), "product": torch.ones(1, 3, 3)},
    ],
)
def test_statistics_that_do_not_belong_together_are_refused(other):
    statistics = encoding_statistics(torch.randn(4, 3), torch.randn(4, 3))
    with pytest.raises(ValueError, match=r"means and mean squares \(d,\), got mean1 \("):
        correlation_loss(statistics._replace(**other))
